"""Checks of `hybrid_shard`: what it computes, on several meshes. What travels is in hybrid_wire.py."""

from collections.abc import Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import Fault, Trial, check, exercise, is_close
from lessons_shared.cut_gpt import local
from nanogpt.model import GPT

from .fully_sharded import full, largest_of_each_unit, plain
from .hybrid_slips import FIRST_ALONE, LATE, by_factor, gradients_after, rules
from .meshes import NAMES, Machines, arrangements, groups_of, hybrid, told
from .models import build, draw, odd_gpt, seeds, weights
from .runs import require_in_evaluation, run
from .training import PASSES, Batches, Rule, train, whole_batch

exercise(
    "hybrid_shard",
    world_sizes=(4, 2),
    uses=("FullySharded",),
    hints=(
        "mesh.get_group(1) is the group of this rank's machine, and mesh.get_group(0) that of the ranks with "
        "the same shards. Your FullySharded works in one of them. What is left to do in the other?",
        "FullySharded starts with the weights of its own group's rank 0. The machines still have to agree: a "
        "broadcast of the shards is enough.",
        "The shards' gradients are complete when backward is over, so average them across machines in a "
        "function that queue_callback calls. What is queued first is called first, and FullySharded queues "
        "something as well, until the last unit. What a queued function queues comes at the end.",
        "The caller calls nothing but loss.backward(): queue your function from a hook on the logits, and "
        "put that hook there in a forward hook of the module (module.register_forward_hook).",
    ),
)

UNMOVED = "it is still what it was before training"
LITTLE = 64
"""Bytes of a flag, a length or a loss."""


WHEN_OVER = (
    "When backward is over, average the shards' .grad across machines: queue_callback has a function called "
    "then. FullySharded may queue work after yours, until its last unit is done: what a queued function "
    "queues comes at the end. Autograd calls no hook of a shard whose .grad is written by hand."
)

ADD_MEANS = (
    "Average what each backward has made, also where .grad holds something already: keep that aside when "
    "backward begins, and average the difference."
)


# --- training ---


def train_on_machines(rank: Any, seed: int, arranged: list[Machines], batches: Batches) -> list:
    """Two steps of SGD. Begins with this rank's own weights; those of the mesh's first rank must win."""
    found = []
    for machines in arranged:
        sharded = hybrid(rank, build(odd_gpt, seed, torch.float64), machines)
        result = {"start": full(sharded), "shards": sum(local(p).numel() for p in sharded.parameters())}
        sharded.eval()
        with torch.no_grad():
            result["logits"], result["loss"] = (each.clone() for each in sharded(*batches[0]))
        sharded = hybrid(rank, build(odd_gpt, seed, torch.float64), machines)  # as new: nothing is gathered
        gradients: list[list] = []  # after each backward

        def keep(left: int, sharded: Any = sharded, gradients: list = gradients) -> None:
            gradients.append([None if p.grad is None else p.grad.clone() for p in sharded.parameters()])

        with rank.record() as recording:
            train(sharded, batches, "SGD", plain, keep)
        result |= {"recording": recording, "end": full(sharded)}
        result["first gradients"], result["gradients"] = (
            whole_gradients(sharded, each) for each in gradients[: PASSES[0]]
        )
        found.append(result)
    return found


def train_with_adamw(rank: Any, training: bool, seed: int, machines: Machines, batches: Batches) -> dict:
    """The weights at the end, and then the gradients of a loss of one's own, made of the logits."""
    sharded = hybrid(rank, build(odd_gpt, seed, torch.float64), machines).train(training)
    train(sharded, batches, "AdamW", plain)
    end = full(sharded)
    sharded.zero_grad()
    sharded(*batches[0])[0].square().mean().backward()
    return {"end": end, "of the logits": whole_gradients(sharded)}


@torch.no_grad()
def whole_gradients(sharded: Any, gradients: Sequence[Tensor | None] | None = None) -> dict[str, Tensor]:
    """What is in the shards' .grad, or these, by name: 0 where there is none. The shards are lost."""
    gradients = gradients or [p.grad for p in sharded.parameters()]
    for shard, gradient in zip(sharded.parameters(), gradients, strict=True):
        shard.zero_() if gradient is None else shard.copy_(gradient)
    return full(sharded)


def observe(trial: Trial) -> SimpleNamespace:
    numbers, by_rank, arranged = seeds(trial), draw(trial, sum(PASSES)), arrangements(trial)
    per_rank = [(number, arranged, batches) for number, batches in zip(numbers, by_rank, strict=True)]
    results = run(trial, train_on_machines, per_rank=per_rank)
    on_machines = [
        SimpleNamespace(machines=machines, results=[result[k] for result in results])
        for k, machines in enumerate(arranged)
    ]
    starts = [build(odd_gpt, number, torch.float64) for number in numbers]
    return SimpleNamespace(on_machines=on_machines, seed=numbers[0], by_rank=by_rank, starts=starts)


def frozen_alone(each: SimpleNamespace, model: GPT, expected: dict[str, Tensor]) -> str:
    """That frozen weights alone differ, in words, where all that are trained are right."""
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    right = all(
        name in one["start"] and is_close(one["start"][name], expected[name])
        for one in each.results
        for name in trained
    )
    return ". These are frozen weights; those that are trained have come" if right else ""


@check("hybrid_shard")
def weights_are_the_first_ranks(trial: Trial) -> None:
    """On every machine full_state_dict() gives the weights that the mesh's first rank started with."""
    seen = trial.once(observe)
    starts = [model.state_dict() for model in seen.starts]
    for each in seen.on_machines:
        machine = {r: row for row in each.machines for r in row}
        frozen = frozen_alone(each, seen.starts[0], starts[0])
        for name, expected in starts[0].items():
            for r, result in enumerate(each.results):
                trial.require(
                    name in result["start"],
                    f"full_state_dict() has no {name}",
                    help="Return a module that has the full_state_dict() of your FullySharded.",
                    rank=r,
                )
            trial.close(
                f"{name} in full_state_dict() ({told(each.machines)})",
                [result["start"][name] for result in each.results],
                expected,
                alternatives={
                    "each machine has the weights of its own first rank: nobody told it the others'"
                    + frozen: [starts[machine[r][0]][name] for r in range(trial.num_ranks)],
                    "each rank still has what it started with": [start[name] for start in starts],
                },
                help="FullySharded takes those of its own group's rank 0: hand the shards across as well.",
            )


@check("hybrid_shard")
def outputs_are_the_dense_models(trial: Trial) -> None:
    """In evaluation, under no_grad, logits and loss are the dense GPT's."""
    seen = trial.once(observe)
    with torch.no_grad():
        outputs = [seen.starts[0](*batches[0]) for batches in seen.by_rank]
    for each in seen.on_machines:
        for i, what in enumerate(("logits", "loss")):
            trial.close(
                f"{what} ({told(each.machines)})",
                [result[what] for result in each.results],
                [output[i] for output in outputs],
                help="Return what your FullySharded returns. Without gradients there is nothing to hook on.",
            )


# --- the checks of gradients ---


def from_an_earlier_pass(seen: SimpleNamespace, each: SimpleNamespace) -> tuple[str, str]:
    """Why of two passes the last has its own machine's mean, in words, and the next step."""
    everyone = list(range(len(each.results)))
    first = gradients_after(seen, everyone, 1)
    right = all(is_close(one["first gradients"][name], first[name]) for one in each.results for name in first)
    return (FIRST_ALONE, ADD_MEANS) if right else (LATE, WHEN_OVER)


@check("hybrid_shard")
def gradients_are_the_means(trial: Trial) -> None:
    """After two loss.backward() the mean gradients of all ranks are in .grad, without another call."""
    seen = trial.once(observe)
    own = [[gradients_after(seen, [r], passes) for r in range(trial.num_ranks)] for passes in (1, 2)]

    def of_ranks(ranks: Sequence[int], name: str, passes: int = 2) -> Tensor:
        return torch.stack([own[passes - 1][r][name] for r in ranks]).mean(0)

    for each in seen.on_machines:
        everyone = range(trial.num_ranks)
        inside = [groups_of(each.machines, r)[0] for r in everyone]
        alone = all(
            is_close(result["gradients"][name], of_ranks(row, name))
            for name in own[0][0]
            for result, row in zip(each.results, inside, strict=True)
        )
        told_alone = (
            "nothing was averaged across machines" if alone else "it was not averaged across machines"
        )
        late, step = from_an_earlier_pass(seen, each)
        for name in own[0][0]:
            right, first = of_ranks(everyone, name), of_ranks(everyone, name, 1)
            trial.close(
                f"the gradient of {name} after two loss.backward() ({told(each.machines)})",
                [result["gradients"][name] for result in each.results],
                right,
                alternatives={
                    f"it is the mean of its own machine: {told_alone}": Fault(
                        [of_ranks(row, name) for row in inside], WHEN_OVER
                    ),
                    late: Fault(
                        [first + of_ranks(row, name) - of_ranks(row, name, 1) for row in inside], step
                    ),
                    **{
                        slip: factor * (right - first + factors_of_first * first)
                        for slip, (factor, factors_of_first) in by_factor(each.machines).items()
                    },
                    "it is what this rank has computed alone: nothing was reduced": [
                        of_ranks([r], name) for r in everyone
                    ],
                },
                help="What is in .grad when backward is over is the mean over all ranks of the mesh.",
            )


BOTH_GROUPS = "The mesh has both groups: mesh.get_group(0) and mesh.get_group(1)."
OF_ANOTHER_MESH = (
    "this is the group of a mesh that hybrid_shard was given before: a hook of an earlier model is still at "
    "work (register_optimizer_step_pre_hook is for every optimizer), or a group is kept in a variable of the "
    "module"
)


@check("hybrid_shard")
def two_groups_talk(trial: Trial) -> None:
    """In a step every collective is in the group of a machine, or of the ranks that hold the same shards."""
    before: dict[int, set] = {r: set() for r in range(trial.num_ranks)}
    for each in trial.once(observe).on_machines:
        groups = [groups_of(each.machines, r) for r in range(trial.num_ranks)]
        strange = [
            (r, event)
            for r, result in enumerate(each.results)
            for event in result["recording"].events
            if event.group not in groups[r] and event.num_bytes > LITTLE
        ]
        kept = all(event.group in before[r] for r, event in strange)
        if strange:
            r, event = strange[0]
            of_all = len(event.group) == trial.num_ranks
            trial.wrong(
                f"it calls {event.describe()} in the group of ranks {', '.join(map(str, event.group))} "
                f"({told(each.machines)})",
                cause=OF_ANOTHER_MESH if kept else "",
                help="Hook on to this model alone, and take both groups from the mesh that came with it."
                if kept
                else BOTH_GROUPS + of_all * " A call without group= is in the group of all.",
                rank=r,
            )
        for r in before:
            before[r] |= set(groups[r])


@check("hybrid_shard")
def sgd_trains_as_one_process_does(trial: Trial) -> None:
    """Two steps of SGD, the first of two backward passes, end at the weights of one process with all rows."""
    seen, n = trial.once(observe), trial.num_ranks
    end_at = partial(whole_batch, odd_gpt, seen.seed, seen.by_rank, "SGD")
    right, start = end_at(Rule()), weights(seen.starts[0])

    @cache
    def known(number: int) -> dict[str, list[dict]]:
        """The weights that slips lead to on one of the meshes, which only a wrong answer needs."""
        by_slip = rules(seen.on_machines[number].machines)
        return {slip: [end_at(make()) for make in by_rank] for slip, by_rank in by_slip.items()}

    def alternatives(number: int, name: str) -> dict[str, Any]:
        found = {slip: [end[name] for end in ends] for slip, ends in known(number).items()}
        by_rank = {slip: ends if len(ends) > 1 else ends * n for slip, ends in found.items()}
        late, step = from_an_earlier_pass(seen, seen.on_machines[number])
        return {**by_rank, late: Fault(by_rank.pop(LATE), step), UNMOVED: start[name]}

    for number, each in enumerate(seen.on_machines):
        for name, expected in right.items():
            trial.close(
                f"{name} after {len(PASSES)} steps of SGD ({told(each.machines)})",
                [result["end"][name] for result in each.results],
                expected,
                alternatives=partial(alternatives, number, name),
                help=WHEN_OVER,
            )


@check("hybrid_shard", first_of=(4, 2))
def adamw_trains_as_one_process_does(trial: Trial) -> None:
    """So do two of AdamW, in evaluation mode: frozen weights, a tied table, sizes that do not divide."""
    require_in_evaluation(partial(require_adamw, trial))


def observe_adamw(trial: Trial, training: bool = False) -> SimpleNamespace:
    numbers, by_rank, machines = seeds(trial), draw(trial, sum(PASSES)), arrangements(trial)[0]
    per_rank = [(number, machines, batches) for number, batches in zip(numbers, by_rank, strict=True)]
    results = run(trial, train_with_adamw, training, per_rank=per_rank)
    right = whole_batch(odd_gpt, numbers[0], by_rank, "AdamW", Rule())
    return SimpleNamespace(results=results, seed=numbers[0], by_rank=by_rank, machines=machines, right=right)


def observe_adamw_in_training(trial: Trial) -> SimpleNamespace:
    return observe_adamw(trial, training=True)


def require_adamw(trial: Trial, training: bool) -> None:
    seen = trial.once(observe_adamw_in_training if training else observe_adamw)
    start = weights(build(odd_gpt, seen.seed, torch.float64))
    for name, expected in seen.right.items():
        trial.close(
            f"{name} after {len(PASSES)} steps of AdamW ({told(seen.machines)})",
            [result["end"][name] for result in seen.results],
            expected,
            alternatives={UNMOVED: start[name]},
            help="A frozen shard has no gradient: leave it None.",
        )


@check("hybrid_shard", first_of=(4, 2))
def a_loss_of_ones_own_is_averaged_too(trial: Trial) -> None:
    """Backward from the logits, without the loss that forward returns, ends with the mean of all ranks."""
    seen = trial.once(observe_adamw)
    model = build(odd_gpt, seen.seed, torch.float64)
    model.load_state_dict(seen.right, strict=False)  # the tied table has one name there
    own = []
    for batches in seen.by_rank:
        model.zero_grad()
        model(*batches[0])[0].square().mean().backward()
        own.append(
            {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        )
    for name in own[0]:
        each = torch.stack([gradients[name] for gradients in own])
        inside = [each[list(groups_of(seen.machines, r)[0])].mean(0) for r in range(trial.num_ranks)]
        trial.close(
            f"the gradient of {name} after logits.square().mean().backward() ({told(seen.machines)})",
            [result["of the logits"][name] for result in seen.results],
            each.mean(0),
            alternatives={
                "it is the mean of its own machine: what averages across machines waits for the loss that "
                "forward returns, and this one was made of the logits": Fault(
                    inside, "Hook on to the logits: every loss is made of them."
                ),
            },
            help="What is in .grad when backward is over is the mean over all ranks of the mesh.",
        )


@check("hybrid_shard")
def machines_cut_among_their_ranks(trial: Trial) -> None:
    """parameters() are shards over the ranks of one machine: every machine has the whole weights."""
    seen = trial.once(observe)
    sizes = [p.numel() for p in seen.starts[0].parameters()]
    total, largest = sum(sizes), largest_of_each_unit(seen.starts[0])
    trained = sum(p.numel() for p in seen.starts[0].parameters() if p.requires_grad)
    for each in seen.on_machines:
        m, n = len(each.machines), len(each.machines[0])
        counts = [result["shards"] for result in each.results]
        groups = [groups_of(each.machines, r) for r in range(m * n)]
        on_machine, across = (
            [sum(counts[r] for r in ranks) for ranks in of_each] for of_each in zip(*groups, strict=True)
        )
        padding = m * n * len(sizes)
        for r, count in enumerate(counts):
            cause = ""
            if min(n, m) > 1 and sum(counts) <= total + padding:
                cause = "they are cut over all ranks, and so no machine has the whole weights"
            elif count >= total:
                cause = "they are the whole weights"
            elif trained <= min(across) and max(across) <= total + padding and min(on_machine) < trained:
                cause = f"they are cut over the {m} machines, along the mesh's first dimension"
            trial.require(
                on_machine[r] >= trained and count <= total / n + largest + padding,
                f"parameters() have {count} numbers on it, and {on_machine[r]} on its machine "
                f"({told(each.machines)}), and a share of the {total} over the {n} rank{'s' * (n > 1)} of a "
                f"machine is {total / n:.0f}",
                help="Shard in the group of the mesh's second dimension, mesh.get_group(1).",
                rank=r,
                cause=cause,
            )


# --- what is no such mesh ---


def refuse(rank: Any, seed: int, machines: list[list[int]]) -> str:
    ranks = [r for row in machines for r in row]
    for mesh in (rank.mesh(ranks, ("shard",)), rank.mesh([machines], ("cluster", *NAMES))):
        try:
            rank.submission.hybrid_shard(build(odd_gpt, seed).to(rank.device), mesh)
        except ValueError:
            continue
        return f"{mesh.ndim} dimension{'s' * (mesh.ndim > 1)}"
    return ""


@check("hybrid_shard", world_sizes=(2,))
def another_mesh_is_refused(trial: Trial) -> None:
    """A mesh of one or of three dimensions is a ValueError."""
    for r, accepted in enumerate(run(trial, refuse, trial.seed(), [[0], [1]])):
        trial.require(
            not accepted,
            f"a mesh of {accepted} was taken without a ValueError",
            help="Look at mesh.ndim before anything is cut.",
            rank=r,
        )
