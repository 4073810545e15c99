"""Checks of `model_flops_utilization`."""

from grader.checks import Answers, Trial, check, compare_answers, exercise
from nanogpt.model import GPTConfig

from .models import Where, draw, flops, parameters, utilization

exercise(
    "model_flops_utilization",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "FLOPs a second that brought the training on, over FLOPs a second that the machine could do.",
        "training_flops of one sequence, over its tokens, is what one token costs.",
    ),
)


def utilize(trial: Trial) -> Answers:
    calls = []
    for _ in range(4):
        heads, block_size = trial.integer(8, 16), 64 * trial.integer(8, 24)
        sizes = {"n_head": heads, "n_embd": 96 * heads, "block_size": block_size}
        config = draw(trial, **sizes, n_layer=24, vocab_size=32_000)  # beside which positions are few
        peak = trial.choice([312e12, 149.7e12, 989.5e12])
        for length in (block_size, block_size // trial.integer(3, 5)):
            calls.append((config, float(trial.integer(10**3, 3 * 10**4)), peak, length))
    many = draw(trial, n_head=12, n_embd=768, block_size=8192, n_layer=12, vocab_size=32_000)
    for length in (trial.integer(256, 512), trial.integer(600, 1024)):  # of which most positions are not used
        calls.append((many, float(trial.integer(10**3, 3 * 10**4)), 312e12, length))
    calls.append((many, 10.0**7, 312e12, 8192))  # more than the peak: one of the numbers is wrong, and shows
    return Answers(trial, "model_flops_utilization", calls, utilization)


def utilization_slips(c: GPTConfig, rate: float, peak: float, s: int) -> dict[str, float]:
    right, every = utilization(c, rate, peak, s), parameters(c)["total"]
    forward, full = flops(c, 1, s)["total"] / s, flops(c, 1, s, "full")["total"] / s
    matrices, token_core = every - c.block_size * c.n_embd, c.n_layer * c.n_embd * s
    half = "of attention's core the causal half alone is there: its two products are of s x s"
    fused = (
        "of attention's core 7/12 are there, a fused kernel's 3.5 forwards halved by the mask: it counts as "
        "three forwards of s x s"
    )
    return {
        "in percent: a fraction of 1 is asked for": 100 * right,
        "never more than 1: a fraction above 1 tells that the peak, or the count, is wrong": min(right, 1.0),
        "upside down: achieved over peak": 1 / right,
        "half of it: the peak is doubled, or a multiply-add counts as one FLOP, not two": right / 2,
        "twice too much: the peak is halved, or a multiply-add counts as four FLOPs": 2 * right,
        "peak_flops_per_second is an argument: this is a fraction of an A100's 312e12": right * peak / 312e12,
        "only the forward is counted: backward takes twice as much again": rate / peak * forward,
        "what is computed a second time to save memory does not count": rate / peak * full,
        "6·N alone, or a sequence of one token, leaves out attention's core: 12·L·h·s a token": rate
        / peak
        * 6
        * matrices,
        "6·P leaves out the core, and counts positions, which multiply nothing": rate / peak * 6 * every,
        half: rate / peak * (6 * matrices + 6 * token_core),
        f"{half}. And 6·P counts positions, which multiply nothing": rate
        / peak
        * (6 * every + 6 * token_core),
        fused: rate / peak * (6 * matrices + 7 * token_core),
        "positions are parameters that multiply nothing: 6·P counts them, and 6·N does not": rate
        / peak
        * (6 * every + 12 * token_core),
        "the head is missing: the token table, tied to it, multiplies every token": right
        - rate / peak * 6 * c.vocab_size * c.n_embd,
        "sequence_length is the length here, not config.block_size": utilization(c, rate, peak, c.block_size),
        "these are the FLOPs of a sequence for every token: divide by sequence_length": s * right,
    }


@check("model_flops_utilization")
def counted_flops_over_peak(trial: Trial) -> None:
    """FLOPs that forward and backward take, over the peak, within 1 % (PaLM's formula passes)."""
    compare_fraction(trial, lambda c, rate, peak, s: s == c.block_size)


@check("model_flops_utilization")
def shorter_sequences_cost_less(trial: Trial) -> None:
    """The same for sequences shorter than block_size: the core costs less, and some positions nothing."""
    compare_fraction(trial, lambda c, rate, peak, s: s < c.block_size)


def compare_fraction(trial: Trial, where: Where) -> None:
    help = "FLOPs of a token's forward and backward, times tokens a second, over the peak."
    answers = trial.once(utilize)
    compare_answers(trial, answers, slips=utilization_slips, help=help, where=where, tolerance=0.01)
