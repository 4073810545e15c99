"""Checks of `training_flops`."""

from grader.checks import Answers, Trial, check, exercise, require_refusal
from nanogpt.model import GPTConfig

from .models import batch_for, core_flops, draw, draw_family, flops, measured, parameters

exercise(
    "training_flops",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "y = x @ w has two gradients, for x and for w: how large are the two products that make them?",
        "What is recomputed is one more forward of that part, not one more forward and backward.",
    ),
)

WORDS = ("none", "attention", "full")


def count_training(trial: Trial) -> Answers:
    batches = [batch_for(trial, config) for config in draw_family(trial)]
    calls = [(*batch, word) for batch in batches for word in WORDS]
    return Answers(trial, "training_flops", [*calls, batches[0]], step_flops)


def step_flops(c: GPTConfig, b: int, s: int, recompute: str = "none") -> dict[str, int]:
    return flops(c, b, s, recompute)


def training_slips(c: GPTConfig, b: int, s: int, recompute: str = "none") -> dict[str, float]:
    forward, core = flops(c, b, s), core_flops(c, b, s)
    step = 3 * forward["total"]
    slips = {
        "only the forward is there: for each of its products, backward has two": forward["total"],
        "backward counts like one forward: each product has two gradients to make": 2 * forward["total"],
        "6·P a token is an estimate: norms multiply nothing, the core has no parameters": (
            6 * b * s * parameters(c)["total"]
        ),
        "6·N and the core are an estimate: N has the norms and the biases in it, which multiply nothing": (
            6 * b * s * (parameters(c)["total"] - c.block_size * c.n_embd) + 3 * core
        ),
        "6·P and the core are an estimate: P has positions, norms and biases in it, which multiply nothing": (
            6 * b * s * parameters(c)["total"] + 3 * core
        ),
        "attention's core is missing, in forward and backward: 12·L·h·b·s² in all": step - 3 * core,
    }
    head = forward["head"]
    slips |= {
        "one product of the head is missing: backward makes two, for x and for its matrix": step - head,
        "both backward products of the head are missing": step - 2 * head,
        "the scores are computed once more, as a fused kernel's backward does: attention is the plain one": (
            flops(c, b, s, recompute)["total"] + core // 2
        ),
        "one product of one c_attn is missing, as if the first one's input needed no gradient: it comes from "
        "the embedding, which is trained": step - 6 * b * s * c.n_embd**2,
    }
    if recompute == "none":
        return slips | {
            'nothing is computed again with recompute="none": here the core is': step + core,
            'nothing is computed again with recompute="none": here the blocks are': (
                step + forward["attention"] + forward["mlp"]
            ),
        }
    if recompute == "full":
        slips[
            "the last product of each block is missing, 4h to h in its MLP: torch's own checkpoint stops "
            "before it, and what is asked for is the whole forward of every block"
        ] = step + forward["attention"] + forward["mlp"] // 2
        slips["one block too few runs again: all of them do, the last one too"] = step + (
            forward["attention"] + forward["mlp"]
        ) // c.n_layer * (c.n_layer - 1)
    return (
        {"nothing is computed again here": step}
        | slips
        | {
            "the head is computed again too: only the blocks run twice": 4 * forward["total"],
            "only the core runs again here: a block has projections and an MLP too": step + core,
            "all of attention runs again here, and nothing else": step + forward["attention"],
            "the core's backward is counted again too, or three forwards of it: only one more runs": step
            + 3 * core,
            "half of the core runs again: it is two products, scores and weighted sum": step + core // 2,
            "the core of one layer alone runs again": step + core // c.n_layer,
        }
    )


@check("training_flops")
def backward_is_two_forwards(trial: Trial) -> None:
    """Without recomputation (also when the argument is left out): what a real forward and backward take."""
    compare_word(trial, "none", "Three times the forward: see how forward_flops counts.")


@check("training_flops")
def attention_core_runs_again(trial: Trial) -> None:
    """With recompute="attention": one more forward of the attention core in every layer."""
    compare_word(trial, "attention", "Add the core's forward in each layer: scores and weighted sum.")


@check("training_flops")
def full_runs_the_blocks_again(trial: Trial) -> None:
    """With recompute="full": one more forward of every block, and none of the head."""
    compare_word(trial, "full", "Add one forward of attention and MLP, in each layer.")


def compare_word(trial: Trial, word: str, help: str) -> None:
    def has_word(c: GPTConfig, b: int, s: int, recompute: str = "none") -> bool:
        return recompute == word

    measured(trial, trial.once(count_training), "total", slips=training_slips, help=help, where=has_word)


@check("training_flops")
def unknown_recompute_is_refused(trial: Trial) -> None:
    """Another word for recompute is a ValueError."""
    calls = [(*batch_for(trial, draw(trial)), word) for word in ("selective", "Full", "", "core")]
    answers = Answers(trial, "training_flops", calls, lambda *_: None)
    refused = [isinstance(given, str) and given.startswith("ValueError") for given in answers.given]
    trial.require(
        refused != [word != "" for *_, word in calls],
        "other words are refused, and recompute='' is taken for one that is possible",
        help='Compare with ==: `in ("none")` looks for a piece of a word, and "" is in each; '
        '`recompute or "none"` takes it for a word that was not given.',
    )
    require_refusal(trial, answers, WORDS)
