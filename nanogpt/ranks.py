"""torchrun for a person: `python -m nanogpt.ranks --nproc-per-node 2 -m nanogpt.train ...`

A program that fails says why itself, on the rank where it failed. torchrun then writes forty lines more below
that; this does without, and ends with the status of the rank that failed first.
"""

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from nanogpt import loopback


def main(arguments: list[str]) -> int:
    """Run a program on ranks of this machine; the status of the first that failed, or 0.

    2 where ranks can not talk to each other, which is said.

    Args:
        arguments: torchrun's.
    """
    if not loopback.is_up():
        print(f"error: {loopback.DOWN}", file=sys.stderr)
        return 2
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(["--standalone", *arguments]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            print(f"error: rank {rank} was ended from outside, by {name}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
