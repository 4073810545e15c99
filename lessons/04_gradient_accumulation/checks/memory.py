"""Checks of `accumulate_gradients`: what is alive at once is what one micro-batch needs."""

from itertools import count
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from grader.checks import Trial, check
from nanogpt.model import GPTConfig

from .accumulate import observe_even, observe_ragged, observe_uneven
from .models import build

CONFIGS = {
    "a small vocabulary": GPTConfig(block_size=32, vocab_size=32, n_layer=3, n_head=2, n_embd=16, bias=False),
    "a large vocabulary": GPTConfig(
        block_size=32, vocab_size=256, n_layer=2, n_head=2, n_embd=16, bias=False
    ),
}
"""Models whose activations are many times their gradients. Of the first, the blocks keep nearly all of them;
of the second, logits and what the loss and its backward make of them are half."""

COUNTS = {"a small vocabulary": (4, 16), "a large vocabulary": (2, 8)}
ROWS = 32


def peaks(
    rank: Any, cases: list[tuple[dict[str, Any], int, Tensor, Tensor, tuple[int, ...]]]
) -> list[list[Any]]:
    """The probe: for each model, recordings of one pass, the plainest way, and of the learner's function."""
    results = []
    for config, seed, inputs, targets, counts in cases:
        recordings = []
        for k in (1, *counts):
            model = build(GPTConfig(**config), seed).to(rank.device)
            with rank.record(memory=True) as recording:
                number = count()
                model.register_forward_pre_hook(
                    lambda *_, r=recording, n=number: r.mark(f"forward {next(n)}")
                )
                if not recordings:
                    logits, loss = model(inputs, targets)
                    loss.backward()
                    del logits, loss
                else:
                    rank.submission.accumulate_gradients(model, inputs, targets, k)
            recordings.append(recording)
        results.append(recordings)
    return results


def observe_peaks(trial: Trial) -> list[SimpleNamespace]:
    """For each model and each number of micro-batches: bytes at the peak, beside those of one pass."""
    seen, cases = [], []
    for name, config in CONFIGS.items():
        tokens = [trial.tokens(config.vocab_size, ROWS, config.block_size) for _ in range(2)]
        cases.append((vars(config), trial.seed(), *tokens, COUNTS[name]))
    found = trial.run(peaks, cases)[0]
    for (name, config), recordings in zip(CONFIGS.items(), found, strict=True):
        gradients = sum(p.numel() * 4 for p in build(config, 0).parameters())
        one_pass = recordings[0].peak_bytes - gradients
        for k, recording in zip(COUNTS[name], recordings[1:], strict=True):
            seen.append(
                SimpleNamespace(
                    told=f"{name}, b={ROWS}, num_microbatches={k}",
                    k=k,
                    peak=recording.peak_bytes,
                    left=max(list(recording.alive_at.values())[1:], default=0),
                    one_pass=one_pass,
                    gradients=gradients,
                )
            )
    return seen


@check("accumulate_gradients")
def one_microbatch_at_a_time(trial: Trial) -> None:
    """Where b is divisible by k, the model never sees more than b/k sequences at once."""
    for case, result in trial.once(observe_even) + trial.once(observe_uneven):
        allowed = len(case.inputs) // case.num_microbatches
        most = max(result["rows"], default=0)
        by_size = result["rows"] == [len(part) for part in case.inputs.split(case.num_microbatches)]
        trial.require(
            most <= allowed,
            f"{case.told}: the model ran on {most} sequences at once, where a micro-batch has {allowed}",
            help="tensor_split takes the number of pieces."
            if by_size
            else "Cut the batch first; forward and backward belong into the loop.",
            cause=f"the micro-batches have k = {case.num_microbatches} sequences each: split takes a size"
            if by_size
            else "",
        )


@check("accumulate_gradients")
def model_is_called_once_for_each_microbatch(trial: Trial) -> None:
    """The model runs once for each of k micro-batches at most, and on no sequence twice."""
    for case, result in trial.once(observe_even) + trial.once(observe_uneven) + trial.once(observe_ragged):
        k, sizes = case.num_microbatches, result["rows"]
        trial.require(
            len(sizes) <= k,
            f"{case.told}: the model ran {len(sizes)} times, on {', '.join(map(str, sizes))} sequences",
            help=f"Cut the batch into {k}: smaller micro-batches keep the processor less busy, and a wrapper "
            f"such as DDP waits for the last of {k}.",
            cause="each sequence goes through the model twice: one pass gives loss and gradient"
            if sum(sizes) == 2 * len(case.inputs)
            else "",
        )
        trial.require(
            sum(sizes) <= len(case.inputs),
            f"{case.told}: the model ran on {sum(sizes)} sequences in all",
            help="Micro-batches do not overlap, and one pass gives both loss and gradient.",
        )


@check("accumulate_gradients")
def peak_bytes_fall_to_a_share(trial: Trial) -> None:
    """The most bytes that are alive at once, besides gradients, fall to 1/k of what one pass needs."""
    for seen in trial.once(observe_peaks):
        # Half of a micro-batch more, for a loss by hand; four sets of gradients, for sums elsewhere.
        allowed = 1.5 * seen.one_pass / seen.k + 5 * seen.gradients
        trial.require(
            seen.peak <= allowed,
            f"{seen.told}: {seen.peak:,} bytes were alive at once. One pass over the whole batch needs "
            f"{seen.one_pass:,} and {seen.gradients:,} of gradients; 1/{seen.k} of the batch needs some "
            f"{seen.one_pass // seen.k:,} and the gradients",
            help="Call backward() in the loop, on the micro-batch just computed: it frees what that kept, "
            "unless it is told to keep the graph (retain_graph, create_graph). Of what a micro-batch leaves, "
            "such as its logits, nothing should be there when the next but one begins.",
            cause=likely(seen),
        )


def likely(seen: SimpleNamespace) -> str:
    """Why so much is alive."""
    if seen.peak - seen.gradients > 0.5 * seen.one_pass:
        return (
            "what all micro-batches kept is alive together: is backward after the loop, or are graphs kept?"
        )
    if seen.left <= 5 * seen.gradients:  # when the next one begins
        return (
            "of one micro-batch more is alive than backward() needs: create_graph=True, and torch.func, keep "
            "its graph while they make its gradients"
        )
    return (
        "more than one micro-batch is alive: the graph of the one before, or what each leaves behind, "
        "such as its logits"
    )
