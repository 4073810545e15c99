"""What a person's file leaves to be written, and the course lends, so that training runs all the same."""

import ast
import inspect
import textwrap
from types import FunctionType, ModuleType, SimpleNamespace


def fill_in(implementation: SimpleNamespace, solution: ModuleType) -> list[str]:
    """Put the course's functions and classes in the place of those that are still to be written; their names.

    The file's other code gets them as well: a finished class may call an unfinished function.
    """
    lent = {
        name: getattr(solution, name)
        for name, thing in vars(implementation).items()
        if thing is not getattr(solution, name, thing) and unfinished(thing)
    }
    for name, ours in lent.items():
        for function in _functions_of(getattr(implementation, name)):
            function.__globals__[name] = ours
        setattr(implementation, name, ours)
    return list(lent)


def unfinished(thing: object) -> bool:
    """Whether a function, or a method of a class, has nothing in it but `raise NotImplementedError`."""
    return any(map(_is_stub, _functions_of(thing)))


def _functions_of(thing: object) -> list[FunctionType]:
    members = vars(thing).values() if isinstance(thing, type) else [thing]
    opened = (getattr(member, "__func__", getattr(member, "fget", member)) for member in members)
    unwrapped = [inspect.unwrap(member) for member in opened if callable(member)]
    return [function for function in unwrapped if isinstance(function, FunctionType)]


def _is_stub(function: FunctionType) -> bool:
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError):
        return False
    if not isinstance(definition, ast.FunctionDef):
        return False
    body = definition.body[1:] if ast.get_docstring(definition) is not None else definition.body
    raised = body[0].exc if len(body) == 1 and isinstance(body[0], ast.Raise) else None
    error = raised.func if isinstance(raised, ast.Call) else raised
    return isinstance(error, ast.Name) and error.id == "NotImplementedError"
