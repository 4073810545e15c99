"""Checks of `bytes_by_axis`: what each dimension of the mesh carries in a step."""

from typing import Any

from grader.checks import Answers, Trial, check, compare_answers, exercise
from nanogpt.model import GPTConfig

exercise(
    "bytes_by_axis",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "How large is one rank's residual stream, when the batch is cut d ways and the sequence c ways? "
        "An all-reduce of S bytes round a ring of n ranks sends 2(n-1)/n · S.",
        "A block of keys has b/d rows, s/c tokens and h/t numbers each.",
        "Gradients: 4 bytes for each parameter that a rank has: (12·L·h² + v·h) / t and s·h + (2L+1)·h. "
        "ZeRO-3 sends 3(n-1)/n of them where an all-reduce sends 2(n-1)/n.",
    ),
)

AXES = ("data", "context", "tensor")


def truth(config: GPTConfig, batch_size: int, sizes: dict, zero3: bool = False, **slip: Any) -> dict:
    """By element: the parts of lessons 08 to 12. A slip is a factor on one of its terms, by name."""
    d, c, t = (sizes[axis] for axis in AXES)
    layers, h = config.n_layer, config.n_embd
    everyone = d * c * t if slip.get("everyone") else 0
    tokens = batch_size / slip.get("rows", d) * config.block_size / slip.get("tokens", c)
    stream = 4 * tokens * h
    table = config.vocab_size * h
    cut = 12 * layers * h**2 + table
    norms = slip.get("norms", 2 * layers + 1)
    whole = (config.block_size / slip.get("positions", 1) + norms) * h
    extra = table * slip.get("tables", 0) / t + table * (1 - 1 / t) * slip.get("whole_table", 0)
    held = 4 * (cut / slip.get("cut", t) + whole / slip.get("whole", 1) + extra)
    sums = slip.get("sums", 4 * layers + 2)
    times = slip.get("times", 3 if zero3 else 2)
    blocks = slip.get("blocks", 6 * (c - 1)) * stream / slip.get("heads", t)
    return {
        "data": times * part(everyone or d, slip.get("ring_d")) * held / slip.get("gradients", 1),
        "context": layers * blocks
        + slip.get("summed", 2) * part(everyone or c, slip.get("ring_c")) * held / slip.get("sharded", 1),
        "tensor": slip.get("reduce", 2) * sums * part(everyone or t, slip.get("ring_t")) * stream,
    }


def part(n: int, ring: int | None) -> float:
    """(n-1)/n, or what a slip has in its place."""
    return (n - 1) / (ring or n)


def slips(config: GPTConfig, batch_size: int, sizes: dict, zero3: bool = False) -> dict[str, dict]:
    """Sentence → the wrong answer, by axis."""
    d, c, t = (sizes[axis] for axis in AXES)
    layers = config.n_layer
    every = {
        "the stream is not cut by the rows: a rank has b/d of them": {"rows": 1},
        "the rows of a rank are rounded down: b/d is a fraction where b is not divisible by d, so divide "
        "with / where // stands": {"rows": batch_size / (batch_size // d)},
        "the rows of a rank are rounded up: b/d is a fraction where b is not divisible by d": {
            "rows": batch_size / -(-batch_size // d)
        },
        "the stream is not cut by the tokens: a rank has s/c of them": {"tokens": 1},
        "a rank's parameters are not cut: of matrices and table it has 1/t": {"cut": 1},
        "positions and norms are cut, too: every rank has them whole": {"whole": t},
        "positions are cut along tensor: every rank has them whole": {"positions": t},
        "positions are cut along context: every rank has them whole": {"positions": c},
        "the last norm's weight is missing: 2L + 1 norms": {"norms": 2 * layers},
        "keys and values have all heads: a rank has h/t of each": {"heads": 1},
        "the gradients' all-reduce is missing along context": {"summed": 0},
        "in the backward the gradients of keys and values travel, too: 6(c-1) blocks and not 4(c-1)": {
            "blocks": 4 * (c - 1)
        },
        "the ring goes round three times: k and v in forward, again in backward, and their gradients": {
            "blocks": 2 * (c - 1)
        },
        "a block is keys or values: here both are in each": {"blocks": 12 * (c - 1)},
        "an all-reduce is missing at one end: the embedding's output has one, and the head's input gradient "
        "has one": {"sums": 4 * layers + 1},
        "each hop carries keys and values: two blocks": {"blocks": 3 * (c - 1)},
        "the two ends are missing: 4 sums a layer, and 2 more": {"sums": 4 * layers},
        "the token table is counted twice: the head is the same table": {"tables": 1},
        "the token table is not cut: a rank has 1/t of it": {"whole_table": 1},
        "along context whole gradients travel, with ZeRO-3 too: data scatters them afterwards": {
            "sharded": d if zero3 else 1
        },
        "context cuts tokens, and no gradients: they are as large on each of its ranks": {"gradients": c},
        "the ring has the ranks along one axis, and not all d·c·t": {"everyone": 1},
        "a rank's own block needs no hop: c-1 of them": {"blocks": 6 * c},
        "half: backward sums as often as forward, and an all-reduce sends its tensor in two rounds": {
            "reduce": 1
        },
        "a gather and a reduce-scatter are each half an all-reduce: three of them, not four": {
            "times": 4 if zero3 else 2
        },
        "ZeRO-3 is counted as an all-reduce: it gathers the weights twice": {"times": 2},
        "ZeRO-3's way is counted always": {"times": 3},
        "a ring sends (n-1)/n of the tensor in each half: that is counted as all of it": {
            "ring_d": max(1, d - 1),
            "ring_c": max(1, c - 1),
            "ring_t": max(1, t - 1),
        },
    }
    found = {}
    for words, slip in every.items():
        found[words] = truth(config, batch_size, sizes, zero3, **slip)
    found['sizes are taken in the order in which they stand: ask for each by its name, sizes["data"]'] = (
        truth(config, batch_size, dict(zip(AXES, sizes.values(), strict=True)), zero3)
    )
    whole = truth(config, batch_size, sizes, zero3)
    for words, factor in (
        ("elements are counted, and not their bytes: 4 each", 1 / 4),
        ("half: a number of float32 has 4 bytes, not 2", 1 / 2),
    ):
        found[words] = {axis: factor * x for axis, x in whole.items()}
    return found


def observe(trial: Trial) -> Answers:
    """Every mesh with a batch that its ranks along data divide, and with one that they do not.

    With ZeRO-3 the sizes stand in another order.
    """
    calls = []
    for sizes in ((2, 1, 2), (2, 2, 1), (1, 2, 2), (4, 1, 1), (1, 4, 1), (1, 1, 4), (3, 4, 5), (8, 16, 8)):
        for zero3 in (False, True):
            d, c, t = sizes
            heads = t * trial.integer(1, 2)
            config = GPTConfig(
                vocab_size=trial.integer(90, 5000),
                block_size=c * trial.integer(8, 99),
                n_layer=trial.integer(1, 40),
                n_head=heads,
                n_embd=heads * d * c * trial.integer(2, 9),  # all bytes are whole numbers
                dropout=0.0,
                bias=False,
            )
            left = trial.integer(1, d - 1) if zero3 and d > 1 else 0
            rows = d * trial.integer(2, 30) + left
            named = list(zip(AXES, sizes, strict=True))
            calls.append((config, rows, dict(named[::-1] if zero3 else named), zero3))
    return Answers(trial, "bytes_by_axis", calls, truth)


def require(trial: Trial, axis: str, where: Any, help: str) -> None:
    answers = trial.once(observe)
    for call, given in zip(answers.calls, answers.given, strict=True):
        trial.require(
            isinstance(given, dict) and axis in given,
            f"{answers.asked(call)} gave {given!r}, which has no {axis!r}",
            help='Return a dictionary: "data", "context", "tensor".',
        )
    compare_answers(
        trial,
        answers,
        axis,
        slips=lambda *call: {words: answer[axis] for words, answer in slips(*call).items()},
        help=help,
        where=where,
        tolerance=1e-9,
    )


@check("bytes_by_axis")
def tensor_axis_carries_the_stream(trial: Trial) -> None:
    """Along tensor go 4L + 2 all-reduces of what a rank has of the residual stream."""
    require(trial, "tensor", lambda *_: True, "(4L + 2) · 2(t-1)/t · 4 · b/d · s/c · h")


@check("bytes_by_axis")
def context_axis_carries_keys_values_and_gradients(trial: Trial) -> None:
    """Along context go 6(c-1) blocks a layer, of a rank's own heads, and an all-reduce of its gradients."""
    require(
        trial,
        "context",
        lambda *_: True,
        "6(c-1) blocks of 4 · b/d · s/c · h/t bytes a layer, and 2(c-1)/c · 4 bytes of a rank's parameters.",
    )


@check("bytes_by_axis")
def data_axis_carries_gradients(trial: Trial) -> None:
    """Along data goes an all-reduce of the gradients of what a rank has of the parameters."""
    require(trial, "data", lambda c, b, s, zero3: not zero3, "2(d-1)/d · 4 bytes of a rank's parameters.")


@check("bytes_by_axis")
def zero3_carries_half_as_much_again(trial: Trial) -> None:
    """With ZeRO-3 two all-gathers and a reduce-scatter go along data; the other axes carry what they did."""
    require(trial, "data", lambda c, b, s, zero3: zero3, "3(d-1)/d · 4 bytes of a rank's parameters.")
