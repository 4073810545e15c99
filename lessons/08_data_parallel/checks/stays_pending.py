"""A star for `DataParallel`: a pass that waits for its end, while the model is asked for something else."""

from typing import Any

import torch
from torch import Tensor

from grader.checks import Trial, check, is_close

from .models import build, gradients, seeds, tiny_gpt


def look_before_finish(rank: Any, seed: int, tokens: Tensor, targets: Tensor) -> dict[str, Tensor | None]:
    """Gradients where two forwards stand between backward and its end; in a run that no other check needs."""
    model = build(tiny_gpt, seed).to(rank.device)
    wrapped = rank.submission.DataParallel(model, rank.group)
    wrapped(tokens, targets)[1].backward()
    with torch.no_grad():
        wrapped(tokens, targets)
    with wrapped.no_sync():
        wrapped(tokens, targets)
    wrapped.finish_gradient_synchronization()
    return gradients(model)


@check("DataParallel", subgroup=False, optional=True)
def a_pass_stays_pending(trial: Trial) -> None:
    """A forward under torch.no_grad() or in no_sync(), before a pass is finished, leaves it pending."""
    numbers = seeds(trial)
    data = [(trial.tokens(23, 2, 8), trial.tokens(23, 2, 8)) for _ in numbers]
    found = trial.run(look_before_finish, per_rank=[(s, *d) for s, d in zip(numbers, data, strict=True)])
    own = []
    for tokens, targets in data:
        model = build(tiny_gpt, numbers[0]).double()
        model(tokens, targets)[1].backward()
        own.append(gradients(model))
    nothing_done = all(
        gradient is None or is_close(gradient, mine[name])
        for result, mine in zip(found, own, strict=True)
        for name, gradient in result.items()
    )
    for name in own[0]:
        mean = torch.stack([mine[name] for mine in own]).mean(0)
        trial.require(
            all(result[name] is not None and is_close(result[name], mean) for result in found),
            f"the gradient of {name} is not the mean where two forwards stand between backward and finish_…, "
            "one under torch.no_grad() and one inside no_sync(); without them it is",
            cause="such a forward ends the pass that is pending, and finish_… then does nothing"
            if nothing_done
            else "",
            help="A forward that makes nothing pending leaves alone what is: finish_… alone ends a pass.",
        )
