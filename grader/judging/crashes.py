"""What the words of an error mean: torch says what it can not do, and seldom why it was asked to.

A cause is said where the words leave one alone; where they leave several, the next step says where to look.
"""

import re
from collections.abc import Sequence

from grader.judging.group_and_world import NOT_IN_THE_GROUP, NOT_OF_THE_GROUP, NOT_OF_TORCHS_GROUP

_NOT_CONTIGUOUS = r"[Tt]ensors? (must|has to) be contiguous"
_NOT_OF_THE_GROUP = r"Global rank \d+ is not part of group"
_KNOWN: Sequence[tuple[str, str, str]] = (
    (
        r"network is unreachable|name resolution|name or service not known|^URLError|^gaierror",
        "",
        "A submission can not count on the network: there is none where it is graded.",
    ),
    (
        r"^RecursionError",
        "a call leads back to itself, and so on without end",
        "Does a new forward call the very module that it was given to? Call what the module's forward was "
        "before: `inside = block.forward`, and then `inside(x)` where `block(x)` stands.",
    ),
    (
        r"save_for_backward can only save",
        "ctx.save_for_backward was handed something that is no tensor: it takes tensors and None alone",
        "Numbers, words and lists are kept as attributes: ctx.others = ...",
    ),
    (
        r"cannot register a hook on a tensor that doesn't require grad",
        "it registers a hook on a tensor that needs no gradient, such as a frozen parameter, or any under "
        "no_grad",
        "Ask the tensor's requires_grad first: where it is False no gradient comes, and there is nothing to "
        "hook.",
    ),
    (
        r"element 0 of tensors does not require grad",
        "backward was called on something that no graph leads to: it was computed with gradients switched "
        "off, or from what is detached",
        "Inside an autograd.Function's forward and backward, and in hooks of backward, gradients are off: "
        "torch.enable_grad() switches them on, and inputs need requires_grad_().",
    ),
    (
        r"backward through the graph a second time|have already been freed",
        "two backwards go through one graph: the first of them freed what it had kept",
        "One backward for all that share a graph; or detach where the second one's part begins.",
    ),
    (
        r"checkpoint(ing)? is (incompatible|not compatible) with \.grad\(\)",
        "gradients are asked for by torch.autograd.grad, or backward(inputs=...), and a reentrant checkpoint "
        "works for loss.backward() alone",
        "use_reentrant=False: a reentrant checkpoint also gives no gradient to what is not among its inputs, "
        "and none to anything where no input needs one.",
    ),
    (
        r"modified by an inplace operation",
        "a tensor that backward needs was changed in place after it had been used",
        "Work on a new tensor, or on a clone: `x = x + y` where `x += y` stands. A collective changes its "
        "tensor in place, too.",
    ),
    (
        r"is a view and is being modified inplace\. This view was created inside a custom Function",
        "what an autograd.Function returned is its input as it was, or a view of it, and it is changed in "
        "place: autograd would lose the Function's backward",
        "Make a new tensor: `y = y + bias` where `y += bias` stands.",
    ),
    (
        r"leaf Variable that requires grad has been used in an in-place",
        "an autograd.Function's forward changes one of its inputs in place, and says so by ctx.mark_dirty: "
        "the input is the caller's own tensor",
        "Work on a clone of it, without mark_dirty.",
    ),
    (
        r"leaf Variable that requires grad is being|view of a leaf Variable",
        "a parameter, or another tensor that asks for a gradient, is changed in place where autograd watches",
        "Change it under torch.no_grad(), or change its .detach().",
    ),
    (
        r"grad can be implicitly created only for scalar outputs",
        "backward was called on a tensor of several numbers, and was not given the gradient that comes in",
        "tensor.backward(gradient), or torch.autograd.backward(tensor, gradient).",
    ),
    (
        r"returned an incorrect number of gradients",
        "the autograd.Function's backward does not return one value for each argument of forward",
        "Return None for what is no tensor, such as the group.",
    ),
    (
        r"returned a gradient different than None at position \d+, but .* was not a Variable",
        "backward returns a gradient for an argument of forward that was no tensor, such as bias=None",
        "Return None in its place: ctx.needs_input_grad says what needs one.",
    ),
    (
        r"returned an invalid gradient at index \d+ - got \[(\d+), (\d+)\] but expected .* \[\2, \1\]",
        "a matrix's gradient is transposed: it has the shape of the matrix itself",
        "Swap the two factors of the product, and transpose the other one.",
    ),
    (
        r"returned an invalid gradient at index \d+ - got .* but expected shape",
        "the gradient that backward returns has not the shape of forward's input",
        "What forward gathered or summed up, backward cuts; what it cut, backward puts together.",
    ),
    (
        r"(expected m1 and m2|mat1 and mat2 (to|must)) .*dtype|expected scalar type",
        "numbers of two dtypes are multiplied: outside of autocast, nobody casts one to the other",
        "Which of the two was cast, or computed under autocast, and which was not?",
    ),
    (
        _NOT_CONTIGUOUS,
        "a tensor was sent that does not lie in one piece of memory, or lies there in another order than its "
        "elements have: only contiguous ones travel",
        "Send x.contiguous(): reshape(-1) may give a view, which lies no better. Only where x itself is to "
        "hold what arrives, copy that back into x.",
    ),
    (
        r"view size is not compatible",
        "view() of a tensor that does not lie in one piece of memory",
        "reshape() and flatten() copy where they must.",
    ),
    (
        r"Target -1 is out of bounds",
        "a target of -1, which does not count, was taken for a token",
        "F.cross_entropy(..., ignore_index=-1) leaves it out.",
    ),
    (
        r"Expected input batch_size \(\d+\) to match target batch_size",
        "",
        "Of which positions are these logits? Without targets, the model computes those of the last one "
        "alone: model(tokens, targets) returns all of them, and the loss.",
    ),
    (
        r"outputShape\[0\] \* worldSize == inputShape\[0\]",
        "",
        "The input of a reduce-scatter is its output times the ranks of its group, along the first "
        "dimension: is it to be cut along another one, or was it cut, or padded, for another number of "
        "ranks?",
    ),
    (
        r"allgather: invalid output tensor list at index \d+ \(expected length",
        "",
        "The output of an all-gather is its input times the ranks of its group, along the first dimension, "
        "or a list of one tensor a rank: is it to be joined along another dimension?",
    ),
    (
        r"allgather: invalid tensor size at index \d+ \(expected \((.*)\), got \(1, \1\)\)",
        "all_gather_into_tensor was given an output of (n, ...): gloo joins along the first dimension alone",
        "For an input of (k, ...) the output is (n·k, ...); .view(n, k, ...) takes it apart again.",
    ),
    (
        r"index out of range in self|index \d+ is out of bounds for dimension",
        "a row is looked up that is not there",
        "Is it a number of the whole, where this rank's part is shorter, or -1, which is ignored? Subtract "
        "the part's first index, and mask what lies outside of it.",
    ),
    (
        _NOT_OF_THE_GROUP,
        NOT_OF_THE_GROUP,
        "Count in the group, with group.rank() and group.size(), and pass group_src=, group_dst= or "
        "group_peer= (of P2POp, too).",
    ),
    (
        r"Group rank \d+ is not part of group",
        NOT_IN_THE_GROUP,
        "group.rank() is this rank in the group, dist.get_rank() in the world; after the last one comes 0 "
        "again: % group.size().",
    ),
    (
        r"deepcopy protocol|Only Tensors created explicitly by the user",
        "a tensor that has a graph was copied with deepcopy",
        "Copy a parameter, or x.detach().clone().",
    ),
)


_WITHOUT_RANKS = {
    "a row is looked up that is not there": "Is it -1, which is ignored, or a number beyond the last row?",
    "a tensor that backward needs was changed in place after it had been used": "Work on a new tensor, or on "
    "a clone: `x = x + y` where `x += y` stands.",
}
"""The next step after a cause, for an exercise that knows of no ranks."""


_RECEIVED_INTO = (
    "the tensor that something is received into does not lie in one piece of memory: torch.empty_like and "
    "clone() lay it out as what they are given",
    "Receive into torch.empty(shape, dtype=..., device=...) or x.new_empty(shape), and copy from there.",
)


_SENDS_TO_ITSELF = re.compile(r"Pair is not connected")
_NONE = re.compile(r"'?NoneType'?")
_GRADIENT = re.compile(r"\.grad\b")


_GATHERED = re.compile(
    r"allgather: invalid tensor size at index \d+ \(expected \(([\d, ]+)\), got \(([\d, ]+)\)\)"
)
_ALONG_ANOTHER = (
    "The output of an all-gather is its input times the ranks of its group, along the first dimension: is it "
    "to be joined along another one? Gather along the first, or into a list, and then join."
)


def _is_joined_along_another(shapes: re.Match[str]) -> bool:
    """Whether what was cut along the first dimension is a part there, and a whole along one other."""
    part, found = ([int(size) for size in shape.split(",") if size.strip()] for shape in shapes.groups())
    if len(part) != len(found) or found[0] >= part[0]:
        return False
    wider = [(a, b) for a, b in zip(part[1:], found[1:], strict=True) if a != b]
    return len(wider) == 1 and all(0 < a < b and b % a == 0 for a, b in wider)


_SIZES = re.compile(r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)")


def _times_too_wide(given: int, taken: int) -> tuple[str, str]:
    """Of a product whose two sizes do not meet: one is a multiple of the other, as parts and wholes are."""
    for large, small, one, other in ((given, taken, "input", "matrix"), (taken, given, "matrix", "input")):
        if small and large > small and large % small == 0:
            return (
                f"the {one} of a product is {large} wide, the {other} {small}, {large // small} times less: "
                f"the {one} is whole where one part of {large // small} belongs, or the {other} is cut where "
                "it should be whole",
                "Which of them should be this rank's part, and which whole? A gather makes whole what a cut "
                "layer reads in parts.",
            )
    return "", f"The input of a product is {given} wide, and the matrix takes {taken}."


def sends_to_itself(message: str) -> bool:
    """Whether an error is gloo's about a message to the rank itself: what it was meant for is not in it."""
    return bool(_SENDS_TO_ITSELF.search(message))


def _to_itself(num_ranks: int) -> tuple[str, str]:
    if num_ranks == 1:
        return (
            "a message is sent where there is one rank alone: it goes to the rank itself",
            "One rank alone sends nothing: what a ring does n - 1 times it does not do at all, and what a "
            "hop brings home, such as a gradient, is there already.",
        )
    return (
        "a rank sends a message to itself, or waits for one from itself",
        "Who is its peer here? Its own part a rank copies, without a message. And group.rank(), group_dst= "
        "and group_src= count in the group, not in the world.",
    )


def why_crashed(
    kind: str,
    message: str,
    places: Sequence[str],
    notes: Sequence[str],
    num_ranks: int,
    through: Sequence[str] = (),
) -> tuple[str, str]:
    """The cause behind an error and the next step; "" where it is not known.

    Args:
        kind: the class of the exception.
        places: the lines of the learner's code that it went through, the last one last.
        notes: what the check has seen of it (`BaseException.add_note`), which goes before what words tell.
        num_ranks: size of the group; 0 where the exercise knows of no ranks.
        through: the names of the functions that it went through, torch's own among them.
    """
    if notes:
        return notes[0], ""
    if sends_to_itself(message):
        return _to_itself(num_ranks)
    if _NONE.search(message) and places and _GRADIENT.search(places[-1]):
        cause = (
            "a parameter's .grad is None: it is frozen, no backward has reached it in this pass, or it was "
            "set to None since"
        )
        return cause, "What has no gradient counts as zero, or is left out: on all ranks alike."
    if re.search(_NOT_CONTIGUOUS, message) and {"irecv", "recv"} & set(through):
        return _RECEIVED_INTO
    if re.search(_NOT_OF_THE_GROUP, message) and through and not places:
        return NOT_OF_TORCHS_GROUP, "Write that backward yourself, in an autograd.Function."
    if sizes := _SIZES.search(message):
        if num_ranks == 0:
            return "", "The input of a product is {} wide, and the matrix takes {}.".format(*sizes.groups())
        return _times_too_wide(*map(int, sizes.groups()))
    if (shapes := _GATHERED.search(message)) and _is_joined_along_another(shapes):
        return "", _ALONG_ANOTHER
    said = f"{kind}: {message}"
    for words, cause, step in _KNOWN:
        if re.search(words, said, re.IGNORECASE | re.MULTILINE):
            return cause, step if num_ranks else _WITHOUT_RANKS.get(cause, step)
    return "", ""
