"""A star of `FullySharded`: what lies outside the blocks is freed where no backward is to come."""

from grader.checks import Trial, check

from .residency import RANKS, observe_wordy
from .runs import BY_BACKWARD

AT_ITS_END = "Where the logits need no gradient, free it at the end of forward: no backward is to come."


@check("FullySharded", first_of=RANKS, optional=True)
def a_forward_without_backward_frees_the_rest(trial: Trial) -> None:
    """After a forward under no_grad, in both modes, the token table is whole on no rank."""
    seen = trial.once(observe_wordy)
    table = "the token table, which lies outside the blocks, is still there whole"
    for when, told, cause, help in (
        ("evaluated", "in evaluation mode", table, AT_ITS_END),
        ("validated", "in training mode", f"{table}; in evaluation mode it was freed", BY_BACKWARD),
    ):
        for r, (result, share) in enumerate(zip(seen.results, seen.shares, strict=True)):
            alive = result["step"].alive(when)
            trial.require(
                alive <= share + seen.table / 3,
                f"of a GPT with a large token table {alive:,} bytes are alive on it after a forward under "
                f"no_grad {told}; its shards have {share:,}",
                cause=cause,
                help=help,
                rank=r,
            )
