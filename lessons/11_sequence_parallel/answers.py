"""What is true of the questions that the page asks."""

from grader.guessing import Truth

PAPER_MILLISECONDS = {"tensor parallel": 19.6, "sequence parallel": 19.0}
"""Korthikanti et al. 2022, table 4: forward and backward of a layer of the 22-billion model."""


def predictions() -> list[Truth]:
    """Section 2: one block, without dropout."""
    n = 8
    inside, norms, read = 12 / n, 2 / n, 2.0
    before, after = PAPER_MILLISECONDS.values()
    return [
        Truth("sent", "units sent, gathered inputs kept", 2 * 4, "units", "4 gathers and 4 reduce-scatters"),
        Truth("sent_again", "units sent, gathered again", 2 * 4 + 2, "units", "a gather more for two layers"),
        Truth(
            "kept",
            "S kept on each of 8 ranks",
            norms + read + inside,
            "S",
            "2/8 for the norms, 12/8 inside, and 2 whole: what two linear layers read",
        ),
        Truth(
            "kept_again", "S kept, gathered again", norms + read / n + inside, "S", "all of it is cut: 16/8"
        ),
        Truth(
            "slower",
            "slower 1, the same 0, faster -1",
            -1 if after < before else int(after > before),
            "",
            f"{before} ms became {after} in the paper: norms and dropout do an eighth of the work, and the "
            "second gather goes on beside a product",
        ),
    ]


def published_bytes(s: int, b: int, h: int, a: int, n: int) -> dict[str, float]:
    """Table 2 of Korthikanti et al. 2022: bytes of one layer on a rank, in 16 bits with plain attention."""
    return {
        "tensor parallel": s * b * h * (10 + 24 / n + 5 * a * s / (h * n)),
        "sequence parallel": s * b * h * (34 + 5 * a * s / h) / n,
        "tensor parallel,\ncore computed again": s * b * h * (10 + 24 / n),
        "sequence parallel,\ncore computed again": 34 * s * b * h / n,
    }
