"""Checks of `ring_attention`: rank r has the r-th part of the sequence."""

from types import SimpleNamespace

import torch

from grader.checks import Trial, check, each_rank, exercise
from lessons_shared.results import results_stay

from . import calls, frozen, grouped, large_scores, rings
from .shared import SIZES

exercise(
    "ring_attention",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "Write it first with a loop that only computes: at step t this rank has the keys and values of rank "
        "(r - t) % n. Own block: causal_offset 0. Earlier rank's: no mask. Later rank's: nothing to do.",
        "Stack k and v. batch_isend_irecv with P2POp(dist.isend, kv, group=group, group_peer=(r + 1) % n) "
        "and P2POp(dist.irecv, buffer, group=group, group_peer=(r - 1) % n), compute, wait for both, go on "
        "with the buffer.",
        "Backward as a torch.autograd.Function: from the final lse the weights of every block are "
        "exp(scores - lse). Keys and values travel again; the gradient of a block travels behind it, and "
        "needs one hop more to be home, unless its own rank's term waits there for the rest.",
    ),
)


def observe(trial: Trial) -> SimpleNamespace:
    return rings.observe(trial, rings.PLAIN)


def observe_exact(trial: Trial) -> SimpleNamespace:
    """In float64, alone and between two others."""
    return calls.observe_in(trial, rings.PLAIN, torch.float64, large=True)


@check("ring_attention")
def output_is_that_of_causal_attention(trial: Trial) -> None:
    """Each rank's output is its part of plain causal attention over the whole sequence."""
    rings.require_outputs(trial, trial.once(observe))


@check("ring_attention")
def gradients_are_those_of_causal_attention(trial: Trial) -> None:
    """The gradients of q, k and v are this rank's parts of plain attention's, complete and at home."""
    rings.require_gradients(trial, trial.once(observe))


@check("ring_attention")
def messages_go_to_neighbours(trial: Trial) -> None:
    """Keys and values go from neighbour to neighbour: n-1 hops, and in backward again, with gradients."""
    rings.require_ring(trial, trial.once(observe))


@check("ring_attention")
def blocks_travel_while_one_is_computed(trial: Trial) -> None:
    """In both passes each block is computed while the next one is on its way, not after it has arrived."""
    rings.require_travel_while_computing(trial, trial.once(observe))


@check("ring_attention", world_sizes=(4, 3), subgroup=False)
def no_rank_holds_all_keys(trial: Trial) -> None:
    """No tensor is as long as the sequence, and keys that came by are not kept, for backward either."""
    rings.require_nothing_long(trial, trial.once(observe))


@check("ring_attention")
def blocks_of_the_future_are_not_computed(trial: Trial) -> None:
    """Rank r computes the r + 1 blocks that its queries see, at most three times that in backward."""
    rings.require_work(trial, trial.once(observe), rings.PLAIN)


def observe_grouped(trial: Trial) -> SimpleNamespace:
    return grouped.observe(trial, rings.PLAIN)


@check("ring_attention", world_sizes=(4, 3, 1), subgroup=False)
def grouped_heads_travel_as_they_are(trial: Trial) -> None:
    """k and v may have fewer heads than q: each serves a/a_kv heads of q, and no copies of it travel."""
    grouped.require_ring(trial, trial.once(observe_grouped))


@check("ring_attention")
def inputs_stay_as_they_were(trial: Trial) -> None:
    """q, k, v and the gradient that comes in are not written to."""
    rings.require_unchanged(trial, trial.once(observe))


@check("ring_attention", world_sizes=(3,), subgroup=False)
def it_works_in_the_dtype_of_its_inputs(trial: Trial) -> None:
    """float64 comes out as exact as it went in, and bfloat16 as bfloat16."""
    calls.require_dtype(trial, rings.PLAIN, trial.once(observe), trial.once(observe_exact))


@check("ring_attention", world_sizes=(3,), subgroup=False)
def ring_scores_do_not_overflow(trial: Trial) -> None:
    """Scores of 150 and of -150 give what the softmax gives, forward and backward: no inf, no NaN."""
    large_scores.require_large(trial, trial.once(observe_exact))


@check("ring_attention", world_sizes=(3,), subgroup=False)
def calls_do_not_disturb_each_other(trial: Trial) -> None:
    """The backward of one of three attentions, as of a model's layers, is that of its own forward, and then
    nothing of it is kept."""
    calls.require_calls_apart(trial, trial.once(observe_exact))


@check("ring_attention", world_sizes=(3,), subgroup=False)
def output_is_the_same_in_validation(trial: Trial) -> None:
    """Under torch.no_grad(), where no backward is to come, the output is the same."""
    frozen.require_silent(trial, trial.once(observe_exact))


@check("ring_attention", world_sizes=(3,), subgroup=False)
def gradients_come_where_they_are_needed(trial: Trial) -> None:
    """Of q, k and v some may be frozen: those that need a gradient get it all the same."""
    frozen.require_where_needed(trial, trial.once(observe_exact))


@check("ring_attention", world_sizes=(3,), subgroup=False)
def attention_keeps_its_results(trial: Trial) -> None:
    """What a call and its backward return stays as it is when others of the same shapes are made."""
    results_stay(trial, each_rank(trial.once(observe_exact), "overwritten"))


@check("ring_attention", world_sizes=(3,), subgroup=False)
def ring_goes_back_twice(trial: Trial) -> None:
    """A second backward over the same graph gives the same gradients, and leaves the first ones alone."""
    calls.require_twice_over(trial, rings.PLAIN)
