"""The whole model with dropout: what each rank holds, drops, keeps and learns."""

import torch

from grader.checks import Trial, check, each_rank
from lessons_shared.cut_gpt import dense_model
from lessons_shared.cut_gpt_checks import attentions, table_gradients_are_right

from .gradients import attention_gradients_are_right, block_gradients_are_right
from .masks import drop_as_seen, masks_differ, stream_is_cut
from .model_runs import RATE, WORDS, observe_dropping
from .shared import FEWER, alive_before_backward, kept_bytes, norms_are_cut


@check("sequence_parallelize", world_sizes=FEWER)
def residual_stream_has_this_ranks_tokens(trial: Trial) -> None:
    """What enters and leaves a block, and what norms and dropouts read, are s/n tokens."""
    for seen in trial.once(observe_dropping):
        share = seen.idx.numel() * seen.config["n_embd"] // trial.num_ranks
        stream_is_cut(trial, seen, share)
        for rank, result in enumerate(seen.results):
            norms_are_cut(trial, rank, result.get("normed", []), share)
            for number, num_elements in enumerate(result["dropped"], start=1):
                trial.require(
                    num_elements <= share,
                    f"of {len(result['dropped'])} dropouts in a forward, number {number} acts on "
                    f"{num_elements:,} elements: {share:,}, 1/{trial.num_ranks} of the tokens, are this "
                    "rank's part",
                    help="Take this rank's tokens first, then drop. After the embeddings, too: of their sum "
                    "over the ranks a reduce-scatter leaves a rank its own tokens.",
                    rank=rank,
                )


@check("sequence_parallelize", world_sizes=FEWER)
def dropout_differs_where_tokens_differ(trial: Trial) -> None:
    """No two dropouts drop the same elements, of one rank or of two, also if the ranks share a seed."""
    for seen in trial.once(observe_dropping):
        masks_differ(trial, seen.results, RATE, True, seen.name)


@check("sequence_parallelize", world_sizes=FEWER)
def gradients_are_right_with_dropout(trial: Trial) -> None:
    """With dropout, loss and gradients are the dense model's with the same elements dropped."""
    for seen in trial.once(observe_dropping)[:1]:
        dense = dense_model(seen.config, seen.weights)
        if not drop_as_seen(dense, dense.transformer.h, seen, RATE, True):
            return  # this program calls no norms and blocks that could be watched
        loss = dense(seen.idx, seen.targets)[1]
        loss.backward()
        trial.close(
            f"the loss ({seen.name})",
            [result["losses"][0] for result in seen.results],
            loss.detach(),
            help="Where all ranks hold the same tokens, they must drop the same elements; where they "
            "hold their own, "
            "their own.",
        )
        seen.gradients = {name: p.grad for name, p in dense.named_parameters()}
        asked = (
            "Does each rank drop its own tokens alone, once they are cut? What all ranks drop of the same "
            "tokens must be the same elements. If gradients without dropout are right, it is not their sum."
        )
        block_gradients_are_right(trial, seen, "gradients", 1, asked=asked)
        for prefix in attentions(seen.config):
            attention_gradients_are_right(trial, seen, "gradients", prefix)
        table_gradients_are_right(trial, seen, "gradients", 1)


@check("sequence_parallelize", world_sizes=FEWER)
def nothing_is_dropped_in_eval_mode(trial: Trial) -> None:
    """In eval mode the loss is the dense model's."""
    for seen in trial.once(observe_dropping)[:1]:
        dense = dense_model(seen.config, seen.weights).eval()
        with torch.no_grad():
            expected = dense(seen.idx, seen.targets)[1]
        trial.close(f"the loss in eval mode ({seen.name})", each_rank(seen, "asleep"), expected)


@check("sequence_parallelize", world_sizes=(2, 3))
def bytes_alive_are_what_the_formula_says(trial: Trial) -> None:
    """With dropout no more is alive after the forward than 2 + 16/n times (b, s, h) a block, and the head."""
    for seen in trial.once(observe_dropping)[:1]:
        (b, s), n, h = seen.idx.shape, trial.num_ranks, seen.config["n_embd"]
        layers, part = seen.config["n_layer"], 4 * b * s * h // n
        block = kept_bytes(seen.config, b, s, n, masks=True)
        logits = 4 * b * s * -(-WORDS // n)
        # The embedding's mask; the last norm's input and what the head reads; logits and loss; indices.
        rest = 2 * part + n * part + 6 * logits + 64 * b * s
        for rank, recording in enumerate(each_rank(seen, "recording")):
            alive, allowed = alive_before_backward(recording), layers * block + rest
            trial.require(
                alive <= allowed + layers * part // 2,
                f"{alive:,} bytes are alive after the forward: {allowed:,} are expected if the linear "
                "layers keep their "
                f"gathered inputs, {allowed - 2 * layers * (n - 1) * part:,} if they gather them again",
                help="Norms, masks and the stream have s/n tokens on a rank. What else is kept whole, "
                "(b, s, h)?",
                rank=rank,
            )
