"""Lesson 07 otherwise: uneven chunks, both directions at once, one loop for both phases."""

import torch
import torch.distributed as dist


def start(outgoing, incoming, to, source, group):
    """Receive first, then send: both are under way when it returns."""
    get = dist.get_global_rank
    receiving = dist.irecv(incoming, src=get(group, source), group=group)
    sending = dist.isend(outgoing, dst=get(group, to), group=group)
    return [receiving, sending]


def broadcast(tensor, source, group):
    n, rank = group.size(), group.rank()
    place = (rank - source) % n
    buffer = tensor.contiguous().view(-1)
    step = 1
    while step < n:
        step *= 2
    works = []
    while step > 1:  # far ones first
        step //= 2
        if place % (2 * step) == 0 and place + step < n:
            works.append(dist.isend(buffer, group=group, group_dst=(place + step + source) % n))
        elif place % (2 * step) == step:
            dist.recv(buffer, group=group, group_src=(place - step + source) % n)
    for work in works:
        work.wait()
    tensor.copy_(buffer.view(tensor.shape))


def cut(flat, n):
    return [piece.clone() for piece in flat.tensor_split(n)]


def one_way(pieces, group, direction):
    """Reduce-scatter in place of a list of pieces; rank r's piece is complete."""
    n, rank = group.size(), group.rank()
    to, source = (rank + direction) % n, (rank - direction) % n
    for step in range(1, n):
        out = pieces[(rank - direction * step) % n]
        into = pieces[(rank - direction * (step + 1)) % n]
        incoming = torch.empty_like(into)
        for work in start(out, incoming, to, source, group):
            work.wait()
        into.add_(incoming)


def ring_reduce_scatter(tensor, group):
    """One half of each chunk goes up the ring, the other down; the last chunks are short, or empty."""
    flat, size = tensor.flatten(), -(-tensor.numel() // group.size())
    chunks = [flat[size * r : size * (r + 1)] for r in range(group.size())]
    halves = [chunk.tensor_split(2) for chunk in chunks]
    up, down = [a.clone() for a, _ in halves], [b.clone() for _, b in halves]
    one_way(up, group, 1)
    one_way(down, group, -1)
    return torch.cat([up[group.rank()], down[group.rank()]])


def ring_all_gather(shard, group):
    """Both ways round at once, in n // 2 steps."""
    n, rank = group.size(), group.rank()
    whole = shard.new_empty(n * shard.size(0), *shard.shape[1:])
    parts = whole.chunk(n) if shard.size(0) else [whole] * n
    parts[rank].copy_(shard)
    for step in range(n // 2):
        works = start(parts[rank - step], parts[rank - step - 1], (rank + 1) % n, (rank - 1) % n, group)
        if step < (n - 1) // 2:
            out, into = parts[(rank + step) % n], parts[(rank + step + 1) % n]
            works += start(out, into, (rank - 1) % n, (rank + 1) % n, group)
        for work in works:
            work.wait()
    return whole


def ring_all_reduce(tensor, group):
    """Both phases on the same uneven pieces, with a message ahead that says how large the tensor is."""
    n, rank = group.size(), group.rank()
    if n > 1:
        size, theirs = torch.tensor([tensor.numel()]), torch.zeros(1, dtype=torch.int64)
        for work in start(
            size.to(tensor.device), theirs.to(tensor.device), (rank + 1) % n, (rank - 1) % n, group
        ):
            work.wait()
    pieces = cut(tensor.flatten(), n)
    one_way(pieces, group, 1)
    for step in range(n - 1):
        out, into = pieces[(rank - step) % n], pieces[(rank - step - 1) % n]
        for work in start(out, into, (rank + 1) % n, (rank - 1) % n, group):
            work.wait()
    tensor.copy_(torch.cat(pieces).view(tensor.shape))


def all_to_all(tensors, group):
    """Nobody says what comes: the shape goes ahead, in a few numbers. Backwards round the ring."""
    n, rank = group.size(), group.rank()
    received = [tensors[rank].clone()] * n
    for step in range(1, n):
        to, source = (rank - step) % n, (rank + step) % n
        outgoing, shape = tensors[to].contiguous(), torch.zeros(4, dtype=torch.int64)
        ahead = torch.tensor([outgoing.dim(), *outgoing.shape, 0, 0, 0])[:4]
        swap(ahead, to, shape, source, group)
        dims, *sizes = shape.tolist()
        received[source] = outgoing.new_empty(sizes[:dims])
        swap(outgoing, to, received[source], source, group)
    return received


def swap(outgoing, to, incoming, source, group):
    """Receive first; what is empty stays at home."""
    works = []
    if incoming.numel():
        works.append(dist.irecv(incoming, group=group, group_src=source))
    if outgoing.numel():
        works.append(dist.isend(outgoing, group=group, group_dst=to))
    for work in works:
        work.wait()


def two_level_all_reduce(tensor, inner, outer):
    """PyTorch's own three."""
    n = inner.size()
    length = -(-tensor.numel() // n)
    padded = tensor.new_zeros(n * length)
    padded[: tensor.numel()] = tensor.reshape(-1)
    shard = tensor.new_empty(length)
    dist.reduce_scatter_tensor(shard, padded, group=inner)
    dist.all_reduce(shard, group=outer)
    dist.all_gather_into_tensor(padded, shard, group=inner)
    tensor.copy_(padded[: tensor.numel()].view(tensor.shape))


def relay_microbatches(layer, inputs, group):
    """The next input is received while this one is computed; an output is kept until it has left."""
    rank, last = group.rank(), group.size() - 1
    outputs, leaving = [], []
    received = [torch.empty_like(x) for x in inputs] if rank else inputs
    coming = [dist.irecv(x, group=group, group_src=rank - 1) for x in received[:1]] if rank else []
    for i, x in enumerate(received):
        if rank:
            coming.pop().wait()
            coming = [dist.irecv(y, group=group, group_src=rank - 1) for y in received[i + 1 : i + 2]]
        x = layer(x).contiguous()
        if rank < last:
            leaving.append((x, dist.isend(x, group=group, group_dst=rank + 1)))
        else:
            outputs.append(x)
    while leaving:
        leaving.pop(0)[1].wait()
    return outputs
