"""Checks of `relay_microbatches`: a buffer that is being sent belongs to the network until `wait()`."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import Trial, check, exercise, is_close

from .carried import require_carried
from .cases import require_own_memory
from .traffic import SMALL, require_messages_alone, unwaited

exercise(
    "relay_microbatches",
    world_sizes=(2, 1, 4, 3),
    subgroup=True,
    hints=(
        "It waits for every isend, and too late. Until when may the network read the tensor you gave it?",
        "How many tensors can `output` hold at once, and how many may be on their way?",
        "Before output is written again, and before the function returns: wait for the last isend.",
    ),
)
PAUSE = 0.015  # seconds that a slow layer takes
PATIENCE = 1.5  # seconds until a rank counts as waiting
ALONE = "One rank sends nothing: return what its layer makes of each input, each in memory of its own."


def relay(rank: Any, inputs: list[Tensor], weight: Tensor | None, pause: float) -> dict[str, Any]:
    """The probe. Without a weight, the layer returns its very input and a view of it, in turn.

    After a call with float64, another one, with one input, a float32 of the same shape.
    """
    calls: list[int] = []

    def layer(x: Tensor) -> Tensor:
        recording.mark(f"{len(calls)}")
        calls.append(len(calls))
        time.sleep(pause)
        if weight is None:
            return x if len(calls) % 2 else x.view_as(x)
        return torch.tanh(x @ weight.to(x.dtype))

    given = [x.clone() for x in inputs]
    with rank.record() as recording:
        outputs = rank.submission.relay_microbatches(layer, given, rank.group)
        recording.mark("end")
    single: list[Tensor] = []
    if given[0].dtype == torch.float64:
        single = rank.submission.relay_microbatches(torch.neg, [given[0].float()], rank.group)
    outputs = [*outputs] if isinstance(outputs, list | tuple) else outputs
    tensors = [x for x in outputs if isinstance(x, Tensor)] if isinstance(outputs, list) else []
    return {
        "outputs": outputs,
        "memory": [x.data_ptr() for x in tensors],
        "inputs": given,
        "calls": len(calls),
        "of one input": single[0] if isinstance(single, list) and single else None,
        "recording": recording,
        "device": rank.device.type,
    }


def observe_relay(
    trial: Trial,
    slow_receivers: bool,
    delays: bool = False,
    identity: bool = False,
    dtype: torch.dtype = torch.float32,
) -> SimpleNamespace:
    """All ranks are given inputs of one shape; those of the others are rank 0's business alone."""
    n, num_inputs, h = trial.num_ranks, trial.integer(6, 8), trial.integer(9, 15)
    inputs = [trial.normal(3, h, dtype=dtype) for _ in range(num_inputs)]
    others = [torch.full((3, h), float("nan"), dtype=dtype) for _ in range(num_inputs)]
    weights = [None if identity else trial.normal(h, h, dtype=dtype) * 2 / h**0.5 for _ in range(n)]
    pauses = [PAUSE * (r if slow_receivers else n - 1 - r) / max(n - 1, 1) for r in range(n)]
    results = trial.run(
        relay,
        per_rank=[(others if r else inputs, weights[r], pauses[r]) for r in range(n)],
        delays=delays,
    )
    stages = [inputs]
    for weight in weights:
        if weight is not None:
            stages.append([torch.tanh(x.double() @ weight.double()) for x in stages[-1]])
    expected = [x.to(dtype) for x in stages[-1]]
    return SimpleNamespace(
        inputs=inputs,
        weights=weights,
        results=results,
        expected=expected,
        recordings=[result["recording"] for result in results],
        device=results[0]["device"],
    )


def observe_slow_receivers(trial: Trial) -> SimpleNamespace:
    return observe_relay(trial, slow_receivers=True)


def observe_slow_senders(trial: Trial) -> SimpleNamespace:
    return observe_relay(trial, slow_receivers=False, delays=True, dtype=torch.float64)


def observe_identity(trial: Trial) -> SimpleNamespace:
    return observe_relay(trial, slow_receivers=True, identity=True)


def require_outputs(trial: Trial, seen: SimpleNamespace, help: str) -> None:
    """The last rank's outputs are those of one process, in order."""
    last, expected = trial.num_ranks - 1, seen.expected
    outputs = seen.results[last]["outputs"]
    trial.require(
        isinstance(outputs, list) and all(isinstance(x, Tensor) for x in outputs),
        "it did not return a list of tensors",
        help="The last rank returns what its layer made of each input.",
        rank=last,
    )
    trial.require(
        len(outputs) == len(expected),
        f"it returned {len(outputs)} outputs for {len(expected)} inputs",
        help="One output for each input, in their order.",
        rank=last,
    )
    help = help if last else ALONE
    places = [_place(x, expected) for x in outputs]
    moved = [i for i, place in enumerate(places) if place not in (i, None)]
    memory = seen.results[last]["memory"]
    for i, (output, e) in enumerate(zip(outputs, expected, strict=True)):
        told = f"the output of micro-batch {i} on the last rank"
        alternatives = (
            {_moved(i, places, memory): outputs[i]} if i in moved[:1] else partial(other_layers, seen, i)
        )
        trial.close(told, output, e, alternatives=alternatives, help=help, rtol=1e-3)


def other_layers(seen: SimpleNamespace, number: int) -> dict[str, Tensor]:
    """What comes of a micro-batch if the layers are not applied once each, in the order of the ranks."""
    weights = [weight for weight in seen.weights if weight is not None]
    last = len(weights) - 1
    lines = {f"the layer of rank {r} is missing": [s for s in range(last + 1) if s != r] for r in range(last)}
    lines["what the last rank received: its own layer's output belongs in the list"] = list(range(last))
    lines["rank 0's input: no layer was applied"] = []
    lines |= {
        f"the layer of rank {r} was applied twice": sorted([*range(last + 1), r]) for r in range(last + 1)
    }
    lines["the last rank's layer of its own input: nothing came from the ranks before"] = [last]
    lines["every rank's layer was applied twice"] = [r for r in range(last + 1) for _ in range(2)]
    nothing = torch.full_like(seen.expected[number], float("nan"))
    found = {"NaN is what the inputs of all ranks but rank 0 hold here: was one of them used?": nothing}
    if last == 0:
        lines = {
            "the input: the one rank's layer belongs in between": [],
            "the layer was applied twice": [0, 0],
        }
    for told, line in lines.items() if last >= 0 else ():
        x = seen.inputs[number].double()
        for r in line:
            x = torch.tanh(x @ weights[r].double())
        found[told] = x.float()
    return found


def _moved(i: int, places: list[int | None], memory: list[int]) -> str:
    """Why the output of another micro-batch stands at `i`: by what stands where, and in which memory."""
    place, in_order = places[i], _order(places)
    same = [j for j, address in enumerate(memory) if address == memory[i]]
    if in_order is not None:
        told = "from the last to the first" if in_order == "reversed" else "in another order"
        return f"that is the output of micro-batch {place}: all of them are there, {told}"
    if len(same) == len(memory) > 1:
        why = "the list holds one tensor many times, and that holds what was written last"
    elif len(same) > 1 and place == same[-1]:
        why = f"outputs {_listed(same)} of the list are one memory, and that holds what was written last"
    elif place > i:
        why = "the buffer was written again before its message had left"
    else:
        why = "an older one"
    return f"that is the output of micro-batch {place}: {why}"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"


def _order(places: list[int | None]) -> str | None:
    """How the outputs stand if all of them are there, each once."""
    if None in places or sorted(places) != list(range(len(places))):
        return None
    return "reversed" if places == sorted(places)[::-1] else "mixed"


def _place(output: Tensor, expected: list[Tensor]) -> int | None:
    for i, e in enumerate(expected):
        if output.shape == e.shape and (output - e).abs().max() < 1e-3:
            return i
    return None


@check("relay_microbatches")
def slow_receivers_get_every_microbatch(trial: Trial) -> None:
    """When the later ranks are slower, each micro-batch still arrives with its own numbers."""
    require_outputs(
        trial,
        trial.once(observe_slow_receivers),
        "A tensor given to isend must not be changed or freed before wait() of what isend returned.",
    )
    require_own_memory(trial, "relay_microbatches", lambda: [trial.normal(3, 4) for _ in range(3)])


@check("relay_microbatches", world_sizes=(2, 3), subgroup=False)
def slow_senders_are_waited_for(trial: Trial) -> None:
    """When the earlier ranks and all messages are slower, no rank computes with what has not arrived."""
    require_outputs(
        trial, trial.once(observe_slow_senders), "A tensor given to irecv is not there before its wait()."
    )
    require_one_output(trial, trial.once(observe_slow_senders))


def require_one_output(trial: Trial, seen: SimpleNamespace) -> None:
    """Of one input, which each rank's layer turns round in sign, one output comes."""
    output, x = seen.results[-1]["of one input"], seen.inputs[0].float()
    trial.require(
        output is None or not output.isnan().any(),
        "of a call with one input the output is NaN, which is what the inputs of all ranks but rank 0 hold",
        cause="with one input nothing comes from the ranks before",
        help="One micro-batch goes through all layers too.",
        rank=trial.num_ranks - 1,
    )
    if output is not None:
        expected = -x if trial.num_ranks % 2 else x
        trial.close("the output of a call with one input", output.float(), expected, rtol=1e-3)


@check("relay_microbatches", world_sizes=(2, 3), subgroup=False)
def the_dtype_stays(trial: Trial) -> None:
    """Inputs of float64 come out as float64, with all their digits."""
    seen, last = trial.once(observe_slow_senders), trial.num_ranks - 1
    help = "empty_like, new_empty and clone keep dtype and device."
    require_outputs(trial, seen, help)
    for i, (output, expected) in enumerate(zip(seen.results[last]["outputs"], seen.expected, strict=True)):
        given, right = (str(x.dtype).removeprefix("torch.") for x in (output, expected))
        trial.require(
            given == right and is_close(output, expected),
            f"the output of micro-batch {i} is {given}, with a float32's digits; the inputs are {right}",
            cause="a buffer of float32, as torch.empty makes them: what is received into it, or copied, is "
            "rounded",
            help=help,
            rank=last,
        )
    always = [str(x.dtype) for x in trial.once(observe_slow_receivers).results[last]["outputs"]]
    of_one = seen.results[last]["of one input"]
    then = "" if of_one is None else str(of_one.dtype)
    trial.require(
        then in ("torch.float32", ""),
        f"after a call with float64, another one with float32 inputs of the same shape returned {then}",
        cause="a buffer is kept from call to call, for all inputs of one shape"
        if set(always) == {"torch.float32"}
        else "",
        help="Make buffers in each call, or keep them by shape, dtype and device.",
        rank=last,
    )


@check("relay_microbatches")
def a_layer_may_return_its_input(trial: Trial) -> None:
    """Where a layer returns its very input, or a view of it, each micro-batch is still right."""
    require_outputs(
        trial,
        trial.once(observe_identity),
        "What the layer returns may be the buffer that the next micro-batch is received into: copy it, or "
        "receive into a new tensor each time.",
    )


@check("relay_microbatches")
def other_ranks_return_nothing(trial: Trial) -> None:
    """The outputs are on the last rank; the others return an empty list."""
    for r, result in enumerate(trial.once(observe_slow_receivers).results[:-1]):
        trial.require(
            result["outputs"] in ([], None),
            "it returned outputs, and only the last rank has any",
            help="A rank that is not the last passes its outputs on, and returns an empty list.",
            rank=r,
        )


@check("relay_microbatches")
def inputs_are_unchanged(trial: Trial) -> None:
    """The inputs of every rank are the same afterwards, also where their numbers do not count."""
    seen = trial.once(observe_slow_receivers)
    help = "Receive and compute in tensors of your own."
    for i, x in enumerate(seen.inputs):
        trial.close(f"input {i} after the call", seen.results[0]["inputs"][i], x, rtol=0.0, help=help)
    for r, result in enumerate(seen.results[1:], start=1):
        changed = [i for i, x in enumerate(result["inputs"]) if not x.isnan().all()]
        trial.require(not changed, f"it writes into its inputs {changed}", help=help, rank=r)


@check("relay_microbatches")
def every_output_is_passed_on_at_once(trial: Trial) -> None:
    """A rank calls its layer once for each input, and each output leaves for the next rank at once."""
    seen, n = trial.once(observe_slow_receivers), trial.num_ranks
    num_inputs = len(seen.inputs)
    require_messages_alone(trial, seen)
    given = [[trial.normal(3) for _ in range(4)]]
    require_carried(trial, "relay_microbatches", lambda _: given, receivers=[n - 1])
    for r, result in enumerate(seen.results):
        trial.require(
            result["calls"] == num_inputs,
            f"it called its layer {result['calls']} times for {num_inputs} inputs",
            rank=r,
        )
        sent = [e for e in result["recording"].events if e.kind == "send" and e.num_bytes > SMALL]
        astray = [e for e in sent if e.peer not in (r + 1, None)]
        trial.require(
            not astray,
            f"it sends to rank {astray[0].peer if astray else ''}, which is not the next one",
            help="A pipeline is a line: from rank r to rank r + 1, a rank in the group.",
            rank=r,
        )
        if r == n - 1:
            trial.require(
                not sent,
                f"it sends {len(sent)} messages, and there is no rank behind it",
                help="The last rank returns its outputs.",
                rank=r,
            )
            continue
        size = seen.inputs[0].nbytes
        late = [i for i in range(num_inputs) if sent_by(result["recording"], i) < (i + 1) * size]
        trial.require(
            not late,
            f"it sends {len(sent)} messages for {num_inputs} micro-batches, and the output of number "
            f"{(late or [0])[0]} only after later ones were computed, or never",
            cause="the micro-batches travel together: the next rank has to wait for all of them"
            if len(sent) == 1
            else "",
            help="Send each output as soon as it is computed: then all ranks work at the same time.",
            rank=r,
        )
        sends = [event for event in result["recording"].events if event.kind == "send"]
        more = sum(event.num_bytes for event in sends) - num_inputs * size
        numbers = sum(math.prod(event.shape) for event in sends) - num_inputs * seen.inputs[0].numel()
        trial.require(
            # Who sends another dtype sends as many numbers, or as many bytes.
            min(more, numbers * seen.inputs[0].element_size()) <= SMALL * num_inputs,
            f"it sends {len(sent)} messages for {num_inputs} micro-batches, with {more:,} bytes more than "
            "its outputs have",
            help="Each output travels once.",
            rank=r,
        )


def sent_by(recording: Any, number: int, later: int = 1) -> int:
    """Bytes sent while the layer was called for no micro-batch beyond `number + later`."""
    return sum(
        event.num_bytes
        for event in recording.events
        if event.kind == "send" and event.after != "end" and int(event.after or 0) <= number + later
    )


@check("relay_microbatches")
def every_message_is_waited_for(trial: Trial) -> None:
    """Every message is over when the call returns."""
    seen = trial.once(observe_slow_receivers)
    forgotten = unwaited(seen.recordings) if seen.device == "cpu" else ""
    trial.require(
        not forgotten,
        "not every message is waited for",
        cause=forgotten,
        help="Keep what isend returns, and wait() for it before the buffer is written again, or at the end.",
    )


@contextmanager
def told_of_views() -> Iterator[None]:
    """A message that is refused for how it lies in memory is told where that comes from."""
    try:
        yield
    except Exception as error:
        if "contiguous" in str(error):
            error.add_note(
                "this layer returns x.t(), a view of its input. What travels must lie in one piece: "
                "clone() and empty_like() keep the strides of a view, contiguous() does not"
            )
        raise


def run_ahead(rank: Any, inputs: list[Tensor]) -> dict[str, Any]:
    """Rank r takes micro-batch i only when rank r - 1 has begun i + 1, or after a while. Layers transpose."""
    heard: list[bool] = []
    begun = 0

    def wait_for(number: int) -> None:
        if rank.rank > 0 and number < len(inputs) and all(heard):
            heard.append(rank.hears([f"rank {rank.rank - 1} begins {number}"], PATIENCE))

    def layer(x: Tensor) -> Tensor:
        nonlocal begun
        rank.tell(f"rank {rank.rank} begins {begun}")
        begun += 1
        wait_for(begun + 1)
        return x.t()

    if rank.device.type == "cpu":  # NCCL's first message connects the ranks, and waits for all of them
        wait_for(1)
    with told_of_views():
        outputs = rank.submission.relay_microbatches(layer, inputs, rank.group)
    return {"heard": heard, "outputs": outputs}


def observe_ahead(trial: Trial) -> SimpleNamespace:
    """Who was too late, by rank and micro-batch; a machine that is busy elsewhere gets three chances."""
    inputs = [trial.normal(3, 3) for _ in range(4)]
    for _ in range(3):
        results = trial.run(run_ahead, inputs)
        heard = [result["heard"] for result in results]
        late = [(r, len(each)) for r, each in enumerate(heard) if not all(each)]
        if not late:
            break
    return SimpleNamespace(late=late, outputs=results[-1]["outputs"], inputs=inputs)


@check("relay_microbatches", world_sizes=(2, 3), subgroup=False)
def a_layer_may_return_a_transposed_view(trial: Trial) -> None:
    """Where a layer returns a view that does not lie in one piece of memory, it is passed on as any other."""
    seen = trial.once(observe_ahead)
    outputs = seen.outputs if isinstance(seen.outputs, list | tuple) else []
    trial.equal("the number of outputs", len(outputs), len(seen.inputs))
    for i, (output, x) in enumerate(zip(outputs, seen.inputs, strict=True)):
        expected = x.t() if trial.num_ranks % 2 else x
        trial.close(f"the output of micro-batch {i}, where each rank transposes,", output, expected)


@check("relay_microbatches", world_sizes=(2, 3), subgroup=False)
def no_rank_waits_for_its_receiver(trial: Trial) -> None:
    """While a message travels the next micro-batch is computed, however late the receiver is."""
    late = trial.once(observe_ahead).late
    if not late:
        return
    r, number = late[0]
    trial.wrong(
        f"it does not begin micro-batch {number} before rank {r}, which is late, has taken "
        f"micro-batch {number - 1}",
        cause="it waits for its receiver: dist.send, or wait() before the next output is there",
        help="isend the output, compute the next one, and wait() just before the buffer is written again.",
        rank=r - 1,
    )


def wait_for_the_next(rank: Any, inputs: list[Tensor]) -> dict[str, Any]:
    """Rank 0 goes on with micro-batch i + 1 only when rank 1 has begun i, or after a while."""
    heard: list[bool] = []
    begun = 0

    def layer(x: Tensor) -> Tensor:
        nonlocal begun
        recording.mark(f"{begun}")
        rank.tell(f"rank {rank.rank} begins {begun}")
        if rank.rank == 0 and begun and all(heard):
            heard.append(rank.hears([f"rank 1 begins {begun - 1}"], PATIENCE))
        begun += 1
        return -x

    with rank.record() as recording:
        rank.submission.relay_microbatches(layer, inputs, rank.group)
        recording.mark("end")
    return {"heard": heard, "recording": recording}


def observe_next(trial: Trial) -> SimpleNamespace:
    """The micro-batch that rank 1 does not begin while rank 0 is in the next one, and what has been sent."""
    inputs = [trial.normal(3, 3) for _ in range(4)]
    for _ in range(3):  # a machine that is busy elsewhere gets three chances
        first, second = trial.run(wait_for_the_next, inputs)
        if all(first["heard"]):
            return SimpleNamespace(number=None)
    number = len(first["heard"]) - 1
    early = [e for e in second["recording"].events if e.kind == "recv" and not e.after]
    return SimpleNamespace(
        number=number,
        is_sent=sent_by(first["recording"], number, later=0) >= (number + 1) * inputs[0].nbytes,
        receives_all=len(early) == len(inputs),
    )


@check("relay_microbatches", world_sizes=(2,), subgroup=False)
def no_output_is_held_back(trial: Trial) -> None:
    """An output is on its way before the next micro-batch is computed: it does not wait for that."""
    seen = trial.once(observe_next)
    if seen.number is None or seen.is_sent:
        return
    trial.wrong(
        f"it has computed micro-batch {seen.number} and begins {seen.number + 1}, and the output of "
        f"{seen.number} is not sent: rank 1 waits for it in vain",
        help="isend an output right after its layer call, before the next one is received or computed.",
        rank=0,
    )


@check("relay_microbatches", world_sizes=(2,), subgroup=False)
def what_has_arrived_is_computed(trial: Trial) -> None:
    """A rank computes what has arrived before it waits for the next: all ranks work at the same time."""
    seen = trial.once(observe_next)
    if seen.number is None or not seen.is_sent:
        return
    trial.wrong(
        f"it has been sent micro-batch {seen.number}, and does not begin it: rank 0 waits for that in vain, "
        f"in micro-batch {seen.number + 1}",
        cause="it receives every micro-batch before it computes the first" if seen.receives_all else "",
        help="Receive one, compute it and send it on; then receive the next.",
        rank=1,
    )
