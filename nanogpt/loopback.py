"""Whether ranks on this machine can talk to each other at all."""

import socket

DOWN = (
    "ranks talk to each other through this machine's loopback interface, and it is down: "
    "raise it, as root, with `ip link set lo up`, or give the container a network"
)


def is_up() -> bool:
    """Whether a connection from this machine to itself comes about."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError:
        return False
    return True
