"""Checks of `train_epoch` (find the bug): an epoch's steps, each on all counted targets of its group."""

import math
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import torch

from grader.checks import Trial, check, exercise, is_close
from nanogpt.model import GPTConfig

from .epoch_truth import (
    DECAY,
    RATE,
    SLIPS,
    Batches,
    draw,
    epochs,
    freeze,
    gradient_of,
    groups,
    in_order,
    leave_gradients,
    make,
    tools,
)
from .memory import CONFIGS
from .models import build

exercise(
    "train_epoch",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "Go through an epoch of five micro-batches with accumulate=2, line by line. How often does each line "
        "run, and how often should it?",
        "To weigh a micro-batch you must know all counted targets of its group before its backward: take the "
        "micro-batches `accumulate` at a time. The last slice may be shorter.",
        "Inside the inner loop: forward, weighted loss, backward. After it, once a group: clip, step, "
        "scheduler.",
    ),
)


def train(
    rank: Any,
    config: dict[str, Any],
    seed: int,
    sharpness: float,
    batches: Batches,
    accumulate: int,
    num_epochs: int = 1,
    left: bool = False,
    part: bool = False,
    frozen: bool = False,
    broken: bool = False,
) -> dict[str, Any]:
    """The probe: what the optimizer found at each of its steps, and what the epochs left behind.

    One block is in evaluation mode, as what is not trained any more may be. `broken`: a weight is NaN.
    """
    model = make(GPTConfig(**config), seed, sharpness).to(rank.device)
    model.transformer.h[0].eval()
    before = modes_of(model)
    if left:
        leave_gradients(model)
    if frozen:
        freeze(model)
    if broken:
        with torch.no_grad():
            model.transformer.ln_f.weight[0] = torch.nan
    optimizer, scheduler = tools(model, part)
    steps: list[dict[str, Any]] = []
    shapes: list[tuple[int, ...]] = []
    modes: list[dict[str, bool]] = []
    losses = []
    attached = False

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        steps.append({"gradient": gradient_of(optimizer), "rate": optimizer.param_groups[0]["lr"]})

    optimizer.register_step_post_hook(look)  # a closure makes gradients within the step, which leaves them
    model.transformer.wte.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    model.transformer.drop.register_forward_pre_hook(lambda *_: modes.append(modes_of(model)))
    given = [(inputs.clone(), targets.clone()) for inputs, targets in batches]
    for epoch in range(num_epochs):
        now = in_order(given, epoch)
        found = rank.submission.train_epoch(model, optimizer, scheduler, now, accumulate)
        attached |= any(isinstance(loss, torch.Tensor) and loss.requires_grad for loss in found)
        losses.append([float(loss.detach() if isinstance(loss, torch.Tensor) else loss) for loss in found])
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    changed = [i for i, pair in enumerate(batches) if i < len(given) and not alike(pair, given[i])]
    kept = {"left": len(given), "changed": changed}
    return {
        "steps": steps,
        "losses": losses,
        "weights": weights,
        "shapes": shapes,
        "attached": attached,
        "kept": kept,
        "modes": before,
        "modes during": modes,
        "modes after": modes_of(model),
    }


def modes_of(model: torch.nn.Module) -> dict[str, bool]:
    """Which of its modules are in training mode, by name."""
    return {name or "the model": module.training for name, module in model.named_modules()}


def alike(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether two micro-batches are the same."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def train_held(rank: Any, config: dict[str, Any], seed: int, batches: Batches) -> dict[str, Any]:
    """The probe: what becomes of a frozen parameter that an optimizer with weight decay holds."""
    model = make(GPTConfig(**config), seed, 1.0).to(rank.device)
    leave_gradients(model)
    freeze(model)
    frozen = model.transformer.wpe.weight
    before, has_zeros = frozen.clone(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    optimizer.register_step_post_hook(
        lambda *_: has_zeros.append(frozen.grad is not None and not frozen.grad.any())
    )
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    rank.submission.train_epoch(model, optimizer, scheduler, batches, 2)
    return {"same": torch.equal(frozen, before), "has zeros": all(has_zeros)}


def measure(rank: Any, config: dict[str, Any], seed: int, batches: Batches) -> list[Any]:
    """The probe: peak bytes of the largest micro-batch alone, and of an epoch with all in one group."""
    recordings = []
    largest = max(batches, key=lambda pair: pair[0].numel())
    for whole in (False, True):
        model = make(GPTConfig(**config), seed, 1.0).to(rank.device)
        optimizer, scheduler = tools(model)
        with rank.record(memory=True) as recording:
            if whole:
                rank.submission.train_epoch(model, optimizer, scheduler, batches, len(batches))
            else:
                logits, loss = model(*largest)
                loss.backward()
                del logits, loss
        recordings.append(recording)
    return recordings


# --- what is asked ---

LAST_GROUP = "The last group is shorter, and is a group all the same."


def observe(trial: Trial, case: Any, num_epochs: int = 1) -> SimpleNamespace:
    arguments = (vars(case.config), case.seed, case.sharpness, case.batches, case.accumulate)
    result = trial.run(train, *arguments, num_epochs, case.left, case.part, case.frozen)[0]
    return SimpleNamespace(case=case, result=result, expected=epochs(case, num_epochs), num_epochs=num_epochs)


def told(case: Any) -> str:
    return f"{len(case.batches)} micro-batches, accumulate={case.accumulate}"


def require_count(trial: Trial, seen: SimpleNamespace, help: str) -> None:
    """As many optimizer steps as groups."""
    steps, expected = len(seen.result["steps"]), len(seen.expected.gradients)
    plural = "s" if seen.num_epochs > 1 else ""
    what = f"{told(seen.case)}, {seen.num_epochs} epoch{plural}"
    accumulate = seen.case.accumulate
    left = len(seen.case.batches) % accumulate
    trial.require(
        steps == expected,
        f"{what}: the optimizer took {steps} steps, expected {expected}",
        cause=f"no step is taken for what is left over, {left} of {accumulate}: it is a step of its own"
        if steps != expected and forgets_what_is_left_over(trial)
        else "",
        help=help,
    )


def forgets_what_is_left_over(trial: Trial) -> bool:
    """Whether an epoch of seven takes as many steps as there are whole groups."""
    seen = trial.once(observe_left_over)
    whole = len(seen.case.batches) // seen.case.accumulate
    return len(seen.result["steps"]) == seen.num_epochs * whole


def require_kept(trial: Trial, seen: SimpleNamespace) -> None:
    """The list of micro-batches, and they, are as they were."""
    kept, given = seen.result["kept"], len(seen.case.batches)
    trial.require(
        kept["left"] == given,
        f"{told(seen.case)}: the list `microbatches` has {kept['left']} entries after {seen.num_epochs} "
        f"epoch{'s' if seen.num_epochs > 1 else ''}, and had {given}",
        cause="it is taken apart: the next epoch, which is given the same list, has nothing left to train on"
        if kept["left"] < given
        else "",
        help="Slice it, or count through it: del, pop and clear take entries from the caller's own list.",
    )
    trial.require(
        not kept["changed"],
        f"{told(seen.case)}: the micro-batches {kept['changed']} have other numbers after the epoch",
        help="Read tokens and targets, and write into tensors of your own.",
    )


def require_gradients(trial: Trial, seen: SimpleNamespace, help: str) -> None:
    """What stood in `.grad` at each step."""
    pairs = list(zip(seen.result["steps"], seen.expected.gradients, strict=False))
    fits = [is_close(step["gradient"], expected) for step, expected in pairs]
    if fits and fits[0] and not all(fits):
        require_rates(trial, seen, "scheduler.step() belongs beside optimizer.step().")  # that is why
    if not all(fits):
        require_order(trial, seen)
    slips = {} if all(fits) else SLIPS  # they take time to compute
    wrong = {text: epochs(seen.case, seen.num_epochs, slip).gradients for text, slip in slips.items()}
    for i, (step, expected) in enumerate(pairs):
        trial.close(
            f"{told(seen.case)}: the gradient at step {i + 1}",
            step["gradient"],
            expected,
            alternatives={text: gradients[i] for text, gradients in wrong.items()},
            factors={"accumulate": float(seen.case.accumulate)},
            help=help,
        )


def require_order(trial: Trial, seen: SimpleNamespace) -> None:
    """Where the model ran once on each micro-batch, each step ran on its own."""
    steps = [
        [tuple(inputs.shape) for inputs, _ in group]
        for epoch in range(seen.num_epochs)
        for group in groups(in_order(seen.case.batches, epoch), seen.case.accumulate)
    ]
    ran = iter(seen.result["shapes"])
    if sorted(seen.result["shapes"]) != sorted(chain.from_iterable(steps)):
        return
    for i, own in enumerate(steps):
        these = list(islice(ran, len(own)))
        trial.require(
            sorted(these) == sorted(own),
            f"{told(seen.case)}: step {i + 1} ran on tokens of {listed(these)}, and its own micro-batches "
            f"have {listed(own)}",
            cause="the micro-batches are taken in another order than they are given in",
            help="Take them as they come: the first `accumulate` make the first step.",
        )


def listed(shapes: list[tuple[int, ...]]) -> str:
    return " and ".join(map(str, shapes))


def require_losses(trial: Trial, seen: SimpleNamespace, help: str) -> None:
    """The losses that an epoch returns."""
    given, expected = (
        torch.tensor(losses[0], dtype=torch.float64)
        for losses in (seen.result["losses"], seen.expected.losses)
    )
    slips = {} if is_close(given, expected, rtol=3e-5) else SLIPS
    wrong = {text: epochs(seen.case, slip=slip).losses[0] for text, slip in slips.items()}
    left = len(seen.case.batches) % seen.case.accumulate
    wrong[SHARE_OF_A_FULL_STEP] = [*expected[:-1], expected[-1] * left / seen.case.accumulate]
    trial.close(
        f"{told(seen.case)}: the list of losses",
        given,
        expected,
        rtol=3e-5,
        alternatives={text: torch.tensor(losses) for text, losses in wrong.items()},
        factors={"accumulate": float(seen.case.accumulate)},
        help=help,
    )


SHARE_OF_A_FULL_STEP = (
    "the loss of the shorter step at the end is multiplied by how many micro-batches it has of `accumulate`"
)


def require_rates(trial: Trial, seen: SimpleNamespace, help: str) -> None:
    """The learning rate at each step."""
    rates = [step["rate"] for step in seen.result["steps"]]
    every = seen.case.accumulate
    slips = {
        "the scheduler moves on with every micro-batch, and once more with every step": [
            (every + 1) * i + every for i in range(len(rates))
        ],
        "the scheduler moves on with every micro-batch": [every * (i + 1) - 1 for i in range(len(rates))],
        "the scheduler has moved on with the first step's micro-batches before that step": [
            every * (i + 1) for i in range(len(rates))
        ],
        "the scheduler moves on before the optimizer's step": [i + 1 for i in range(len(rates))],
        "the scheduler moves on with every micro-batch, after the step": [
            every * i for i in range(len(rates))
        ],
        "the scheduler does not move from step to step: it moves once at the end, or never": [0] * len(rates),
        "the scheduler does not move on after the shorter group at the end": [
            i - i // len(seen.expected.losses[0]) for i in range(len(rates))
        ],
    }
    trial.close(
        f"{told(seen.case)}: the row of learning rates at the steps",
        torch.tensor(rates, dtype=torch.float64),
        torch.tensor(seen.expected.rates, dtype=torch.float64),
        alternatives={
            text: torch.tensor([RATE * DECAY**moves for moves in row], dtype=torch.float64)
            for text, row in slips.items()
        },
        help=help,
    )


# --- the checks ---


def observe_even(trial: Trial) -> SimpleNamespace:
    """Nothing special: equal micro-batches, groups that come out even, small gradients, a rate that stays."""
    return observe(trial, draw(trial, 6, 3, sharpness=0.3, even=True))


def observe_uneven(trial: Trial) -> SimpleNamespace:
    return observe(trial, draw(trial, 6, 2, sharpness=0.3))


def observe_clipped(trial: Trial) -> list[SimpleNamespace]:
    """What is left over is a step with a large gradient, too; and a step for every micro-batch."""
    return [observe(trial, draw(trial, *sizes, sharpness=10.0, even=True)) for sizes in ((7, 3), (2, 1))]


def observe_left_over(trial: Trial) -> SimpleNamespace:
    return observe(trial, draw(trial, 7, 3, sharpness=0.3, left=True), num_epochs=2)


def observe_part(trial: Trial) -> SimpleNamespace:
    """Gradients so small that none is clipped, with those of what the optimizer does not hold or without."""
    return observe(trial, draw(trial, 4, 2, sharpness=0.3, left=True, part=True))


def observe_many_steps(trial: Trial) -> SimpleNamespace:
    """Steps so much alike that, were their gradients to pile up, those that are not held would be clipped."""
    case = draw(trial, 2, 2, sharpness=0.3, left=True, part=True)
    case.batches *= 8
    return observe(trial, case)


def observe_frozen(trial: Trial) -> SimpleNamespace:
    """The optimizer holds the blocks alone, so that it is the norm that tells."""
    return observe(trial, draw(trial, 4, 2, sharpness=0.3, left=True, part=True, frozen=True))


def observe_short(trial: Trial) -> SimpleNamespace:
    """Fewer micro-batches than a step takes."""
    return observe(trial, draw(trial, 3, 5, sharpness=0.3))


def observe_empty(trial: Trial) -> list[SimpleNamespace]:
    """Of two steps, a micro-batch in the first, the first's last one, or the epoch's last counts nothing."""
    return [observe(trial, draw(trial, 6, 3, sharpness=0.3, empty=empty)) for empty in (1, 2, 5)]


@check("train_epoch")
def a_step_for_every_group(trial: Trial) -> None:
    """Micro-batches that are all alike: each step is one on the mean of its group."""
    seen = trial.once(observe_even)
    require_count(trial, seen, "One optimizer step for `accumulate` micro-batches.")
    require_gradients(trial, seen, "Gradients of a group add up; a new group starts from nothing.")


@check("train_epoch")
def the_training_mode_is_left_alone(trial: Trial) -> None:
    """Each module is in training or evaluation mode during the epoch and after it as it was before."""
    seen = trial.once(observe_even)
    before = seen.result["modes"]
    for when, found in (("during", seen.result["modes during"]), ("after", [seen.result["modes after"]])):
        other = next((name for modes in found for name in before if modes[name] != before[name]), "")
        trial.require(
            not other,
            f"{other} was in {'training' if before.get(other) else 'evaluation'} mode before the epoch, and "
            f"not {when} it",
            help="train() and eval() are the caller's, and reach every module: one may be in another mode.",
        )


@check("train_epoch")
def counted_targets_weigh_the_same(trial: Trial) -> None:
    """Where micro-batches count few targets or many, a step is on the mean over all of its group's."""
    seen = trial.once(observe_uneven)
    require_gradients(
        trial, seen, "Count the targets of the whole group first; weigh each loss by its share."
    )


@check("train_epoch")
def losses_are_the_means_of_the_steps(trial: Trial) -> None:
    """The epoch returns one loss for each step: the mean over the counted targets of its group."""
    for seen in (trial.once(observe_even), trial.once(observe_uneven)):
        require_losses(trial, seen, "One number a step, weighed as the gradient is.")
        trial.require(
            not seen.result["attached"],
            f"{told(seen.case)}: the losses are tensors with their graphs, and not numbers",
            help="loss.item() is a float. Who keeps a graph for every step of a run keeps more and more.",
        )


@check("train_epoch")
def clipping_is_of_the_whole_gradient(trial: Trial) -> None:
    """A large gradient is clipped to norm 1 once, when the whole group has added to it."""
    for seen in trial.once(observe_clipped):
        require_gradients(trial, seen, "Clip once a step, between the last backward and the optimizer.")


@check("train_epoch")
def the_scheduler_counts_steps(trial: Trial) -> None:
    """The learning rate moves on once with each optimizer step, however many micro-batches there are."""
    for seen in (trial.once(observe_even), trial.once(observe_uneven)):
        require_rates(trial, seen, "scheduler.step() belongs beside optimizer.step().")


@check("train_epoch")
def what_is_left_over_is_a_step(trial: Trial) -> None:
    """Micro-batches left over make a step of their own, and nothing leaks from one epoch into the next."""
    for seen in (trial.once(observe_left_over), trial.once(observe_short)):
        require_kept(trial, seen)
        require_count(trial, seen, LAST_GROUP)
        require_rates(
            trial, seen, "After the last group, too, scheduler.step() belongs beside optimizer.step()."
        )
        help = "The last group has its own number of targets. A new epoch starts with no gradient."
        require_gradients(trial, seen, help)
        require_losses(
            trial, seen, "The last step's loss is the mean of its own micro-batches' targets, too."
        )
        trial.close(
            f"{told(seen.case)}: the vector of all weights in the end",
            seen.result["weights"],
            seen.expected.weights,
            help="After the last group: clip, step, scheduler, as after every other.",
        )


@check("train_epoch")
def a_microbatch_may_count_nothing(trial: Trial) -> None:
    """A micro-batch whose targets are all ignored adds nothing to its step, and what comes after it does."""
    epochs = trial.once(observe_empty)
    skipped = [len(seen.result["steps"]) for seen in epochs] == [2, 1, 1]  # none where it is the last
    for seen in epochs:
        trial.require(
            not skipped or len(seen.result["steps"]) == 2,
            f"{told(seen.case)}, the last of a group counts nothing: the optimizer took 1 step, expected 2",
            cause="no step is taken where the last micro-batch of a group counts nothing",
            help="It adds nothing to its step, which is due all the same: `continue` leaves that out too.",
        )
        help = "It has a place in its step: left out before steps are made, it lets others move up."
        require_count(trial, seen, help)
        numbers = [step["gradient"] for step in seen.result["steps"]]
        numbers.append(torch.tensor(seen.result["losses"][0]))
        if not all(number.isfinite().all() for number in numbers):
            help = "Its mean is 0/0, and 0 times NaN is NaN: leave it out of the sum, or sum losses."
        require_gradients(trial, seen, help)
        require_losses(trial, seen, help)


@check("train_epoch")
def the_optimizer_may_hold_a_part(trial: Trial) -> None:
    """Where the optimizer holds some parameters only, no old gradient of the others counts in the norm."""
    help = (
        "What the norm counts is of this group alone: if it goes over model.parameters(), then so does what "
        "clears gradients, and what divides them."
    )
    for seen in (trial.once(observe_part), trial.once(observe_many_steps)):
        require_gradients(trial, seen, help)


@check("train_epoch")
def what_frozen_parameters_have_does_not_count(trial: Trial) -> None:
    """What stood in the `.grad` of a frozen parameter before the epoch does not count either."""
    help = "clip_grad_norm_ counts every .grad that is there: clear those of all parameters, frozen or not."
    require_gradients(trial, trial.once(observe_frozen), help)


@check("train_epoch")
def a_nan_of_the_epoch_is_not_hidden(trial: Trial) -> None:
    """Where the model gives NaN for targets that count, the step's loss is NaN."""
    case = draw(trial, 2, 2, sharpness=0.3, empty=1)
    arguments = (vars(case.config), case.seed, case.sharpness, case.batches, case.accumulate)
    result = trial.run(train, *arguments, 1, False, False, False, True)[0]
    losses, steps = result["losses"][0], len(result["steps"])
    trial.require(
        bool(losses) and all(math.isnan(loss) for loss in losses),
        f"a weight is NaN, and the losses of the epoch are {losses}",
        cause="a loss that is not a number is taken for that of a micro-batch without counted targets"
        if losses
        else "",
        help="Ask for the number of counted targets, and not whether the loss is a number.",
    )
    trial.require(
        steps == 1,
        f"a weight is NaN: the optimizer took {steps} steps, expected 1",
        cause=""
        if steps
        else "a step whose loss is not a number is left out, and the training goes on without a word",
        help="Every group makes a step, whatever its loss is.",
    )


@check("train_epoch")
def one_microbatch_at_a_time(trial: Trial) -> None:
    """Each micro-batch has its own forward and backward: memory is that of the largest one."""
    seen = trial.once(observe_uneven)
    largest = max(inputs.numel() for inputs, _ in seen.case.batches)
    most = max((rows * length for rows, length in seen.result["shapes"]), default=0)
    trial.require(
        most <= largest,
        f"the model ran on {most} tokens at once, where the largest micro-batch has {largest}",
        help="Micro-batches are there because more does not fit.",
    )
    memory = trial.once(observe_memory)
    all_alive = memory.group >= len(memory.case.batches) * memory.one / 2
    trial.require(
        memory.group <= 1.5 * memory.one + 5 * memory.gradients,
        f"a group of {len(memory.case.batches)} micro-batches has {memory.group:,} bytes alive at once; the "
        f"largest micro-batch alone needs {memory.one:,}, and gradients {memory.gradients:,}",
        cause="what the forward keeps is there for all of them together" if all_alive else "",
        help="backward() after each forward frees what it kept: one backward for the sum of losses does not."
        if all_alive
        else "backward() without retain_graph=True frees what its forward kept. Of a micro-batch, gradients "
        "and its loss as a number stay: nothing else has to.",
    )


def observe_memory(trial: Trial) -> SimpleNamespace:
    """Blocks keep nearly all: what is alive of another forward is no small part of the peak."""
    case = draw(trial, 8, 8, sharpness=1.0, even=True)
    case.config = CONFIGS["a small vocabulary"]
    case.batches = [
        tuple(trial.tokens(case.config.vocab_size, 24, 12) for _ in range(2)) for _ in case.batches
    ]
    one, group = trial.run(measure, vars(case.config), case.seed, case.batches)[0]
    gradients = 4 * sum(p.numel() for p in build(case.config, 0).parameters())
    return SimpleNamespace(case=case, one=one.peak_bytes, group=group.peak_bytes, gradients=gradients)


@check("train_epoch", optional=True)
def a_frozen_parameter_does_not_decay(trial: Trial) -> None:
    """A frozen parameter stays as it is, also where an optimizer with weight decay holds it."""
    case = draw(trial, 4, 2, sharpness=1.0)
    found = trial.run(train_held, vars(case.config), case.seed, case.batches)[0]
    trial.require(
        found["same"],
        "the positions are frozen, and held by an AdamW: after the epoch they are others",
        cause="at the steps their .grad is zeros, and not None: weight decay moves what has a .grad, if only "
        "of zeros"
        if found["has zeros"]
        else "",
        help="zero_grad() makes it None, unless it is told set_to_none=False: the optimizer skips None.",
    )
