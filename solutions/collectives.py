"""Collectives by hand: broadcast down a tree, reduce-scatter, all-gather and all-reduce round a ring.

Everything is made of messages between two ranks. A ring keeps every rank's network busy all the
time, in both directions, and so its price in bytes hardly depends on the number of ranks.
Sources: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in
MPICH"; Patarasuk and Yuan 2009, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations".
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work


def broadcast(tensor: Tensor, source: int, group: ProcessGroup) -> None:
    """Give every rank the tensor of rank `source` (a rank in the group), in place.

    Down a binomial tree: in each round ranks that have the tensor send it to ranks that have not, one to one.
    n - 1 messages in all, ceil(log2 n) rounds, and at most ceil(log2 n) messages from any rank.
    Any shape and dtype, bit for bit. The tensor need not be contiguous, nor lie in memory as it does on
    other ranks. Uses only messages between two ranks, all of them over when the function returns.
    """
    # answer
    n, rank = group.size(), group.rank()
    place = (rank - source) % n  # counted from the source
    buffer = tensor.contiguous()
    reach = 1  # how many ranks have it
    while reach < n:
        if place < reach and place + reach < n:
            dist.isend(buffer, group=group, group_dst=(rank + reach) % n).wait()
        elif reach <= place < 2 * reach:
            dist.irecv(buffer, group=group, group_src=(rank - reach) % n).wait()
        reach *= 2
    if buffer is not tensor:
        tensor.copy_(buffer)
    # end of answer


# answer: one step of a ring
def pass_on(outgoing: Tensor, group: ProcessGroup) -> Tensor:
    """Send to the next rank, and return what the rank before sent, of the same shape.

    Both start before either is waited for, as one batch: NCCL takes the messages of a batch side by
    side, and separate ones in turn.
    """
    n, rank = group.size(), group.rank()
    incoming = torch.empty_like(outgoing)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, outgoing, group=group, group_peer=(rank + 1) % n),
            dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % n),
        ]
    )
    for work in works:
        work.wait()
    return incoming


# end of answer


def ring_reduce_scatter(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of all ranks' tensors, flattened and cut into n chunks, of which rank r returns chunk r.

    A chunk has ceil(numel/n) elements. Where too few are left, at the tensor's end, a chunk is filled up with
    zeros, or is shorter: all chunks, joined and cut to numel, are the flattened sum, in the tensor's dtype.
    A rank sends n - 1 chunks of partial sums in all, to its neighbours in the ring (rank ± 1): (n-1)/n of
    the tensor's bytes.
    The input is not changed. It need not be contiguous, nor lie in memory as it does on other ranks.
    Uses only messages between two ranks, all of them over when the function returns.
    """
    # answer
    n, rank = group.size(), group.rank()
    chunk_size = -(-tensor.numel() // n)
    padded = tensor.new_zeros(n * chunk_size)
    padded[: tensor.numel()] = tensor.flatten()
    chunks = padded.view(n, chunk_size)
    for step in range(1, n):
        incoming = pass_on(chunks[(rank - step) % n], group)
        chunks[(rank - step - 1) % n] += incoming
    return chunks[rank].clone()  # a view would keep all chunks in memory
    # end of answer


def ring_all_gather(shard: Tensor, group: ProcessGroup) -> Tensor:
    """The shards of all ranks, joined along dim 0 in the order of ranks: (m, ...) to (n·m, ...).

    All shards have the same shape and dtype, whatever these are, and at least one element. A rank sends
    n - 1 shards in all, each to a neighbour in the ring (rank ± 1): (n-1)/n of the result's bytes.
    The input is not changed. It need not be contiguous, nor lie in memory as it does on other ranks.
    Uses only messages between two ranks, all of them over when the function returns.
    """
    # answer
    n, rank = group.size(), group.rank()
    shards = shard.new_empty(n, *shard.shape)
    shards[rank] = shard
    for step in range(n - 1):
        shards[(rank - step - 1) % n] = pass_on(shards[(rank - step) % n], group)
    return shards.flatten(0, 1)
    # end of answer


def ring_all_reduce(tensor: Tensor, group: ProcessGroup) -> None:
    """Replace the tensor by the sum of all ranks' tensors, in place: any shape and size > 0, in its dtype.

    A reduce-scatter, then an all-gather: a rank sends 2(n-1)/n of the tensor's bytes, to its neighbours in
    the ring (rank ± 1). All ranks have the same sum, to the last bit. The tensor need not be contiguous, nor
    lie in memory as it does on other ranks. Uses only messages between two ranks, all of them over when the
    function returns.
    """
    # answer
    shard = ring_reduce_scatter(tensor, group)
    total = ring_all_gather(shard, group)[: tensor.numel()]
    tensor.copy_(total.view(tensor.shape))
    # end of answer


def all_to_all(
    tensors: Sequence[Tensor], group: ProcessGroup, shapes: Sequence[Sequence[int]] | None = None
) -> list[Tensor]:
    """What every rank had for this one, in the order of ranks: entry s of rank r is `tensors[r]` of rank s.

    One tensor for each rank of the group, in a list or a tuple, all of one dtype, of any shapes and sizes:
    some may be empty.
    Both sides know what travels: `shapes[s]` is the shape of what comes from rank s. Without `shapes` it is
    the shape of what goes there. In each of n - 1 rounds a rank sends to one rank and receives from one, and
    a round is over before the next one begins. Each tensor goes straight to its owner, in one message;
    an empty one may stay at home.
    The entry of the rank itself is its own tensor, or a copy. The inputs are not changed. They need not be
    contiguous, nor lie in memory as they do on other ranks.
    Uses only messages between two ranks, all of them over when the function returns.
    """
    # answer
    n, rank = group.size(), group.rank()
    received = list(tensors)  # this rank's own stays where it is
    for step in range(1, n):
        to, source = (rank + step) % n, (rank - step) % n
        shape = tensors[source].shape if shapes is None else shapes[source]
        received[source] = tensors[rank].new_empty(shape)
        messages = [
            dist.P2POp(dist.isend, tensors[to].contiguous(), group=group, group_peer=to),
            dist.P2POp(dist.irecv, received[source], group=group, group_peer=source),
        ]
        for message in dist.batch_isend_irecv(messages):
            message.wait()
    return received
    # end of answer


def two_level_all_reduce(tensor: Tensor, inner: ProcessGroup, outer: ProcessGroup) -> None:
    """Replace the tensor by the sum of all ranks' tensors, in place: any shape and size > 0, in its dtype.

    `inner` are the ranks of this rank's machine, n of them, and `outer` the ranks with its place in all m
    machines. Inside the machine a reduce-scatter, across the machines an all-reduce of the shard, inside an
    all-gather: inside, a rank sends 2(n-1)/n of the tensor's bytes S, and across 2(m-1)/m · S/n.
    Ranks talk in these two groups alone, by your own functions or PyTorch's; all of it is over when the
    function returns. The tensor need not be contiguous, nor lie in memory as it does on other ranks.
    """
    # answer
    shard = ring_reduce_scatter(tensor, inner)
    ring_all_reduce(shard, outer)
    whole = ring_all_gather(shard, inner)[: tensor.numel()]
    tensor.copy_(whole.view(tensor.shape))
    # end of answer


def collective_time(
    kind: str,
    num_bytes: float,
    num_ranks: int,
    latency: float,
    bandwidth: float,
    seconds_per_byte: float = 0.0,
) -> float:
    """Seconds that a collective takes, from its steps and from the bytes that a rank receives in each.

    A step of m bytes takes `latency` + m / `bandwidth` + m · `seconds_per_byte`. The answer is off by a
    millionth of itself at most.

    Source: Thakur, Rabenseifner and Gropp 2005, section 3, where these are alpha, 1/beta and gamma,
    which there is of additions alone.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter" (rings), "broadcast" (a binomial tree, the
            whole tensor in each step) or "all_to_all" (n - 1 exchanges).
        num_bytes: S, of the whole tensor: the gathered one for all_gather, the input of reduce_scatter,
            one rank's whole buffer for all_to_all.
        num_ranks: n; one rank takes no time.
        latency: seconds of a step that do not depend on its bytes.
        bandwidth: bytes a second that a rank can send, while it receives as many.
        seconds_per_byte: what a received byte costs on its way to its place: the reductions add it to
            what is there, and all kinds copy it, a broadcast too.

    Raises:
        ValueError: another kind.
    """
    # answer
    n = num_ranks
    tree_steps = (n - 1).bit_length()  # ceil(log2 n)
    if kind == "all_reduce":
        steps, step_bytes = 2 * (n - 1), num_bytes / n
    elif kind in ("all_gather", "reduce_scatter", "all_to_all"):
        steps, step_bytes = n - 1, num_bytes / n
    elif kind == "broadcast":
        steps, step_bytes = tree_steps, num_bytes
    else:
        raise ValueError(
            f"no collective {kind!r}: all_reduce, all_gather, reduce_scatter, broadcast, all_to_all"
        )
    return steps * (latency + step_bytes / bandwidth + step_bytes * seconds_per_byte)
    # end of answer


def relay_microbatches(
    layer: Callable[[Tensor], Tensor], inputs: list[Tensor], group: ProcessGroup
) -> list[Tensor]:
    """This rank's part of a pipeline: rank r applies its layer to what rank r - 1 made of each input.

    All ranks get the same number of inputs, one or more, all of one shape and dtype; only those of rank 0
    count. A layer does not change its input, but may return it, or a view of it, which need not be
    contiguous.
    A rank computes what has arrived before it waits for the next. An output leaves for the next rank as soon
    as it is computed (it may wait for the message before it), and while it travels the next one is computed,
    however late its receiver is.
    The last rank returns the outputs in order, the others an empty list. The inputs are not changed.
    Uses only messages between two ranks, all of them over when the function returns.
    """
    # answer
    rank, last = group.rank(), group.size() - 1
    arrived, output = (inputs[0].new_empty(inputs[0].shape) for _ in range(2))
    outputs: list[Tensor] = []
    sending: Work | None = None
    for x in inputs:
        if rank > 0:
            x = arrived
            dist.recv(x, group=group, group_src=rank - 1)
        made = layer(x)
        if sending is not None:
            sending.wait()  # until then the network reads `output`
        output.copy_(made)
        if rank < last:
            sending = dist.isend(output, group=group, group_dst=rank + 1)
        else:
            outputs.append(output.clone())
    if sending is not None:
        sending.wait()
    return outputs
    # end of answer
