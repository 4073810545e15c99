"""What becomes of whole numbers, such as counts of targets, in floats of few digits."""

import torch

WENT_THROUGH = {
    dtype: f"the number of targets went through {str(dtype)[6:]}, which holds whole numbers up to {last}"
    for dtype, last in (
        (torch.bfloat16, "256"),
        (torch.float16, "2048, and nothing above 65504"),
        (torch.float32, "2^24"),
    )
}
"""Dtype → the cause."""
