"""What is true of the questions that the page asks."""

from grader.guessing import Truth
from solutions.fsdp import communication_elements, state_bytes_per_rank

PARAMETERS, RANKS, GPU_GIGABYTES = 7_500_000_000, 64, 80


def predictions() -> list[Truth]:
    """Section 2: what is left on a rank, and what is sent for it."""

    def gigabytes(stage: int) -> float:
        return state_bytes_per_rank(PARAMETERS, RANKS, stage)["total"] / 1e9

    def traffic(stage: int) -> float:
        sent = [sum(communication_elements(PARAMETERS, RANKS, s).values()) for s in (0, stage)]
        return sent[1] / sent[0]

    return [
        Truth("zero_1", "GB on each of 64 ranks, ZeRO-1", gigabytes(1), "GB", "2 + 2 bytes, and 12/64"),
        Truth("zero_3", "GB on each of 64 ranks, ZeRO-3", gigabytes(3), "GB", "(2 + 2 + 12)/64 bytes"),
        Truth(
            "billions",
            "billions of parameters on 64 GPUs of 80 GB",
            GPU_GIGABYTES / (gigabytes(3) / (PARAMETERS / 1e9)),
            "billion",
            "80 GB over 16/64 bytes; with plain data parallelism 5",
        ),
        Truth(
            "traffic_2",
            "times the traffic, ZeRO-2",
            traffic(2),
            "times",
            "an all-reduce is a reduce-scatter and an all-gather anyway",
        ),
        Truth(
            "traffic_3",
            "times the traffic, ZeRO-3",
            traffic(3),
            "times",
            "weights gathered twice, gradients reduced once: 3 to 2",
        ),
    ]
