"""Checks of the wrapper: a pass that waits for its end, while the model is asked for something else."""

from grader.checks import Trial, check, is_close

from .models import by_rank
from .wrapper import observe_step


@check("DataParallel", subgroup=False, optional=True)
def a_pass_stays_pending(trial: Trial) -> None:
    """A forward under torch.no_grad() or in no_sync(), before a pass is finished, leaves it pending."""
    seen = trial.once(observe_step)

    def is_mean(key: str, name: str) -> bool:
        found = by_rank(seen.results, key, name)
        return all(g is not None and is_close(g, seen.expected[name]) for g in found)

    names = [name for name in seen.expected if is_mean("gradients", name)]  # another check tells the others
    left = [by_rank(seen.results, "looked at", name) for name in names]
    nothing_done = all(
        g is None or is_close(g, own[name])
        for name, found in zip(names, left, strict=True)
        for g, own in zip(found, seen.own, strict=True)
    )
    for name in names:
        trial.require(
            is_mean("looked at", name),
            f"the gradient of {name} is not the mean where two forwards stand between backward and finish_…, "
            "one under torch.no_grad() and one inside no_sync(); without them it is",
            cause="such a forward ends the pass that is pending, and finish_… then does nothing"
            if nothing_done
            else "",
            help="A forward that makes nothing pending leaves alone what is: finish_… alone ends a pass.",
        )
