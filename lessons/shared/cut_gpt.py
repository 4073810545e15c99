"""A GPT of which every rank has slices: how it is drawn, cut, held, and trained."""

import torch
from torch import Tensor, nn

from grader.checks import Trial, drawn_alike, row_order, storage_bytes, weights_of
from nanogpt.model import GPT, GPTConfig

CUTS = {
    "attn.c_proj.weight": 1,
    "mlp.c_fc.weight": 0,
    "mlp.c_fc.bias": 0,
    "mlp.c_proj.weight": 1,
}
"""End of a parameter's name → the dimension along which it is cut. c_attn is cut by heads."""

TABLE = ("transformer.wte.weight", "lm_head.weight")
"""The two names of the token table, which is cut by rows, perhaps with padding."""


def small_config(trial: Trial, **changes) -> dict:
    """Heads that divide over 1 to 4 ranks, an odd head size, a vocabulary that 2 and 3 and 4 divide."""
    config = {
        "block_size": 28,
        "vocab_size": 48,
        "n_layer": 2,
        "n_head": 12,
        "n_embd": 12 * trial.choice([5, 7]),
        "dropout": 0.0,
        "bias": True,
    }
    return config | changes


def drawn_weights(trial: Trial, config: dict) -> dict[str, Tensor]:
    """A GPT's weights of the judge's, the tied table once."""
    return weights_of(drawn_alike(GPT(GPTConfig(**config)), trial))


def dense_model(config: dict, weights: dict) -> GPT:
    """The GPT with these weights, in float64."""
    model = GPT(GPTConfig(**config))
    model.load_state_dict(weights, strict=False)  # the tied table comes once
    return model.double()


def cut_dim(name: str) -> int | None:
    """Along which dimension a parameter is cut, None if replicated; see `is_special` for others."""
    return next((dim for suffix, dim in CUTS.items() if name.endswith(suffix)), None)


def is_special(name: str) -> bool:
    """Whether a parameter is cut otherwise: c_attn by heads, the table perhaps with padding."""
    return name in TABLE or "c_attn." in name


def own_part(tensor: Tensor, dim: int, rank: int, num_ranks: int) -> Tensor:
    """The r-th of n contiguous slices."""
    return tensor.chunk(num_ranks, dim)[rank]


def heads_of(fused: Tensor, rank: int, num_ranks: int) -> Tensor:
    """A rank's rows of a fused q|k|v tensor: the r-th heads of each, in the order q, k, v."""
    return torch.cat([own_part(part, 0, rank, num_ranks) for part in fused.chunk(3)])


def fused_of(tensors: dict[str, Tensor], prefix: str = "") -> Tensor:
    """c_attn's weight with the bias as one more column, so that both are followed through a reordering.

    An empty tensor where the two are missing or do not fit.
    """
    weight, bias = (tensors.get(f"{prefix}c_attn.{part}") for part in ("weight", "bias"))
    if weight is None or weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        return torch.empty(0, 0)
    return weight if bias is None else torch.cat([weight, bias.unsqueeze(1)], 1)


def head_orders(weights: dict, held: list[dict], prefix: str = "") -> list[list[int] | None]:
    """By rank: which of its rows of q|k|v each row of c_attn is; None where they are not its heads'."""
    fused = fused_of(weights, prefix)
    return [
        row_order(fused_of(own, prefix), heads_of(fused, rank, len(held))) for rank, own in enumerate(held)
    ]


def shared_table(tensors: dict[str, Tensor]) -> Tensor | None:
    """The token table, under whichever of its two names comes first."""
    return next((tensors[name] for name in TABLE if name in tensors), None)


def row_ranges(table: Tensor, shards: list[Tensor | None]) -> list[tuple[int, int]] | None:
    """(first row, number of rows) of the table on each rank, padding left out; None if rows are missing."""
    if any(shard is None or shard.dim() != 2 or shard.size(1) != table.size(1) for shard in shards):
        return None
    first, ranges = 0, []
    for shard in shards:
        size = min(len(shard), len(table) - first)
        while size and not torch.equal(shard[:size], table[first : first + size]):
            size -= 1
        ranges.append((first, size))
        first += size
    return ranges if first == len(table) else None


def shape_of(tensor: Tensor | None) -> tuple | None:
    """Its shape as a tuple, None where there is no tensor."""
    return None if tensor is None else tuple(tensor.shape)


def local(tensor: Tensor) -> Tensor:
    """On a rank: its own part of a DTensor; anything else as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def describe(module: nn.Module) -> dict:
    """On a rank: what a module holds. Gradients that are missing stay missing."""
    named = dict(module.named_parameters())
    return {
        "weights": {name: local(p.detach()) for name, p in named.items()},
        "gradients": gradients_of(module),
        "held": {name: storage_bytes([local(p.detach())]) for name, p in named.items()},
    }


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """On a rank: copies of the gradients that there are. All ranks ask at once: there may be sums to make."""
    named = module.named_parameters()
    return {name: local(complete(p.grad, p)).clone() for name, p in named if p.grad is not None}


def complete(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Of a DTensor that is still Partial, the sum, which optimizers make, too: laid out as its parameter."""
    if any(placement.is_partial() for placement in getattr(gradient, "placements", ())):
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def tied(model: nn.Module) -> bool:
    """On a rank: whether the head and the embedding share their weights."""
    named = dict(model.named_parameters(remove_duplicate=False))
    pair = [named[name] for name in TABLE if name in named]
    return len(pair) == 2 and local(pair[0]).data_ptr() == local(pair[1]).data_ptr()


def train(model: nn.Module, batches: list, name: str) -> Tensor:
    """On a rank and beside it: the losses of a few steps. SGD tells a sum from a mean, which AdamW hides."""
    rates = {"SGD": {"lr": 0.1, "momentum": 0.5}, "AdamW": {"lr": 3e-3, "weight_decay": 0.1}}
    optimizer = getattr(torch.optim, name)(model.parameters(), **rates[name])
    losses = []
    for idx, targets in batches:
        loss = model(idx, targets)[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)
