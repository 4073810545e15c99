"""What the words of an error mean to a learner: torch's own words, as this torch says them."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grader.judging.crashes import why_crashed
from grader.judging.group_and_world import NOT_OF_THE_GROUP, NOT_OF_TORCHS_GROUP
from grader.judging.stories import ending
from grader.ranks.launcher import RankReport, RunReport
from grader.ranks.limits import Limits
from grader.ranks.recording import Event
from nanogpt.model import GPT, GPTConfig


class Same(torch.autograd.Function):
    """Its forward changes nothing."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 1


class Wider(Same):
    """Its backward returns what does not fit."""

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.repeat(2)


class Longer(Same):
    """Its backward returns more than forward was given."""

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        return gradient, gradient


class Turned(Same):
    """Its backward returns the gradient of a matrix transposed."""

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.T


class AsItWas(Same):
    """Its forward returns what it was given."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x


class AlsoForNone(torch.autograd.Function):
    """Its backward returns a gradient for an argument that is None."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: None) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        return gradient, gradient


def hook_frozen() -> None:
    nn.Parameter(torch.ones(2), requires_grad=False).register_post_accumulate_grad_hook(print)


def without_graph() -> None:
    torch.ones(()).backward()


def twice() -> None:
    y = torch.ones(2, requires_grad=True).exp().sum()
    y.backward()
    y.backward()


def in_place() -> None:
    y = torch.ones(2, requires_grad=True).exp()
    z = y.sin()
    y += 1
    z.sum().backward()


def on_a_leaf() -> None:
    torch.ones(2, requires_grad=True).add_(1)


def on_a_view_of_a_leaf() -> None:
    torch.ones(2, requires_grad=True)[:1].add_(1)


def on_an_input_that_came_back() -> None:
    y = AsItWas.apply(torch.ones(2, requires_grad=True) * 1)
    y += 1


def of_several() -> None:
    torch.ones(2, requires_grad=True).exp().backward()


def of_two_dtypes() -> None:
    torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.bfloat16)


def too_far() -> None:
    nn.functional.embedding(torch.tensor([7]), torch.ones(3, 2))


def endless() -> None:
    endless()


class Saves(torch.autograd.Function):
    """Hands a number to save_for_backward."""

    @staticmethod
    def forward(ctx, x, number):
        ctx.save_for_backward(x, number)
        return x.clone()


def through_a_reentrant_checkpoint() -> None:
    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad(checkpoint(torch.sin, x, use_reentrant=True).sum(), x)


def viewed() -> None:
    torch.ones(2, 3).T.view(6)


WORDS = {
    hook_frozen: "frozen",
    without_graph: "no graph leads to",
    twice: "two backwards",
    in_place: "changed in place after",
    on_a_leaf: "where autograd watches",
    on_a_view_of_a_leaf: "where autograd watches",
    on_an_input_that_came_back: "its input as it was, or a view of it",
    of_several: "several numbers",
    of_two_dtypes: "two dtypes",
    too_far: "a row is looked up that is not there",
    viewed: "one piece of memory",
    through_a_reentrant_checkpoint: "a reentrant checkpoint works for loss.backward() alone",
    endless: "leads back to itself",
    lambda: Saves.apply(torch.ones(2, requires_grad=True), 3): "tensors and None alone",
    lambda: Wider.apply(torch.ones(2, requires_grad=True)).sum().backward(): "shape of forward's input",
    lambda: Turned.apply(torch.ones(2, 3, requires_grad=True)).sum().backward(): "is transposed",
    lambda: AlsoForNone.apply(torch.ones(2, requires_grad=True), None).sum().backward(): "was no tensor",
    lambda: Longer.apply(torch.ones(2, requires_grad=True)).sum().backward(): "one value for each argument",
}


@pytest.mark.parametrize(("fail", "words"), WORDS.items(), ids=WORDS.values())
def test_torchs_words_are_known(fail, words: str) -> None:
    with pytest.raises((RuntimeError, IndexError, TypeError)) as error:
        fail()
    cause, step = why_crashed(error.type.__name__, str(error.value), (), (), 2)
    assert words in cause and step


def test_ranks_that_a_group_has_not_are_told_by_where_they_count() -> None:
    """Whether it was a rank of the other kind or a neighbour beyond the last one, the words do not say."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        for look_up, words in (
            (dist.get_group_rank, "a rank of the world that is not in the group"),
            (dist.get_global_rank, "a rank in the group that the group has not"),
        ):
            with pytest.raises(ValueError, match="not part of group") as error:
                look_up(group, 1)
            cause, step = why_crashed("ValueError", str(error.value), (), (), 2)
            assert words in cause and "group.rank()" in step
            called_by_none = why_crashed("ValueError", str(error.value), (), (), 2, ("backward", "scatter"))
            assert (called_by_none[0] == NOT_OF_TORCHS_GROUP) == (look_up is dist.get_group_rank)
    finally:
        dist.destroy_process_group()


def test_logits_of_one_position_are_asked_for_where_the_loss_takes_all() -> None:
    logits, loss = GPT(GPTConfig(8, 8, n_layer=1, n_head=1, n_embd=4))(torch.zeros(2, 4, dtype=torch.long))
    assert loss is None
    with pytest.raises(ValueError, match="batch_size") as error:
        nn.functional.cross_entropy(logits.flatten(0, 1), torch.zeros(8, dtype=torch.long))
    assert "the last one alone" in why_crashed("ValueError", str(error.value), (), (), 0)[1]


def test_without_ranks_none_is_spoken_of() -> None:
    message = "mat1 and mat2 shapes cannot be multiplied (364x37 and 148x37)"
    assert "this rank's part" in why_crashed("RuntimeError", message, (), (), 2)[1]
    assert why_crashed("RuntimeError", message, (), (), 0) == (
        "",
        "The input of a product is 37 wide, and the matrix takes 148.",
    )
    cause, step = why_crashed("IndexError", "index out of range in self", (), (), 0)
    assert "a row is looked up" in cause and "rank" not in step


def test_what_is_received_into_and_what_is_sent_are_told_apart() -> None:
    message = "input tensor has to be contiguous"
    assert "was sent" in why_crashed("RuntimeError", message, (), (), 2, ("batch_isend_irecv", "isend"))[0]
    cause, step = why_crashed("RuntimeError", message, (), (), 2, ("batch_isend_irecv", "irecv"))
    assert "received into" in cause and "torch.empty(shape" in step


def test_an_all_gather_along_another_dimension_is_told_from_parts_of_other_sizes() -> None:
    message = "ProcessGroupGloo::allgather: invalid tensor size at index 0 (expected (2, 4, 5), got (%s))"
    assert "along another one?" in why_crashed("RuntimeError", message % "1, 8, 5", (), (), 2)[1]
    assert "along another one?" in why_crashed("RuntimeError", message % "1, 12, 5", (), (), 3)[1]
    assert why_crashed("RuntimeError", message % "2, 3, 5", (), (), 2) == ("", "")
    assert "(n, ...)" in why_crashed("RuntimeError", message % "1, 2, 4, 5", (), (), 2)[0]


def test_none_is_a_missing_gradient_only_where_a_gradient_is_read() -> None:
    message = "unsupported operand type(s) for /=: 'NoneType' and 'int'"
    assert ".grad is None" in why_crashed("TypeError", message, ("at line 3: `p.grad /= n`",), (), 2)[0]
    assert why_crashed("TypeError", message, ("at line 3: `y + self.bias`",), (), 2) == ("", "")


def test_what_was_seen_goes_before_what_words_tell() -> None:
    assert (
        why_crashed("RuntimeError", "element 0 of tensors does not require grad", (), ("no grad",), 2)[0]
        == "no grad"
    )
    assert why_crashed("ValueError", "the story", (), (), 2) == ("", "")


@pytest.mark.parametrize("first", [1, 3])
def test_a_rank_that_the_group_has_not_is_told_before_a_message_to_oneself(first: int) -> None:
    """Two ranks of a world of four call ranks of the group ranks of the world: either may be first."""
    said = {
        1: "gloo: state_ >= CONNECTED. 1 vs 4. Pair is not connected (127.0.0.1$0 <--> [none])",
        3: "Global rank 0 is not part of group <torch.distributed.ProcessGroupGloo>",
    }
    ranks = [RankReport("done") for _ in range(4)]
    for rank, message in said.items():
        error = {"type": "RuntimeError", "message": message}
        ranks[rank] = RankReport("failed", error=error, ended_at=1.0 + (rank != first))
    end = ending(RunReport("trouble", 2.0, ranks), lambda file, line: "", Limits(), [1, 3])
    assert end is not None
    assert end.message.startswith("rank 1 (and 1 more) raised RuntimeError: Global rank 0")
    assert end.cause == NOT_OF_THE_GROUP


@pytest.mark.parametrize(
    ("messages", "step"), [(1, "must name the same group"), (3, "a message whose handle is dropped")]
)
def test_a_message_that_stands_behind_others_may_wait_for_a_dropped_handle(messages: int, step: str) -> None:
    """Both ranks wait in the last message: only where it has others before it may one of those be lost."""
    ranks = []
    for kind, peer in (("send", 1), ("recv", 0)):
        events = [
            Event(kind, 40, 10, "float32", (10,), (0, 1), peer, "", True, "", 0, "", index)
            for index in range(1, messages + 1)
        ]
        ranks.append(RankReport("running", began=True, events=events, waits_for=messages))
    end = ending(RunReport("idle", 9.0, ranks), lambda file, line: "", Limits(), [0, 1])
    assert end is not None
    assert "the two did not meet" in end.message
    assert step in end.help
