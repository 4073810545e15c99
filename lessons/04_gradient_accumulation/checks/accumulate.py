"""Checks of `accumulate_gradients`: the gradient and the loss of one pass, whatever the batch looks like."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from grader.checks import Fault, Trial, check, exercise, is_close
from nanogpt.model import GPTConfig

from .models import Part, build, counted, draw_config, gradients, weighted

exercise(
    "accumulate_gradients",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "backward() adds to .grad: call it once for each micro-batch. Tensor.tensor_split cuts rows, also "
        "where they do not divide.",
        "The batch's loss is a sum over its C counted targets, divided by C. A micro-batch with C_j counted "
        "targets reports its own mean L_j. Write the batch's loss with C, C_j and L_j.",
        "Count C before the loop. Then (L_j · C_j / C).backward() for each micro-batch. Where C_j is 0, "
        "L_j is 0/0: that micro-batch must not reach the loss that you return.",
    ),
)

TABLE = "transformer.wte.weight"


@dataclass
class Case:
    """One call of the learner's function."""

    config: GPTConfig
    seed: int
    inputs: Tensor
    targets: Tensor
    num_microbatches: int
    training: bool = True
    before: dict[str, Tensor] | None = None
    """What stands in `.grad` before the call."""
    earlier: Tensor | None = None
    """The targets of an earlier call, with the tokens from back to front, which has left it there."""
    frozen: tuple[str, ...] = ()
    broken: bool = False
    """A weight is NaN."""
    smoothing: float = 0.0
    """Above 0, the model's loss is not the plain cross entropy of its logits."""
    unused: bool = False
    """The model has a layer more, which its loss does not reach."""

    @property
    def told(self) -> str:
        counts = f", {counted(self.targets)} of {self.targets.numel()} targets counted"
        return f"with b={len(self.inputs)} and num_microbatches={self.num_microbatches}{counts}"


def call(rank: Any, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The probe: what a call leaves behind, and what the model saw meanwhile.

    Of a model in training mode one block is in evaluation mode, as what is not trained any more may be.
    """
    results = []
    for case in cases:
        model = build(GPTConfig(**case["config"]), case["seed"], case["smoothing"]).to(rank.device)
        if case["unused"]:
            model.unused = torch.nn.Linear(2, 3, device=rank.device)
        model.train(case["training"]).transformer.h[0].eval()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in case["frozen"])
            if case["before"] and case["earlier"] is None:
                parameter.grad = case["before"][name].clone()
        if case["broken"]:
            with torch.no_grad():
                model.transformer.ln_f.weight[0] = torch.nan
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        shapes, modes, apart = [], [modes_of(model)], []
        model.transformer.wte.register_forward_pre_hook(
            lambda _, args, shapes=shapes: shapes.append(list(args[0].shape))
        )
        model.transformer.drop.register_forward_pre_hook(
            lambda *_, model=model, modes=modes: modes.append(modes_of(model))
        )
        inputs, targets = case["inputs"].clone(), case["targets"].clone()
        rank.seed(case["seed"])
        if case["earlier"] is not None:
            earlier = case["earlier"].clone()
            rank.submission.accumulate_gradients(model, inputs.flip(1), earlier, case["num_microbatches"])
        hooked = any(map(has_hooks, model.parameters()))
        model.register_forward_pre_hook(
            lambda _, args, case=case, apart=apart: apart.append(
                is_apart(args, case["inputs"], case["targets"])
            )
        )
        loss = rank.submission.accumulate_gradients(model, inputs, targets, case["num_microbatches"])
        is_tensor = isinstance(loss, Tensor)
        results.append(
            {
                "loss": single(loss.detach()) if is_tensor else loss,
                "attached": is_tensor and loss.requires_grad,
                "gradients": gradients(model),
                "rows": [shape[0] for shape in shapes],
                "apart": any(apart),
                "calls": len(apart),
                "forwards": getattr(model, "num_forwards", 0),
                "hooked": hooked,
                "lengths": sorted({shape[-1] for shape in shapes}),
                "modes": modes,
                "modes after": modes_of(model),
                "unchanged": {
                    "inputs": torch.equal(inputs, case["inputs"]),
                    "targets": torch.equal(targets, case["targets"]),
                    "weights": all(torch.equal(weights[name], p) for name, p in model.named_parameters()),
                    "requires_grad": all(
                        p.requires_grad == (name not in case["frozen"])
                        for name, p in model.named_parameters()
                    ),
                },
            }
        )
    return results


def single(loss: Tensor) -> Tensor:
    """A sum that was kept in float64 has no more digits than its terms."""
    return loss.float() if loss.dtype == torch.float64 else loss


def modes_of(model: torch.nn.Module) -> dict[str, bool]:
    """Which of its modules are in training mode, by name."""
    return {name or "the model": module.training for name, module in model.named_modules()}


def has_hooks(parameter: Tensor) -> bool:
    """Whether its gradient goes through a hook; torch keeps them under names of its own."""
    return any(getattr(parameter, f"_{kind}_hooks", None) for kind in ("backward", "post_accumulate_grad"))


def is_apart(given: tuple[Any, ...], inputs: Tensor, targets: Tensor) -> bool:
    """Whether whole sequences of a batch were given with other rows of its targets than their own."""
    if len(given) != 2 or not all(isinstance(x, Tensor) and x.shape[1:] == inputs.shape[1:] for x in given):
        return False
    rows, goals = ((batch == x[:, None]).all(2) for batch, x in zip((inputs, targets), given, strict=True))
    known = bool(rows.any(1).all() and goals.any(1).all())
    return known and not bool((rows & goals).any(1).all())


def observe(trial: Trial, cases: list[Case]) -> list[tuple[Case, dict[str, Any]]]:
    plain = [{**vars(case), "config": vars(case.config)} for case in cases]
    return list(zip(cases, trial.run(call, plain)[0], strict=True))


# --- what is asked ---


def batch(trial: Trial, rows: int, num_microbatches: int, **rest: Any) -> Case:
    """A batch of which every target counts."""
    config = rest.pop("config", None) or draw_config(trial)
    length = trial.integer(6, config.block_size)
    inputs, targets = (trial.tokens(config.vocab_size, rows, length) for _ in range(2))
    return Case(config, trial.seed(), inputs, targets, num_microbatches, **rest)


def ignoring(trial: Trial, case: Case, empty_rows: Iterable[int] = ()) -> Case:
    """The same with ignored targets: few count in some rows, most in others, and none in `empty_rows`."""
    targets = case.targets.clone()
    rows, length = targets.shape
    shares = [0.15, 0.9] + [trial.rng.random() for _ in range(rows - 2)]
    for r, share in enumerate(sorted(shares)):
        ignored = trial.rng.sample(range(length), length - max(1, round(share * length)))
        targets[r, ignored] = -1
    targets[list(empty_rows)] = -1
    return replace(case, targets=targets)


# --- what is true, and what known slips make of it ---


def split(case: Case, chunk: bool = False) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches."""
    cut = torch.chunk if chunk else torch.tensor_split
    parts = (cut(tensor, case.num_microbatches) for tensor in (case.inputs, case.targets))
    return list(zip(*parts, strict=True))


def slips(case: Case) -> dict[str, list[Part]]:
    """Sentence → the parts and weights that this slip adds up."""
    k, every = case.num_microbatches, counted(case.targets)
    parts = split(case)
    some = [(rows, goals) for rows, goals in parts if counted(goals)]
    before_empty = list(takewhile(lambda part: counted(part[1]), parts))
    whole = len(case.inputs) // k
    length = case.targets.size(1)
    found = {
        "the mean of the micro-batches' means: targets in a micro-batch where few count weigh too much": [
            (rows, goals, 1 / k) for rows, goals in some
        ],
        "the mean of the means of those micro-batches that count any targets": [
            (rows, goals, 1 / len(some)) for rows, goals in some
        ],
        "each micro-batch weighs by its sequences, not by the targets that count": [
            (rows, goals, len(rows) / len(case.inputs)) for rows, goals in some
        ],
        "the sum of the micro-batches' means: each has to be weighed": [
            (rows, goals, 1.0) for rows, goals in some
        ],
        "the sum over all counted targets: it is not divided by their number": [
            (case.inputs, case.targets, float(every))
        ],
        "it is divided by all b·s targets, also by those that do not count": [
            (case.inputs, case.targets, every / case.targets.numel())
        ],
        "targets of token 0 were not counted: only -1 does not count": [
            (rows, goals, int((goals > 0).sum()) / int((case.targets > 0).sum())) for rows, goals in some
        ],
        "a micro-batch with one counted target is left out: only one without any adds nothing": [
            (rows, goals, counted(goals) / every) for rows, goals in some if counted(goals) > 1
        ],
        "nothing after the micro-batch without counted targets was run": [
            (rows, goals, counted(goals) / every) for rows, goals in before_empty
        ],
        "0 times NaN: the mean of a micro-batch without counted targets is 0/0": [
            (rows, goals, counted(goals) / every) for rows, goals in parts
        ],
        "the last micro-batch alone": [(*some[-1], 1.0)],
        "the last micro-batch's part alone": [(*some[-1], counted(some[-1][1]) / every)],
        "the batch is cut along the sequence: a micro-batch is whole sequences": [
            (rows, goals, counted(goals) / every)
            for rows, goals in zip(
                case.inputs.tensor_split(k, dim=1), case.targets.tensor_split(k, dim=1), strict=True
            )
            if counted(goals)
        ]
        if k <= length
        else [],
    }
    kept = [(case.inputs[i * whole :][:whole], case.targets[i * whole :][:whole]) for i in range(k)]
    if whole * k < len(case.inputs):
        kept_count, left = sum(counted(goals) for _, goals in kept), len(case.inputs) - whole * k
        dropped = {
            f"the last {left} of {len(case.inputs)} sequences were left out": kept_count,
            "sequences beyond k · (b // k) were left out, and still counted in the mean": every,
        }
        for text, divisor in dropped.items():
            found[text] = [(rows, goals, counted(goals) / divisor) for rows, goals in kept if counted(goals)]
        chunks = split(case, chunk=True)
        found["the mean of the means of micro-batches whose sizes differ"] = [
            (rows, goals, 1 / len(chunks)) for rows, goals in chunks if counted(goals)
        ]
    return found


NOT_ITS_LOSS = "it is that of the plain cross entropy of the logits: this model returns another loss"


def require_one_pass(trial: Trial, seen: list[tuple[Case, dict[str, Any]]], help: str) -> None:
    """Loss and gradients are those of one pass over the whole batch."""
    counts: set[int] = set()
    for case, result in seen:
        counts |= set() if case.earlier is None else {counted(case.earlier)}
        whole = [(case.inputs, case.targets, 1.0)]
        loss, added = weighted(case.config, case.seed, whole, case.smoothing)
        before = {name: value.double() for name, value in (case.before or {}).items()}
        expected = {
            name: before.get(name, 0.0) + truth for name, truth in added.items() if name not in case.frozen
        }
        right = all(agree(result["gradients"][name], truth) for name, truth in expected.items())
        wrong = {} if right and agree(result["loss"], loss) else slips(case)  # they take time to compute
        found = {
            text: weighted(case.config, case.seed, parts, case.smoothing) for text, parts in wrong.items()
        }
        if wrong and case.smoothing:
            found[NOT_ITS_LOSS] = weighted(case.config, case.seed, whole)
        pieces = microbatches(case) if wrong else {}
        factors = {
            "the number of micro-batches": float(case.num_microbatches),
            "the number of counted targets": float(counted(case.targets)),
        }
        for name, truth in expected.items():
            actual = result["gradients"][name]
            alternatives = {text: before.get(name, 0.0) + total[name] for text, (_, total) in found.items()}
            explained = any(agree(actual, other) for other in alternatives.values())
            alternatives |= kept_slips(case, name, added[name])
            alternatives |= {} if explained else of_cut_sequences(case, result["lengths"], actual)
            alternatives |= {} if explained else of_earlier_counts(case, name, added[name], counts)
            alternatives |= {} if explained else of_the_calls(case, result, actual)
            alternatives |= of_both_names(name, added[name], expected, result["gradients"])
            trial.close(
                f"{case.told}: the gradient of {name}",
                actual,
                truth,
                alternatives=alternatives,
                factors=factors,
                terms={text: gradients[name] for text, (_, gradients) in pieces.items()},
                help=help,
            )
        trial.close(
            f"{case.told}: the loss that is returned",
            result["loss"],
            loss,
            alternatives={text: total for text, (total, _) in found.items()},
            factors=factors,
            help=help if isinstance(result["loss"], Tensor) else "Return a tensor, and detach it.",
        )
        counts.add(counted(case.targets))


def of_cut_sequences(case: Case, lengths: list[int], actual: Any) -> dict[str, Fault]:
    """What explains a wrong gradient where the model was given shorter sequences than the batch has."""
    length = case.inputs.size(1)
    if not lengths or lengths[-1] > length or lengths == [length]:
        return {}
    told = (
        f"the model was called with sequences of {' and '.join(map(str, lengths))} tokens, and those of the "
        f"batch have {length}: tokens without a counted target are the context of others all the same"
    )
    return {told: Fault(actual, "Cut the batch into whole rows, whatever counts in them.")}


def of_the_calls(case: Case, result: dict[str, Any], actual: Any) -> dict[str, Fault]:
    """What was seen of the calls that explains any wrong gradient."""
    found = {}
    if result["apart"]:
        told = "the model was given sequences with the targets of others: rows and goals are cut differently"
        found[told] = Fault(
            actual, "Cut inputs and targets alike: row i of one belongs to row i of the other."
        )
    if case.earlier is not None and result["hooked"]:
        told = "hooks that an earlier call put on the parameters are still there, and change these gradients"
        found[told] = Fault(actual, "Keep the handles that register_hook() returns, and remove() them.")
    return found


def of_earlier_counts(case: Case, name: str, added: Tensor, counts: set[int]) -> dict[str, Fault]:
    """What becomes of a gradient where a call divides by as many targets as one of those before it counts."""
    every = counted(case.targets)
    found = {}
    for count in counts - {every}:
        before = 0.0 if case.before is None else case.before[name].double()
        left = before if case.earlier is None else before * counted(case.earlier) / count
        told = f"it is divided by {count}, the counted targets of an earlier call; in this one {every} count"
        step = "Count the targets in each call: what is kept from call to call belongs to other targets."
        found[told] = Fault(left + added * every / count, step)
    return found


def of_both_names(
    name: str, added: Tensor, expected: dict[str, Tensor], gradients: dict[str, Any]
) -> dict[str, Fault]:
    """What becomes of the tied table's gradient under each of its names, where no other gradient is wrong."""
    others = (agree(gradients[other], truth) for other, truth in expected.items() if other != name)
    if name != TABLE or not all(others):
        return {}
    told = "the head and the table are one parameter, and its gradient was added under both its names"
    return {told: Fault(expected[name] + added, "model.parameters() names a tied weight once.")}


def microbatches(case: Case) -> dict[str, Any]:
    """What each micro-batch adds, and what was there before: the terms of a gradient."""
    every = counted(case.targets)
    found: dict[str, Any] = {
        f"micro-batch {j}": weighted(
            case.config, case.seed, [(rows, goals, counted(goals) / every)], case.smoothing
        )
        for j, (rows, goals) in enumerate(split(case))
        if counted(goals)
    }
    if case.before is not None:
        found["what stood in .grad before"] = None, {n: value.double() for n, value in case.before.items()}
    return found


def agree(actual: Any, expected: Tensor) -> bool:
    return isinstance(actual, Tensor) and is_close(actual, expected)


SHARED = (
    "what the call before left in .grad is gone, and this call's part counts twice: .grad lies in memory "
    "that both calls write into"
)


def kept_slips(case: Case, name: str, added: Tensor) -> dict[str, Tensor | Fault]:
    """What becomes of a gradient that was there before, when it is not left alone."""
    if case.before is None:
        return {}
    before = case.before[name].double()
    found: dict[str, Tensor | Fault] = {
        "what stood in .grad before is gone: add to it, as backward does": added,
        "nothing came": before,
    }
    if case.earlier is not None:
        step = "Give .grad new memory, as backward() does: what is kept for the next call is no gradient."
        found[SHARED] = Fault(2 * added, step)
    divisors = {"num_microbatches": case.num_microbatches, "the counted targets": counted(case.targets)}
    for text, divisor in divisors.items():
        found[f"what stood in .grad before was divided by {text}, too"] = before / divisor + added
    return found


# --- the checks ---


def observe_even(trial: Trial) -> list[tuple[Case, dict[str, Any]]]:
    return observe(trial, [batch(trial, 6, 3), batch(trial, 4, 4), batch(trial, 5, 1)])


def observe_uneven(trial: Trial) -> list[tuple[Case, dict[str, Any]]]:
    cases = [ignoring(trial, batch(trial, *sizes)) for sizes in ((6, 2), (6, 3), (5, 5), (4, 1))]
    cases[2].targets[1, 1:] = -1
    cases[2].targets[1, 0] = 1  # the only one of its micro-batch
    return observe(trial, cases)


def observe_empty(trial: Trial) -> list[tuple[Case, dict[str, Any]]]:
    """Of three micro-batches the middle, the first or the last one counts no target; then a broken model."""
    cases = [
        ignoring(trial, batch(trial, 6, 3, broken=broken), empty_rows=(2 * place, 2 * place + 1))
        for place, broken in ((1, False), (0, False), (2, False), (1, True))
    ]
    return observe(trial, cases)


def observe_ragged(trial: Trial) -> list[tuple[Case, dict[str, Any]]]:
    cases = [batch(trial, 7, 3), batch(trial, 5, 4), ignoring(trial, batch(trial, 8, 3))]
    return observe(trial, cases)


def observe_kept(trial: Trial) -> list[tuple[Case, dict[str, Any]]]:
    cases = []
    for case in (batch(trial, 6, 3), ignoring(trial, batch(trial, 6, 2)), batch(trial, 3, 1)):
        parameters = build(case.config, case.seed).named_parameters()
        cases.append(replace(case, before={name: trial.normal(*p.shape) for name, p in parameters}))
    case = batch(trial, 6, 2)
    earlier = case.targets.clone()
    earlier[0] = -1
    _, left = weighted(case.config, case.seed, [(case.inputs.flip(1), earlier, 1.0)])
    again = replace(ignoring(trial, case), before=left, earlier=earlier)
    return observe(trial, [*cases, again])


def observe_own_loss(trial: Trial) -> list[tuple[Case, dict[str, Any]]]:
    cases = (batch(trial, 6, 3, smoothing=0.3), ignoring(trial, batch(trial, 5, 2, smoothing=0.1)))
    return observe(trial, list(cases))


def observe_modes(trial: Trial) -> list[tuple[Case, dict[str, Any]]]:
    config = draw_config(trial, dropout=0.2)
    frozen = ("transformer.wpe.weight", "transformer.h.0.mlp.c_fc.weight")
    plain = ignoring(trial, batch(trial, 6, 3, config=config))
    part = replace(plain, training=False, frozen=frozen, unused=True)
    before = {name: trial.normal(*p.shape) for name, p in build(config, plain.seed).named_parameters()}
    before |= {"unused.weight": trial.normal(3, 2), "unused.bias": trial.normal(3)}
    return observe(trial, [plain, part, replace(part, before=before)])


@check("accumulate_gradients")
def gradient_of_the_whole_batch(trial: Trial) -> None:
    """Where all targets count and b is divisible by k, loss and .grad are those of one pass over it all."""
    help = "Weigh each micro-batch's loss by its share of the batch's targets."
    require_one_pass(trial, trial.once(observe_even), help)


@check("accumulate_gradients")
def every_counted_target_weighs_the_same(trial: Trial) -> None:
    """With ignored targets (-1), few in one micro-batch and many in another, they are those of one pass."""
    help = "Weigh each micro-batch by its share of the counted targets of the whole batch."
    require_one_pass(trial, trial.once(observe_uneven), help)


@check("accumulate_gradients")
def a_microbatch_may_count_nothing(trial: Trial) -> None:
    """A micro-batch whose targets are all ignored, the first, a middle or the last one, adds nothing."""
    seen = trial.once(observe_empty)[:-1]
    help = "It adds nothing: loss and gradient are the means over the others' targets, of all of them."
    values = [value for _, result in seen for value in (result["loss"], *result["gradients"].values())]
    if any(isinstance(value, Tensor | float) and torch.as_tensor(value).isnan().any() for value in values):
        help = "Its mean is 0/0, and 0 times NaN is NaN: leave it out of the sum."
    require_one_pass(trial, seen, help)


@check("accumulate_gradients")
def a_nan_is_not_hidden(trial: Trial) -> None:
    """Where the model gives NaN for targets that count, loss and .grad are NaN, as those of one pass."""
    case, result = trial.once(observe_empty)[-1]
    names = ("transformer.ln_f.weight", "transformer.wte.weight")
    found = {"the loss that is returned": result["loss"]}
    found |= {f"the gradient of {name}": result["gradients"][name] for name in names}
    for what, value in found.items():
        is_nan = isinstance(value, Tensor | float) and bool(torch.as_tensor(value).isnan().any())
        trial.require(
            is_nan,
            f"{case.told}: a weight is NaN, so {what} should be NaN, and is not",
            help="Ask whether targets count, and not whether a loss is NaN.",
            cause="NaN was replaced or left out, where targets count",
        )


@check("accumulate_gradients")
def batches_that_do_not_divide(trial: Trial) -> None:
    """Where b is not divisible by k, every sequence still counts, and as much as every other."""
    help = "Micro-batches differ in size here: Tensor.tensor_split cuts so, and counting targets weighs them."
    require_one_pass(trial, trial.once(observe_ragged), help)


@check("accumulate_gradients")
def gradients_are_added_to(trial: Trial) -> None:
    """What stood in .grad before the call stays, and the batch's gradient is added to it."""
    help = "No zero_grad here, and nothing that scales .grad as a whole: the caller may have put it there."
    require_one_pass(trial, trial.once(observe_kept), help)
    require_kept_where_nothing_is_added(trial, *trial.once(observe_modes)[-1])


def require_kept_where_nothing_is_added(trial: Trial, case: Case, result: dict[str, Any]) -> None:
    """What stood in `.grad` of a frozen weight, or of one that the loss does not reach, is still there."""
    unreached = [name for name in case.before if name.startswith("unused")]
    for name in (*case.frozen, *unreached):
        gradient = result["gradients"][name]
        kind = "frozen (requires_grad False)" if name in case.frozen else "not reached by the loss"
        trial.require(
            isinstance(gradient, Tensor) and torch.equal(gradient, case.before[name]),
            f"{name} is {kind}, and had a .grad before the call: afterwards "
            f"{'it is another' if isinstance(gradient, Tensor) else 'there is none'}",
            help="backward() leaves it as it is. Who clears .grad meanwhile puts all of it back.",
        )


@check("accumulate_gradients")
def the_loss_is_the_models(trial: Trial) -> None:
    """Where a model's loss is not the plain cross entropy of its logits, its own is the one that counts."""
    help = (
        "Use the loss that the model returns, model(rows, goals)[1]: it may be made otherwise, or elsewhere."
    )
    require_one_pass(trial, trial.once(observe_own_loss), help)


@check("accumulate_gradients")
def the_model_is_called(trial: Trial) -> None:
    """Where the model's forward runs, so do hooks on the model: it is called, `model(rows, goals)`."""
    for case, result in trial.once(observe_own_loss):
        forwards, calls = result["forwards"], result["calls"]
        trial.require(
            forwards <= calls,
            f"{case.told}: the model's forward ran {forwards} times, and a hook on the model {calls} times",
            cause="model.forward is called itself, which leaves hooks out",
            help="Call the model: model(rows, goals).",
        )


@check("accumulate_gradients")
def loss_is_detached(trial: Trial) -> None:
    """The returned loss is a tensor without a graph behind it."""
    for case, result in trial.once(observe_even):
        trial.require(
            not result["attached"],
            f"{case.told}: the returned loss requires a gradient",
            help="Add up loss.detach(): a loss with its graph keeps things alive that nobody needs.",
        )
        trial.require(
            isinstance(result["loss"], Tensor),
            f"{case.told}: a {type(result['loss']).__name__} is returned, not a tensor",
            help="Return a tensor of shape (): turning it into a number would make a GPU wait.",
        )


@check("accumulate_gradients")
def model_and_batch_are_left_alone(trial: Trial) -> None:
    """Inputs, targets, weights and training mode are after the call what they were before, and during it."""
    for _, result in trial.once(observe_modes):
        for name, same in result["unchanged"].items():
            trial.require(same, f"{name} changed during the call", help="Only .grad may change.")
        before, *during = result["modes"]
        for when, found in (("during", during), ("after", [result["modes after"]])):
            other = next((name for modes in found for name in before if modes[name] != before[name]), "")
            trial.require(
                not other,
                f"{other} was in {'training' if before.get(other) else 'evaluation'} mode before the call, "
                f"and not {when} it",
                help="train() and eval() are the caller's, and reach every module: one may be in another "
                "mode.",
            )
    for case, result in trial.once(observe_empty):
        for name in ("inputs", "targets"):
            trial.require(
                result["unchanged"][name],
                f"{case.told}, a micro-batch of which none is counted: {name} changed during the call",
                help="What split() gives are views of the batch: write into a clone.",
            )


def zeros_in(gradient: Any) -> str:
    return "it has zeros in .grad" if isinstance(gradient, Tensor) and not gradient.any() else ""


@check("accumulate_gradients")
def frozen_parameters_keep_none(trial: Trial) -> None:
    """A frozen parameter (requires_grad False) gets no gradient, and the others get theirs."""
    for case, result in trial.once(observe_modes)[:-1]:
        for name in case.frozen:
            gradient = result["gradients"][name]
            trial.require(
                gradient is None,
                f"{name} (requires_grad False) got a gradient",
                help="backward() leaves it at None.",
                cause=zeros_in(gradient),
            )
        for name, gradient in result["gradients"].items():
            trial.require(
                gradient is None or not name.startswith("unused"),
                f"{name}, a trainable weight that the loss does not reach, has a gradient",
                help="backward() leaves it at None: an optimizer skips None, and decays a weight whose "
                "gradient is 0.",
                cause=zeros_in(gradient),
            )
    case, result = trial.once(observe_modes)[1]  # evaluation mode: no dropout, so one pass can be compared
    require_one_pass(trial, [(case, result)], "Frozen parameters change nothing for the others.")
