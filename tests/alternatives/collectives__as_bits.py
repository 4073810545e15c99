"""Lesson 07 otherwise: whole numbers with the same bits travel in two pieces; two levels take two halves."""

import torch
import torch.distributed as dist

WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor):
    """The same memory as whole numbers, end to end."""
    return tensor.view(-1).view(WHOLE[tensor.element_size()])


def start(transfer, tensor, group, **peer):
    """Two messages, or one where there is one element."""
    return [transfer(piece, group=group, **peer) for piece in bits(tensor).tensor_split(2) if piece.numel()]


def end(works):
    for work in works:
        work.wait()


def ring_all_gather(shard, group):
    n, rank = group.size(), group.rank()
    shards = {rank: shard.contiguous()}
    for step in range(n - 1):
        incoming = torch.empty_like(shards[rank])
        works = start(dist.irecv, incoming, group, group_src=(rank + 1) % n)
        works += start(dist.isend, shards[(rank + step) % n], group, group_dst=(rank - 1) % n)
        end(works)
        shards[(rank + step + 1) % n] = incoming
    return torch.cat([shards[r] for r in range(n)])


def ring_all_reduce(tensor, group):
    n, rank = group.size(), group.rank()
    flat = torch.nn.functional.pad(tensor.reshape(-1), (0, -tensor.numel() % n))
    chunks = [chunk.clone() for chunk in flat.chunk(n)]
    for step in range(2 * (n - 1)):
        incoming = torch.empty_like(chunks[0])
        works = start(dist.irecv, incoming, group, group_src=(rank + 1) % n)
        works += start(dist.isend, chunks[(rank + step) % n], group, group_dst=(rank - 1) % n)
        end(works)
        if step < n - 1:
            chunks[(rank + step + 1) % n] += incoming
        else:
            chunks[(rank + step + 1) % n] = incoming
    tensor.copy_(torch.cat(chunks)[: tensor.numel()].view(tensor.shape))


def relay_microbatches(layer, inputs, group):
    rank, last = group.rank(), group.size() - 1
    outputs, sending = [], []
    for x in inputs:
        if rank > 0:
            x = torch.empty_like(x, memory_format=torch.contiguous_format)
            end(start(dist.irecv, x, group, group_src=rank - 1))
        made = layer(x).clone(memory_format=torch.contiguous_format)
        outputs.append(made)
        if rank < last:
            sending += start(dist.isend, made, group, group_dst=rank + 1)
    end(sending)
    return outputs if rank == last else []


def two_level_all_reduce(tensor, inner, outer):
    """In two halves, each filled up on its own: the second is inside while the first is across."""
    n = inner.size()
    halves = [half for half in tensor.flatten().tensor_split(2) if half.numel()]
    padded = [torch.nn.functional.pad(half, (0, -half.numel() % n)) for half in halves]
    shards = [half.new_empty(half.numel() // n) for half in padded]
    work = []
    for half, shard in zip(padded, shards, strict=True):
        scattered = dist.reduce_scatter_tensor(shard, half, group=inner, async_op=True)
        if work:
            work.pop().wait()
        scattered.wait()
        work.append(dist.all_reduce(shard, group=outer, async_op=True))
    work.pop().wait()
    for half, shard in zip(padded, shards, strict=True):
        dist.all_gather_into_tensor(half, shard, group=inner)
    parts = [half[: part.numel()] for half, part in zip(padded, halves, strict=True)]
    tensor.copy_(torch.cat(parts).view_as(tensor))
