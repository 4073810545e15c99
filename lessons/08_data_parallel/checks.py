"""What lesson 08 grades: shares of a batch, equal weights, mean gradients, buckets sent in backward."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from grader.checks import Trial, check, exercise
from nanogpt.model import GPT, GPTConfig

GRADIENT_BYTES = 1024  # of one layer of `chain`
VOCAB = 512

exercise(
    "shard_batch",
    world_sizes=(2, 1, 4, 3),
    subgroup=True,
    hints=(
        "Every rank has the whole batch already: nothing travels. What does a rank need to know to choose "
        "its rows?",
        "group.rank() and group.size() are this rank's number in the group and the number of ranks. Some b "
        "do not divide: "
        "give the first b % n ranks one row more.",
        "torch.chunk makes fewer pieces than you asked for when b is small; look at its neighbours in the "
        "documentation.",
    ),
)
exercise(
    "broadcast_parameters",
    world_sizes=(2, 1, 4),
    subgroup=True,
    hints=(
        "state_dict() leaves some buffers out and names tied weights twice. model.parameters() and "
        "model.buffers() do neither.",
        "dist.broadcast writes into the tensor that it is given, so the Parameter objects can stay. "
        "Autograd does not "
        "allow that on a leaf: hand over tensor.detach(), which shares its memory.",
        "src= counts ranks of the world. group_src= counts ranks of the group.",
    ),
)
exercise(
    "all_reduce_gradients",
    world_sizes=(2, 1, 4, 3),
    subgroup=True,
    hints=(
        "model.parameters() names a tied weight once. The gradient stands in parameter.grad.",
        "An all-reduce needs every rank. If one rank leaves a parameter out because its gradient is None, "
        "who answers the "
        "ranks that have one?",
        "requires_grad is the same on every rank; grad being None is not. Decide by the first, and fill in "
        "zeros.",
    ),
)
exercise(
    "DataParallel",
    world_sizes=(2, 1, 4),
    subgroup=True,
    hints=(
        "Start with buckets as lists of parameters, made once in the constructor, and a hook that counts "
        "which gradients of "
        "a bucket are there. parameter.register_post_accumulate_grad_hook(hook) calls hook(parameter).",
        "Send with async_op=True and keep the work object: finish_gradient_synchronization() waits for it, "
        "and only then "
        "puts the means back.",
        "A bucket that is full must not leave before the bucket in front of it: the ranks' hooks may fire "
        "in different "
        "orders, the all-reduces may not. What stays back because of an unused parameter leaves in finish.",
    ),
)
exercise(
    "guarded_step",
    world_sizes=(2, 1, 4),
    subgroup=True,
    hints=(
        "Read the report of the hang: which rank stands in the all-reduce, and where is the other one?",
        "A rank may leave the function only if all ranks leave it. How does a rank learn what the others "
        "saw?",
        "One more all-reduce, of one number, before the decision. Which reduction answers 'is it finite "
        "everywhere'?",
    ),
)


# Models, built alike on the ranks and on the judge's side.


def chain() -> nn.Sequential:
    """Six equal layers: 1024 bytes of gradient each."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh()) for _ in range(6)])


class Mixed(nn.Module):
    """Everything awkward in one model: a tie, frozen weights, odd sizes, all kinds of buffers, branches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 7)
        self.left, self.right = nn.Linear(7, 7), nn.Linear(7, 7)
        self.frozen = nn.Linear(7, 7, bias=False).requires_grad_(False)
        self.head = nn.Linear(7, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.randn(3))
        self.register_buffer("count", torch.randint(1000, ()))
        self.register_buffer("mask", torch.randn(5), persistent=False)

    def forward(self, tokens: Tensor, order: tuple[str, ...]) -> Tensor:
        x = self.embed(tokens)
        for name in order:
            x = getattr(self, name)(x).tanh()
        return self.head(self.frozen(x))


class Regression(nn.Module):
    """A small model that is called as GPT is: model(inputs, targets) -> (outputs, loss)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.layers(inputs)
        return outputs, F.mse_loss(outputs, targets)


def tiny_gpt() -> GPT:
    """A GPT of odd sizes."""
    return GPT(GPTConfig(block_size=8, vocab_size=23, n_layer=2, n_head=2, n_embd=12))


def build(make: Any, seed: int) -> Any:
    """The model with the weights that this seed gives; the global random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Clones of all gradients by name; None where there is none."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Clones of all parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def seeds(trial: Trial) -> list[int]:
    """A different seed for every rank, so that the ranks start with different weights."""
    first = trial.seed()
    return [first + 1000 * r for r in range(trial.num_ranks)]


def by_rank(results: list[dict], key: str, name: str) -> list[Tensor | None]:
    """One named tensor of all ranks."""
    return [result[key][name] for result in results]


# shard_batch


def cut(rank: Any, batches: list[Tensor]) -> dict:
    before = [batch.clone() for batch in batches]
    with rank.record() as recording:
        shares = [rank.submission.shard_batch(batch, rank.group) for batch in batches]
    same = all(torch.equal(a, b) for a, b in zip(before, batches, strict=True))
    copies = [s.clone() if isinstance(s, Tensor) else None for s in shares]
    return {"shares": copies, "unchanged": same, "recording": recording}


def observe_shares(trial: Trial) -> SimpleNamespace:
    n = trial.num_ranks
    sizes = [4 * n, n + 1, 2 * n - 1, 3 * n - 1, 2 * n + 1, n - 1]
    rows = [torch.arange(b).unsqueeze(1) * 10 + torch.arange(3) for b in sizes]  # every row its own number
    targets = torch.stack([rows[0], -rows[0]], dim=2).double()  # (b, 3, 2)
    return SimpleNamespace(sizes=sizes, targets=targets, results=trial.run(cut, [*rows, targets]))


def require_partition(trial: Trial, seen: SimpleNamespace, i: int) -> None:
    """The i-th batch is the ranks' shares together, and no row is in two of them."""
    b, n = seen.sizes[i], trial.num_ranks
    shares = [(result["shares"][i][:, 0] // 10).tolist() for result in seen.results]
    found = sorted(row for share in shares for row in share)
    told = ", ".join(f"rank {r}: {share}" for r, share in enumerate(shares))
    told = f"Of a batch of {b} rows, these are the rows on each of {n} ranks: {told}."
    everything = n > 1 and all(len(share) == b for share in shares) and b > 0
    trial.require(
        not everything, f"every rank got all the data. {told}", help="Each rank works on about b/n rows."
    )
    twice = sorted({row for row in found if found.count(row) > 1})
    trial.require(not twice, f"rows {twice} are in more than one share. {told}", help="Shares are disjoint.")
    missing = sorted(set(range(b)) - set(found))
    trial.require(
        not missing,
        f"rows {missing} are on no rank: they were dropped. {told}",
        help="All rows are used, whatever b is.",
    )
    lengths = [len(share) for share in shares]
    trial.require(
        max(lengths) - min(lengths) <= 1,
        f"the shares have {lengths} rows: two of them differ by more than one row. {told}",
        help="Spread the remainder: the first b % n ranks take one row more.",
    )


def require_rows(trial: Trial, seen: SimpleNamespace) -> None:
    """Shares are whole rows."""
    for r, result in enumerate(seen.results):
        for share, size in zip(result["shares"], seen.sizes, strict=False):
            trial.require(share is not None, "shard_batch did not return a tensor", rank=r)
            trial.require(
                share.dim() == 2 and share.shape[1] == 3,
                f"of a batch of shape ({size}, 3) rank {r} got {tuple(share.shape)}: dimension 0 is the one "
                "to cut",
                help="Keep rows whole: cut along dim 0 and leave the other dimensions alone.",
                rank=r,
            )


@check("shard_batch")
def shares_are_disjoint_and_complete(trial: Trial) -> None:
    """A batch that divides by n: every row is on exactly one rank, and every rank has b/n rows."""
    seen = trial.once(observe_shares)
    require_rows(trial, seen)
    require_partition(trial, seen, 0)


@check("shard_batch")
def batches_that_do_not_divide_lose_no_row(trial: Trial) -> None:
    """A batch that does not divide: every row is on exactly one rank, shares differ by at most one row."""
    seen = trial.once(observe_shares)
    require_rows(trial, seen)
    for i in range(1, len(seen.sizes)):
        require_partition(trial, seen, i)


@check("shard_batch")
def inputs_and_targets_are_cut_alike(trial: Trial) -> None:
    """Two tensors of the same batch are cut at the same rows, and keep their dtype and other dimensions."""
    seen = trial.once(observe_shares)
    require_rows(trial, seen)
    first = [(result["shares"][0][:, 0] // 10) for result in seen.results]
    expected = [seen.targets[rows] for rows in first]
    trial.close(
        "the share of a (b, 3, 2) tensor of the same batch",
        [r["shares"][-1] for r in seen.results],
        expected,
        rtol=0.0,
        help="Which rows a rank takes may depend on its rank, on n and on b, and on nothing else.",
    )


@check("shard_batch")
def nothing_is_sent(trial: Trial) -> None:
    """Every rank has the batch already: cutting it needs no communication, and leaves it as it was."""
    for r, result in enumerate(trial.once(observe_shares).results):
        kinds = result["recording"].kinds()
        trial.require(
            not kinds, f"shard_batch communicates: {kinds[:4]}", help="Index the tensor you have.", rank=r
        )
        trial.require(
            result["unchanged"], "the given batch was changed", help="Leave the argument alone.", rank=r
        )


# broadcast_parameters


def spread(rank: Any, seed: int) -> dict:
    model = build(Mixed, seed).to(rank.device)
    objects = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    with rank.record() as recording:
        rank.submission.broadcast_parameters(model, rank.group)
    now = dict(model.named_parameters(remove_duplicate=False))
    return {
        "weights": weights(model),
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        "replaced": [name for name, number in objects.items() if name not in now or id(now[name]) != number],
        "trained": {name: p.requires_grad and p.is_leaf for name, p in now.items()},
        "recording": recording,
    }


def observe_broadcast(trial: Trial) -> SimpleNamespace:
    numbers = seeds(trial)
    starts = [build(Mixed, number) for number in numbers]
    return SimpleNamespace(starts=starts, results=trial.run(spread, per_rank=[(s,) for s in numbers]))


def require_rank_0s(trial: Trial, kind: str, names: list[str]) -> None:
    """Named parameters ("weights") or buffers are those that rank 0 started with."""
    seen = trial.once(observe_broadcast)
    own = [weights(m) if kind == "weights" else dict(m.named_buffers()) for m in seen.starts]
    for name in names:
        starts = [tensors[name] for tensors in own]
        alternatives = {"each rank still has what it started with": starts, "the last rank's": starts[-1]}
        if starts[0].is_floating_point():
            alternatives["the mean of all ranks' values"] = torch.stack(starts).mean(0)
            alternatives["the sum of all ranks' values"] = torch.stack(starts).sum(0)
        if trial.num_ranks == 1:
            alternatives = {}
        trial.close(
            f"{name} after the broadcast",
            by_rank(seen.results, kind, name),
            starts[0],
            alternatives=alternatives,
            help="Broadcast it from the group's rank 0, in place.",
        )


@check("broadcast_parameters")
def parameters_are_those_of_rank_0(trial: Trial) -> None:
    """Every rank ends with the parameters of the group's rank 0."""
    require_rank_0s(
        trial, "weights", ["embed.weight", "left.weight", "left.bias", "right.weight", "right.bias"]
    )


@check("broadcast_parameters")
def frozen_parameters_are_those_of_rank_0(trial: Trial) -> None:
    """Parameters that are not trained (requires_grad False) are the same on every rank too."""
    require_rank_0s(trial, "weights", ["frozen.weight"])


@check("broadcast_parameters")
def buffers_are_those_of_rank_0(trial: Trial) -> None:
    """Buffers, such as a running mean or a count, are those of rank 0."""
    require_rank_0s(trial, "buffers", ["mean", "count"])


@check("broadcast_parameters")
def non_persistent_buffers_are_those_of_rank_0(trial: Trial) -> None:
    """Buffers that state_dict() leaves out (persistent=False) are those of rank 0 too."""
    require_rank_0s(trial, "buffers", ["mask"])


@check("broadcast_parameters")
def parameter_objects_stay(trial: Trial) -> None:
    """The model keeps its Parameter objects, so that optimizers and tied weights keep hold of them."""
    seen = trial.once(observe_broadcast)
    trained = {n: p.requires_grad for n, p in seen.starts[0].named_parameters(remove_duplicate=False)}
    for r, result in enumerate(seen.results):
        trial.require(
            not result["replaced"],
            f"these are new Parameter objects: {result['replaced']}. An optimizer made before would train "
            "the old ones",
            help="Write into the tensors: broadcast into parameter.detach(), or copy_ under torch.no_grad().",
            rank=r,
        )
        trial.equal(
            "which parameters are trained", result["trained"], trained, help="Leave requires_grad alone."
        )


@check("broadcast_parameters")
def every_tensor_is_sent_once(trial: Trial) -> None:
    """What travels is one copy of the model: a tied weight once, and no rank's weights but rank 0's."""
    seen = trial.once(observe_broadcast)
    tensors = [*seen.starts[0].parameters(), *seen.starts[0].buffers()]
    size = sum(t.numel() * t.element_size() for t in tensors)
    for r, result in enumerate(seen.results):
        moved = result["recording"].bytes()
        trial.require(
            moved <= 1.5 * size,
            f"{moved} bytes went through collectives, and the model has {size}: "
            + (
                "all ranks' weights were gathered"
                if "all_gather" in result["recording"].kinds()
                else "something went twice"
            ),
            help="One broadcast for each tensor. model.parameters() names a tied weight once, state_dict() "
            "twice.",
            rank=r,
        )


# all_reduce_gradients


def average(
    rank: Any, seed: int, double: bool, tokens: Tensor, targets: Tensor, order: tuple[str, ...]
) -> dict:
    model = build(Mixed, seed).to(rank.device)
    model = model.double() if double else model
    F.cross_entropy(model(tokens, order), targets).backward()
    with rank.record() as recording:
        rank.submission.all_reduce_gradients(model, rank.group)
    return {"gradients": gradients(model), "weights": weights(model), "recording": recording}


def expected_gradients(
    seed: int, passes: list[list[tuple[Tensor, Tensor, tuple]]]
) -> tuple[dict, list[dict]]:
    """The mean over ranks and each rank's own; `passes` has a list of (tokens, targets, order) by rank."""
    own = []
    for rank in range(len(passes[0])):
        model = build(Mixed, seed).double()
        for batches in passes:
            tokens, targets, order = batches[rank]
            F.cross_entropy(model(tokens, order), targets).backward()
        own.append(
            {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        )
    return {name: torch.stack([g[name] for g in own]).mean(0) for name in own[0]}, own


def draw_passes(trial: Trial, *orders: list[tuple[str, ...]]) -> list[list[tuple]]:
    """For each pass, and each rank, tokens, targets and the order in which the branches are used."""
    return [
        [
            (trial.tokens(VOCAB, 5), trial.tokens(VOCAB, 5), order[r % len(order)])
            for r in range(trial.num_ranks)
        ]
        for order in orders
    ]


BOTH = ("left", "right")


def observe_average(trial: Trial, order: list[tuple[str, ...]], double: bool = False) -> SimpleNamespace:
    seed, passes = trial.seed(), draw_passes(trial, order)
    results = trial.run(average, seed, double, per_rank=passes[0])
    expected, own = expected_gradients(seed, passes)
    return SimpleNamespace(results=results, expected=expected, own=own, start=weights(build(Mixed, seed)))


def observe_all_used(trial: Trial) -> SimpleNamespace:
    return observe_average(trial, [BOTH])


def observe_some_unused(trial: Trial) -> SimpleNamespace:
    return observe_average(trial, [("left",), BOTH])


def observe_double(trial: Trial) -> SimpleNamespace:
    return observe_average(trial, [("left",), BOTH], double=True)


def alternatives_to_the_mean(own: list[Tensor], mean: Tensor) -> dict[str, Any]:
    """What other rules make of the ranks' own gradients."""
    n, total, having = len(own), torch.stack(own).sum(0), sum(bool(g.any()) for g in own)
    some = {"the mean over those ranks that had a gradient": total / having} if 0 < having < n else {}
    return {
        **some,
        "the mean on rank 0, the sum on the others": [mean, *[total] * (n - 1)],
        "the sum over ranks: divide by the number of ranks": total,
        "each rank has only its own gradient: nothing was averaged": own,
        "the mean, divided by the number of ranks once more": mean / n,
        "the gradient of rank 0": own[0],
    }


def require_mean(trial: Trial, seen: SimpleNamespace, names: list[str] | None = None, help: str = "") -> None:
    """The gradients on every rank are the mean over ranks."""
    for name in names or [n for n in seen.expected if n != "frozen.weight"]:
        own = [gradient[name] for gradient in seen.own]
        alternatives = alternatives_to_the_mean(own, seen.expected[name]) if trial.num_ranks > 1 else {}
        actual = by_rank(seen.results, "gradients", name)
        for r, gradient in enumerate(actual):
            trial.require(
                gradient is not None, f"rank {r} has no gradient of {name} (None)", help=help, rank=r
            )
        trial.close(
            f"the gradient of {name}", actual, seen.expected[name], alternatives=alternatives, help=help
        )


@check("all_reduce_gradients")
def gradients_are_the_mean_over_ranks(trial: Trial) -> None:
    """After the call every rank has the mean of all ranks' gradients."""
    require_mean(
        trial, trial.once(observe_all_used), help="All-reduce the sum, divide by group.size(), once."
    )


@check("all_reduce_gradients")
def a_missing_gradient_counts_as_zero(trial: Trial) -> None:
    """A layer that only some ranks used: the others, whose gradient is None, count as zero."""
    seen = trial.once(observe_some_unused)
    require_mean(
        trial,
        seen,
        help="Every rank takes part, with zeros where it has no gradient, and n counts all ranks.",
    )


@check("all_reduce_gradients")
def frozen_parameters_keep_none(trial: Trial) -> None:
    """A frozen parameter gets no gradient."""
    for r, gradient in enumerate(by_rank(trial.once(observe_all_used).results, "gradients", "frozen.weight")):
        trial.require(
            gradient is None,
            "frozen.weight (requires_grad False) got a gradient",
            rank=r,
            help="Leave parameters out that are not trained: an optimizer would decay them.",
        )


@check("all_reduce_gradients")
def weights_are_left_alone(trial: Trial) -> None:
    """Gradients are averaged, weights are not touched."""
    seen = trial.once(observe_all_used)
    for name, start in seen.start.items():
        trial.close(
            f"the weight {name}",
            by_rank(seen.results, "weights", name),
            start,
            rtol=0.0,
            help="It is parameter.grad that travels, not the parameter.",
        )


@check("all_reduce_gradients")
def gradients_keep_the_models_dtype(trial: Trial) -> None:
    """A float64 model is averaged in float64, and its gradients stay float64."""
    require_mean(trial, trial.once(observe_double), help="Make buffers and zeros in the parameter's dtype.")


@check("all_reduce_gradients")
def every_gradient_is_sent_once(trial: Trial) -> None:
    """What is reduced is one copy of the gradients: a tied weight's once, and frozen weights' not at all."""
    seen = trial.once(observe_all_used)
    size = sum(weight.numel() * 4 for name, weight in seen.start.items() if name != "frozen.weight")
    for r, result in enumerate(seen.results):
        require_bytes(trial, r, result["recording"], size)


def require_bytes(trial: Trial, rank: int, recording: Any, size: int, what: str = "the gradients") -> None:
    """Reductions see each gradient once; a reduce-scatter and an all-gather by hand are as good."""
    slack = 128 + size // 8  # flags, lengths, padding
    reduced = sum(recording.bytes(kind) for kind in ("all_reduce", "reduce_scatter", "reduce"))
    gathered = recording.bytes("all_gather") + recording.bytes("gather") + recording.bytes("all_to_all")
    trial.require(
        gathered <= size + slack,
        f"{gathered} bytes were gathered: {what} of all ranks on every rank. One rank's are {size} bytes",
        help="An all-reduce sends 2(n-1)/n of that size, whatever n is; gathering grows with n.",
        rank=rank,
    )
    trial.require(
        reduced <= size + slack,
        f"{reduced} bytes were reduced, and {what} have {size}: some went twice, or weights that are not "
        "trained went too",
        help="model.parameters() names a tied weight once. Leave out what has requires_grad False.",
        rank=rank,
    )
    trial.require(
        trial.num_ranks == 1 or reduced + recording.bytes("send") >= size - slack,
        f"only {reduced} bytes were reduced, and {what} have {size}",
        help="All gradients travel.",
        rank=rank,
    )


# DataParallel


def step(rank: Any, seed: int, tokens: Tensor, targets: Tensor) -> dict:
    """One backward of a tiny GPT whose ranks start with different weights."""
    model = build(tiny_gpt, seed).to(rank.device)
    model.register_buffer("mask", torch.full((3,), float(seed % 7919)), persistent=False)
    wrapped = rank.submission.DataParallel(model, rank.group)
    start = {**weights(model), "mask": model.mask.clone()}
    own = [id(p) for p in model.parameters()]
    inner = [wrapped, *wrapped.modules(), *vars(wrapped).values()]
    with rank.record() as recording:
        wrapped.finish_gradient_synchronization()
        recording.mark("step")
        _, loss = wrapped(tokens, targets)
        loss.backward()
        wrapped.finish_gradient_synchronization()
        first = gradients(model)
        recording.mark("finished again")
        wrapped.finish_gradient_synchronization()
    return {
        "start": start,
        "gradients": first,
        "again": gradients(model),
        "loss": loss.detach(),
        "weights": weights(model),
        "same": sorted(id(p) for p in wrapped.parameters()) == sorted(own),
        "torchs": any(isinstance(each, nn.parallel.DistributedDataParallel) for each in inner),
        "recording": recording,
    }


def observe_step(trial: Trial) -> SimpleNamespace:
    numbers, n = seeds(trial), trial.num_ranks
    data = [(trial.tokens(23, 2, 8), trial.tokens(23, 2, 8)) for _ in range(n)]
    results = trial.run(step, per_rank=[(s, *d) for s, d in zip(numbers, data, strict=True)])
    own = []
    for tokens, targets in data:
        model = build(tiny_gpt, numbers[0]).double()
        model(tokens, targets)[1].backward()
        own.append(gradients(model))
    expected = {name: torch.stack([g[name] for g in own]).mean(0) for name in own[0]}
    starts = [{**weights(build(tiny_gpt, s)), "mask": torch.full((3,), float(s % 7919))} for s in numbers]
    return SimpleNamespace(results=results, own=own, expected=expected, starts=starts)


@check("DataParallel")
def ranks_start_with_the_weights_of_rank_0(trial: Trial) -> None:
    """The constructor gives every rank the parameters and buffers of the group's rank 0."""
    seen = trial.once(observe_step)
    for name, start in seen.starts[0].items():
        starts = [s[name] for s in seen.starts]
        trial.close(
            f"{name} after the constructor",
            by_rank(seen.results, "start", name),
            start,
            alternatives={"each rank still has what it started with": starts} if trial.num_ranks > 1 else {},
            help="Call broadcast_parameters in the constructor.",
        )


@check("DataParallel")
def gradient_is_that_of_the_whole_batch(trial: Trial) -> None:
    """After backward and finish_gradient_synchronization(), all ranks have the whole batch's gradient."""
    seen = trial.once(observe_step)
    require_mean(
        trial,
        seen,
        list(seen.expected),
        "Average each gradient over the group, once, and put it back into .grad.",
    )


@check("DataParallel")
def weights_change_in_the_optimizer_only(trial: Trial) -> None:
    """Synchronisation leaves the weights as they are; the wrapper trains the module's own parameters."""
    seen = trial.once(observe_step)
    for name in seen.expected:
        trial.close(
            f"the weight {name} after backward",
            by_rank(seen.results, "weights", name),
            by_rank(seen.results, "start", name),
            rtol=0.0,
            help="A hook is handed the parameter. What has to be averaged is parameter.grad.",
        )
    for r, result in enumerate(seen.results):
        trial.require(
            result["same"],
            "wrapped.parameters() are not the parameters of the given module",
            rank=r,
            help="Keep the module as an attribute (self.module = module), and do not copy it.",
        )


@check("DataParallel")
def built_by_hand(trial: Trial) -> None:
    """The hooks and buckets are yours: PyTorch's DistributedDataParallel comes later in the lesson."""
    for r, result in enumerate(trial.once(observe_step).results):
        trial.require(
            not result["torchs"],
            "PyTorch's own DistributedDataParallel is inside",
            rank=r,
            help="Right numbers, but the exercise is to build what it does.",
        )


@check("DataParallel")
def finish_does_nothing_when_nothing_is_pending(trial: Trial) -> None:
    """finish_gradient_synchronization() before any backward, or a second time, sends and changes nothing."""
    seen = trial.once(observe_step)
    for r, result in enumerate(seen.results):
        for when, told in (("", "before any backward"), ("finished again", "a second time")):
            trial.require(
                result["recording"].count(after=when) == 0,
                f"called {told}, finish_… communicates",
                rank=r,
                help="Remember whether anything was sent or got ready since the last call.",
            )
    for name in seen.expected:
        trial.close(
            f"the gradient of {name} after a second finish",
            by_rank(seen.results, "again", name),
            by_rank(seen.results, "gradients", name),
            rtol=0.0,
            help="Forget the buckets that are done.",
        )


def train(rank: Any, seed: int, steps: list[tuple[Tensor, Tensor]]) -> dict:
    """A few steps in float64, where the order of a sum does not show."""
    ends = {}
    for name in OPTIMIZERS:
        model = build(tiny_gpt, seed).double().to(rank.device)
        wrapped = rank.submission.DataParallel(model, rank.group, bucket_bytes=4000)
        optimizer = make_optimizer(name, wrapped)
        for tokens, targets in steps:
            optimizer.zero_grad(set_to_none=name == "SGD")
            wrapped(tokens, targets)[1].backward()
            wrapped.finish_gradient_synchronization()
            optimizer.step()
        ends[name] = weights(model)
    return ends


OPTIMIZERS = ("SGD", "AdamW")


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """SGD shows a sum that should be a mean, which AdamW hides."""
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.5)
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def observe_training(trial: Trial) -> SimpleNamespace:
    numbers, n = seeds(trial), trial.num_ranks
    steps = [(trial.tokens(23, 2 * n, 8), trial.tokens(23, 2 * n, 8)) for _ in range(3)]
    shares = [[(t[2 * r : 2 * r + 2], y[2 * r : 2 * r + 2]) for t, y in steps] for r in range(n)]
    results = trial.run(train, per_rank=list(zip(numbers, shares, strict=True)))
    return SimpleNamespace(results=results, seed=numbers[0], steps=steps)


def train_alone(seen: SimpleNamespace, name: str, factor: float) -> dict[str, Tensor]:
    """The weights of one process on the whole batches, gradients times a factor."""
    model = build(tiny_gpt, seen.seed).double()
    optimizer = make_optimizer(name, model)
    for tokens, targets in seen.steps:
        optimizer.zero_grad()
        (factor * model(tokens, targets)[1]).backward()
        optimizer.step()
    return weights(model)


def require_training(trial: Trial, optimizer: str) -> None:
    """Three steps end at the weights of one process on the whole batch."""
    seen, n = trial.once(observe_training), trial.num_ranks
    expected = train_alone(seen, optimizer, 1.0)
    others = {}
    if n > 1:
        others["the weights after training on the sum of the gradients"] = train_alone(seen, optimizer, n)
        others["the weights after training on the mean divided by n"] = train_alone(seen, optimizer, 1 / n)
    for name in expected:
        trial.close(
            f"{name} after three steps of {optimizer}",
            by_rank(seen.results, optimizer, name),
            expected[name],
            alternatives={told: end[name] for told, end in others.items()},
            help="Compare the gradients of each step with those of one process on the whole batch.",
        )


@check("DataParallel")
def sgd_trains_as_one_process_does(trial: Trial) -> None:
    """Three steps of SGD end at the weights of one process that had the whole batches."""
    require_training(trial, "SGD")


@check("DataParallel")
def adamw_trains_as_one_process_does(trial: Trial) -> None:
    """Three steps of AdamW, gradients zeroed in place, end at the weights of one process."""
    require_training(trial, "AdamW")


def passes(rank: Any, seed: int, quiet: list[bool], batches: list[tuple]) -> dict:
    """Backward passes of the awkward model, one bucket a parameter; `quiet` passes are inside no_sync()."""
    model = build(Mixed, seed).to(rank.device)
    wrapped = rank.submission.DataParallel(model, rank.group, bucket_bytes=1)
    with rank.record() as recording:
        for silent, (tokens, targets, order) in zip(quiet, batches, strict=True):
            recording.mark("inside no_sync" if silent else "synchronised")
            if silent:
                with wrapped.no_sync():
                    F.cross_entropy(wrapped(tokens, order), targets).backward()
            else:
                F.cross_entropy(wrapped(tokens, order), targets).backward()
                wrapped.finish_gradient_synchronization()
    return {"gradients": gradients(model), "recording": recording}


def observe_passes(trial: Trial, quiet: list[bool], *orders: list[tuple[str, ...]]) -> SimpleNamespace:
    seed, drawn = trial.seed(), draw_passes(trial, *orders)
    results = trial.run(
        passes, seed, quiet, per_rank=[([p[r] for p in drawn],) for r in range(trial.num_ranks)]
    )
    expected, own = expected_gradients(seed, drawn)
    last, _ = expected_gradients(seed, drawn[-1:])
    return SimpleNamespace(results=results, expected=expected, own=own, last=last)


def observe_corners(trial: Trial) -> SimpleNamespace:
    return observe_passes(trial, [False], [("left",), BOTH])


def observe_other_order(trial: Trial) -> SimpleNamespace:
    return observe_passes(trial, [False], [BOTH, ("right", "left")])


def observe_no_sync(trial: Trial) -> SimpleNamespace:
    return observe_passes(trial, [True, True, False], [BOTH], [("left",), BOTH], [("right",)])


def observe_two_passes(trial: Trial) -> SimpleNamespace:
    return observe_passes(trial, [False, False], [BOTH], [BOTH])


@check("DataParallel")
def ranks_may_use_different_layers(trial: Trial) -> None:
    """A layer that some ranks did not use counts as zero there, and no rank waits for ever."""
    require_mean(
        trial,
        trial.once(observe_corners),
        help="finish_gradient_synchronization() sends the buckets that never became full.",
    )


@check("DataParallel")
def frozen_parameters_get_no_gradient(trial: Trial) -> None:
    """A frozen parameter keeps None, and a tied weight is sent once."""
    seen = trial.once(observe_corners)
    size = sum(g.numel() * 4 for name, g in seen.expected.items() if name != "frozen.weight")
    for r, result in enumerate(seen.results):
        trial.require(
            result["gradients"]["frozen.weight"] is None,
            "frozen.weight got a gradient",
            rank=r,
            help="Put only parameters with requires_grad into buckets.",
        )
        require_bytes(trial, r, result["recording"], size)


@check("DataParallel", world_sizes=(2, 4), subgroup=False)
def order_of_hooks_does_not_matter(trial: Trial) -> None:
    """Where one rank's backward reaches two layers in the other order, gradients are not mixed up."""
    seen = trial.once(observe_other_order)
    for part in ("weight", "bias"):
        left, right = (torch.stack([own[f"{side}.{part}"] for own in seen.own]) for side in BOTH)
        odd = (torch.arange(trial.num_ranks) % 2 == 1).view(-1, *[1] * (left.dim() - 1))
        mixed = torch.where(odd, right, left).mean(0), torch.where(odd, left, right).mean(0)
        for side, i in (("left", 0), ("right", 1)):
            own = [mixed[i] if r % 2 == 0 else mixed[1 - i] for r in range(trial.num_ranks)]
            trial.close(
                f"the gradient of {side}.{part}",
                by_rank(seen.results, "gradients", f"{side}.{part}"),
                seen.expected[f"{side}.{part}"],
                alternatives={
                    "the gradients of two layers mixed up: ranks sent them in different orders": own
                },
                help="Send bucket 0, 1, 2… in this order on all ranks, whichever is ready first.",
            )
    require_mean(trial, seen, help="Send buckets in one order on all ranks.")


@check("DataParallel", world_sizes=(2, 4), subgroup=False)
def nothing_is_sent_inside_no_sync(trial: Trial) -> None:
    """Forward and backward inside no_sync() communicate nothing."""
    for r, result in enumerate(trial.once(observe_no_sync).results):
        kinds = result["recording"].kinds(after="inside no_sync")
        trial.require(
            not kinds,
            f"inside no_sync() there were {len(kinds)} communications: {kinds[:3]}",
            rank=r,
            help="The hooks fire during backward: it is they who must know that no_sync() is on.",
        )


@check("DataParallel", world_sizes=(2, 4), subgroup=False)
def what_accumulated_is_reduced(trial: Trial) -> None:
    """The backward after no_sync() reduces the sum of all passes, also of layers that it did not use."""
    seen = trial.once(observe_no_sync)
    for name in [n for n in seen.expected if n != "frozen.weight"]:
        actual = by_rank(seen.results, "gradients", name)
        for r, gradient in enumerate(actual):
            trial.require(
                gradient is not None, f"{name} has no gradient: what accumulated was dropped", rank=r
            )
        own = [g[name] for g in seen.own]
        trial.close(
            f"the gradient of {name} after two passes in no_sync() and one outside",
            actual,
            seen.expected[name],
            alternatives={
                "the last pass alone: what accumulated was dropped": seen.last[name],
                "each rank's own sum: it was not reduced": own,
            },
            help="Send parameter.grad as it is then, with all that no_sync() added up.",
        )


@check("DataParallel", world_sizes=(2,), subgroup=False)
def two_passes_add_up(trial: Trial) -> None:
    """Two synchronised passes without zero_grad add up, as they do on one process."""
    seen = trial.once(observe_two_passes)
    for name in [n for n in seen.expected if n != "frozen.weight"]:
        trial.close(
            f"the gradient of {name} after two passes",
            by_rank(seen.results, "gradients", name),
            seen.expected[name],
            alternatives={"the last pass alone": seen.last[name]},
            help="Nothing of the first pass may be lost, or be counted twice.",
        )


def fill(rank: Any, x: Tensor) -> dict:
    """One backward of the chain for each bucket size: room for 1, 2 and all 6 gradients."""
    recordings, means = {}, {}
    for layers in (1, 2, 6):
        model = build(chain, 1).to(rank.device)
        wrapped = rank.submission.DataParallel(model, rank.group, bucket_bytes=layers * GRADIENT_BYTES)
        with rank.record() as recording:
            loss = wrapped(x).square().mean()
            recording.mark("backward")
            loss.backward()
            recording.mark("finish")
            wrapped.finish_gradient_synchronization()
        recordings[layers], means[layers] = recording, gradients(model)
    return {"recordings": recordings, "gradients": means}


def observe_buckets(trial: Trial, delays: bool = False) -> SimpleNamespace:
    x = [(trial.normal(4, 16),) for _ in range(trial.num_ranks)]
    model = build(chain, 1).double()
    (sum(model(rows.double()).square().mean() for (rows,) in x) / trial.num_ranks).backward()
    return SimpleNamespace(results=trial.run(fill, per_rank=x, delays=delays), expected=gradients(model))


def observe_delays(trial: Trial) -> SimpleNamespace:
    return observe_buckets(trial, delays=True)


@check("DataParallel", world_sizes=(2,), subgroup=False)
def finish_waits_for_the_network(trial: Trial) -> None:
    """On a network that takes its time the gradients are as right as on a fast one."""
    seen = trial.once(observe_delays)
    for layers in (1, 2, 6):
        actual = [result["gradients"][layers] for result in seen.results]
        for name, expected in seen.expected.items():
            trial.close(
                f"the gradient of {name}",
                [g[name] for g in actual],
                expected,
                help="Until work.wait() has returned, what async_op=True left behind is not the result.",
            )


@check("DataParallel", world_sizes=(2, 4), subgroup=False)
def gradients_travel_in_buckets(trial: Trial) -> None:
    """Six gradients of 1024 bytes make 6, 3 or 1 all-reduces, as bucket_bytes is 1024, 2048 or 6144."""
    for r, result in enumerate(trial.once(observe_buckets).results):
        for layers, recording in result["recordings"].items():
            sizes = [
                event.num_bytes
                for event in recording.select("all_reduce")
                if event.num_bytes >= GRADIENT_BYTES
            ]
            full = 6 // layers
            trial.require(
                full <= len(sizes) <= (full if layers == 1 else full + 1),  # a smaller first bucket is fine
                f"with bucket_bytes={layers * GRADIENT_BYTES} there were {len(sizes)} all-reduces of "
                f"{sizes} bytes, "
                f"expected {full}",
                help="Gradients share an all-reduce until the next one would make it larger than "
                "bucket_bytes.",
                rank=r,
            )
            require_bytes(trial, r, recording, 6 * GRADIENT_BYTES)


@check("DataParallel", world_sizes=(2, 4), subgroup=False)
def first_bucket_leaves_before_backward_ends(trial: Trial) -> None:
    """The first all-reduce starts while backward is still computing."""
    for r, result in enumerate(trial.once(observe_buckets).results):
        recording = result["recordings"][1]
        sent = [event.index for event in recording.select("all_reduce")]
        trial.require(
            bool(sent) and sent[0] < recording.last_compute(),
            "no gradient was sent before the last matrix product of backward: the network idles, then the "
            "processor",
            help="Send from the hooks, as soon as a bucket is full, not in "
            "finish_gradient_synchronization().",
            rank=r,
        )


def run_ahead(rank: Any, x: Tensor) -> dict:
    """Rank 1 begins backward only when rank 0's has come to its end, or after two seconds."""
    wrapped = rank.submission.DataParallel(
        build(chain, 1).to(rank.device), rank.group, bucket_bytes=GRADIENT_BYTES
    )
    store = dist.distributed_c10d._get_default_store()
    x.requires_grad_()
    loss = wrapped(x).square().mean()
    ran_ahead = True
    if rank.rank == 0:
        x.register_hook(lambda gradient: store.set("rank 0 is through", "yes"))
    else:
        try:
            store.wait(["rank 0 is through"], timedelta(seconds=2))
        except RuntimeError:
            ran_ahead = False
    loss.backward()
    wrapped.finish_gradient_synchronization()
    return {"ran_ahead": ran_ahead}


@check("DataParallel", world_sizes=(2,), subgroup=False)
def backward_does_not_wait_for_other_ranks(trial: Trial) -> None:
    """A rank's backward computes all of its gradients though another rank has not begun its own."""
    for _ in range(2):  # a machine that is busy elsewhere gets a second chance
        results = trial.run(run_ahead, per_rank=[(trial.normal(4, 16),) for _ in range(2)])
        if results[-1]["ran_ahead"]:
            return
    trial.wrong(
        "rank 0's backward did not get through before rank 1 began its own: the hooks wait for the "
        "all-reduce",
        help="async_op=True, and wait() in finish_gradient_synchronization(), not in the hook.",
    )


# guarded_step


def guarded_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Momentum and decay: even a step on zero gradients changes the weights."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def guarded(rank: Any, seed: int, batches: list[tuple[Tensor, Tensor]]) -> dict:
    model = build(Regression, seed).to(rank.device)
    optimizer = guarded_optimizer(model)
    taken, seen = [], []
    with rank.record() as recording:
        for inputs, targets in batches:
            recording.mark("a step")
            taken.append(bool(rank.submission.guarded_step(model, optimizer, inputs, targets, rank.group)))
            seen.append(weights(model))
    return {"taken": taken, "weights": seen, "recording": recording}


def observe_guarded(trial: Trial, broken: list[list[int]], scale: float = 1.0) -> SimpleNamespace:
    """`broken` lists, for each step, the ranks whose targets hold a number that is not finite."""
    seed, n = trial.seed(), trial.num_ranks
    steps = []
    for ranks in broken:
        batches = [(trial.normal(4, 5), scale * trial.normal(4, 3)) for _ in range(n)]
        for r in ranks:
            batches[r % n][1][trial.integer(0, 3), trial.integer(0, 2)] = trial.choice(
                [float("nan"), float("inf")]
            )
        steps.append(batches)
    results = trial.run(guarded, seed, per_rank=[([batches[r] for batches in steps],) for r in range(n)])
    return SimpleNamespace(results=results, seed=seed, steps=steps, broken=broken)


def reference_weights(seen: SimpleNamespace, average_first: bool = True) -> list[dict[str, Tensor]]:
    """The weights after each step, as one process would have them."""
    model = build(Regression, seen.seed).double()
    optimizer = guarded_optimizer(model)
    after = []
    for batches, ranks in zip(seen.steps, seen.broken, strict=True):
        if not ranks:
            means = [torch.zeros_like(p) for p in model.parameters()]
            for inputs, targets in batches:
                optimizer.zero_grad()
                model(inputs.double(), targets.double())[1].backward()
                if not average_first:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for mean, parameter in zip(means, model.parameters(), strict=True):
                    mean += parameter.grad / len(batches)
            for mean, parameter in zip(means, model.parameters(), strict=True):
                parameter.grad = mean
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        after.append(weights(model))
    return after


def require_guarded(trial: Trial, seen: SimpleNamespace) -> None:
    """Which steps were taken, and the weights after each."""
    expected, clipped = reference_weights(seen), reference_weights(seen, average_first=False)
    want = [not ranks for ranks in seen.broken]
    for r, result in enumerate(seen.results):
        trial.require(
            result["taken"] == want,
            f"the steps returned {result['taken']}, expected {want}: a batch is left out by all ranks or by "
            "none",
            help="All ranks decide by the same number: let them agree on it before anyone returns.",
            rank=r,
        )
    for i in range(len(want)):
        for name in expected[i]:
            actual = [result["weights"][i][name] for result in seen.results]
            before = expected[i - 1] if i else weights(build(Regression, seen.seed))
            trial.close(
                f"{name} after step {i + 1} ({'a good' if want[i] else 'a broken'} batch)",
                actual,
                expected[i][name],
                alternatives={
                    "what it was before the step": before[name],
                    "the step of gradients that were clipped before they were averaged": clipped[i][name],
                }
                if want[i]
                else {},
                help="Average, then clip, then step. A broken batch changes nothing.",
            )


def observe_broken(trial: Trial) -> SimpleNamespace:
    return observe_guarded(trial, [[trial.num_ranks - 1]])


def observe_good(trial: Trial) -> SimpleNamespace:
    return observe_guarded(trial, [[], []], scale=20.0)


def observe_mixture(trial: Trial) -> SimpleNamespace:
    return observe_guarded(
        trial, [[], [trial.num_ranks - 1], [], [0], list(range(trial.num_ranks)), []], scale=0.1
    )


@check("guarded_step")
def a_good_batch_is_a_step_on_the_mean(trial: Trial) -> None:
    """With finite losses everywhere, all ranks step on the mean gradient, clipped after averaging."""
    require_guarded(trial, trial.once(observe_good))


@check("guarded_step")
def all_ranks_leave_a_broken_batch_out(trial: Trial) -> None:
    """When the loss of the last rank is not finite, every rank returns False, and no weight changes."""
    require_guarded(trial, trial.once(observe_broken))


@check("guarded_step")
def training_goes_on_after_a_broken_batch(trial: Trial) -> None:
    """Good and broken batches in turn, broken on one rank, on another, on all: only the good ones count."""
    require_guarded(trial, trial.once(observe_mixture))


@check("guarded_step", world_sizes=(2, 4))
def gradients_and_a_flag_travel(trial: Trial) -> None:
    """What travels in a good step is one copy of the gradients and a few bytes for the decision: no data."""
    seen = trial.once(observe_good)
    size = len(seen.steps) * sum(p.numel() * 4 for p in build(Regression, 0).parameters())
    for r, result in enumerate(seen.results):
        recording = result["recording"]
        gathered = sum(recording.bytes(kind) for kind in ("all_gather", "gather", "broadcast", "all_to_all"))
        trial.require(
            gathered <= size,
            f"{gathered} bytes were gathered or broadcast: ranks exchange more than a decision",
            help="Each rank computes on its own share; gradients are averaged.",
            rank=r,
        )
        require_bytes(trial, r, recording, size)
