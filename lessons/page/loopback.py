"""What the loopback interface has carried: ranks on one machine talk over it."""

from pathlib import Path


def loopback_bytes() -> int | None:
    """Bytes sent over it so far; None where the system does not count them."""
    try:
        lines = [line.split() for line in Path("/proc/net/dev").read_text().splitlines()]
        return next((int(fields[9]) for fields in lines if fields[0] == "lo:"), None)
    except OSError:
        return None
