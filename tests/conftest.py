"""What all tests share."""

import os

# Several ranks and two test workers share two cores. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
