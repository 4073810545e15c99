"""Lesson 07 otherwise: paired blocking sends, down the ring, a short last chunk, a recursive tree."""

import math

import torch
import torch.distributed as dist


def swap(outgoing, incoming, group):
    """Send to the rank before, receive from the next one; somebody always receives first."""
    n, rank = group.size(), group.rank()
    to, source = (rank - 1) % n, (rank + 1) % n
    if rank == 0:
        dist.recv(incoming, group=group, group_src=source)
        dist.send(outgoing, group=group, group_dst=to)
    else:
        dist.send(outgoing, group=group, group_dst=to)
        dist.recv(incoming, group=group, group_src=source)


def broadcast(tensor, source, group):
    n, rank = group.size(), group.rank()
    here = (rank - source) % n
    buffer = tensor if tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)

    def spread(first, end):
        """The place `first` has it, and places up to `end` want it: serve the middle, then both halves."""
        while end - first > 1:
            middle = first + (end - first + 1) // 2
            if here == first:
                dist.send(buffer, group=group, group_dst=(middle + source) % n)
            elif here == middle:
                dist.recv(buffer, group=group, group_src=(first + source) % n)
            if here >= middle:
                first = middle
            else:
                end = middle

    spread(0, n)
    if not tensor.is_contiguous():
        tensor.copy_(buffer)
    return tensor


def ring_reduce_scatter(tensor, group):
    n, rank = group.size(), group.rank()
    flat = tensor.reshape(-1).clone()
    length = math.ceil(flat.numel() / n)
    chunks = [flat[i * length : (i + 1) * length] for i in range(n)]  # the last ones short, or empty
    for step in range(n - 1):
        out, into = chunks[(rank + 1 + step) % n], chunks[(rank + 2 + step) % n]
        incoming = torch.empty_like(into)
        swap(out, incoming, group)
        into += incoming
    return chunks[rank]


def ring_all_gather(shard, group):
    n, rank = group.size(), group.rank()
    parts = [None] * n
    parts[rank] = shard.contiguous()
    for step in range(n - 1):
        parts[(rank + step + 1) % n] = torch.empty_like(parts[rank])
        swap(parts[(rank + step) % n], parts[(rank + step + 1) % n], group)
    return torch.cat(parts)


def ring_all_reduce(tensor, group):
    """Chunks are rounded down, and the last one has all that is left over."""
    n, rank = group.size(), group.rank()
    length, left = divmod(tensor.numel(), n)
    chunks = list(tensor.flatten().contiguous().split([length] * (n - 1) + [length + left]))
    for step in range(2 * (n - 1)):
        out, place = chunks[(rank + step) % n], (rank + step + 1) % n
        incoming = torch.empty_like(chunks[place])
        swap(out, incoming, group)
        chunks[place] = chunks[place] + incoming if step < n - 1 else incoming
    tensor.copy_(torch.cat(chunks).view(tensor.shape))
    return tensor


def all_to_all(tensors, group, shapes=None):
    """Pairs swap where n is a power of two: partners are rank XOR step. Else shifts, blocking."""
    n, rank = group.size(), group.rank()
    received = [None] * n
    received[rank] = tensors[rank]
    for step in range(1, n):
        pairs = n & (n - 1) == 0
        to, source = (rank ^ step, rank ^ step) if pairs else ((rank + step) % n, (rank - step) % n)
        shape = tuple(shapes[source] if shapes is not None else tensors[source].shape)
        received[source] = torch.empty(shape, dtype=tensors[to].dtype, device=tensors[to].device)
        sending = dist.isend(tensors[to].contiguous(), group=group, group_dst=to)
        dist.recv(received[source], group=group, group_src=source)
        sending.wait()
    return received


def two_level_all_reduce(tensor, inner, outer):
    """Padded to a slice for every rank of all machines; two half rings across instead of one all-reduce."""
    n, m = inner.size(), outer.size()
    padded = tensor.new_zeros(n * m * -(-tensor.numel() // (n * m)))
    padded[: tensor.numel()] = tensor.flatten()
    shard = ring_reduce_scatter(padded, inner)
    shard = ring_all_gather(ring_reduce_scatter(shard, outer), outer)
    tensor.copy_(ring_all_gather(shard, inner)[: tensor.numel()].view_as(tensor))
    return tensor


def collective_time(kind, num_bytes, num_ranks, latency, bandwidth, seconds_per_byte=0.0):
    n = num_ranks
    hops = {
        "all_gather": (n - 1, (n - 1) / n),
        "reduce_scatter": (n - 1, (n - 1) / n),
        "all_reduce": (2 * n - 2, 2 - 2 / n),
        "all_to_all": (n - 1, (n - 1) / n),
        "broadcast": (math.ceil(math.log2(n)),) * 2,
    }
    if kind not in hops:
        raise ValueError(kind)
    steps, share = hops[kind]
    return steps * latency + share * num_bytes * (1 / bandwidth + seconds_per_byte)


def relay_microbatches(layer, inputs, group):
    rank, n = group.rank(), group.size()
    outputs, on_the_way = [], []
    for x in inputs:
        if rank:
            x = torch.empty_like(x)
            dist.irecv(x, group=group, group_src=rank - 1).wait()
        made = layer(x).contiguous()
        if rank == n - 1:
            outputs.append(made)
        else:  # a tensor of its own for each message, kept until it has left
            on_the_way.append((made, dist.isend(made, group=group, group_dst=rank + 1)))
    for _, work in on_the_way:
        work.wait()
    return outputs
