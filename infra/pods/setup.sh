#!/usr/bin/env bash
# Sets the course up on a rented machine, beside the torch of its image, and says what is missing.
#   bash infra/pods/setup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

for tool in git make python3; do
    command -v "$tool" >/dev/null || { echo "this image has no $tool: apt install git make python3-venv" >&2; exit 1; }
done
python=$(python3 -m infra.environment)
"$python" - <<'PYTHON'
import shutil
from pathlib import Path

import torch

from nanogpt.cores import usable_cores

shared = Path("/dev/shm")
free = shutil.disk_usage(shared).free / 2**30 if shared.is_dir() else 0.0
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(f"torch {torch.__version__}, {len(gpus)} GPUs, {usable_cores()} cores, {free:.1f} GiB free in /dev/shm")
for index, gpu in enumerate(gpus):
    print(f"  GPU {index}: {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")
if len(gpus) < 2:
    print("NCCL between ranks needs two GPUs. Every exercise works on the CPU: `make lab` and `make grade`.")
if free < 1:
    print("NCCL wants 1 GiB in /dev/shm: start the container with --shm-size=8g")
PYTHON
echo "ready: make lab ARGS='--no-browser --ip=0.0.0.0'"
