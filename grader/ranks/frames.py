"""Length-prefixed messages over a socket."""

import socket
import struct

MAX_FRAME = 1 << 30
NOT_OURS = "something other than the grader wrote to the result channel"


def send_frame(connection: socket.socket, kind: bytes, body: bytes = b"") -> None:
    """Send one message: a kind of one byte, and a body."""
    connection.sendall(struct.pack("<cQ", kind, len(body)) + body)


def receive_frame(connection: socket.socket) -> tuple[bytes, bytes]:
    """Wait for one message. Raises ConnectionError when the other side has gone."""
    kind, length = struct.unpack("<cQ", _receive_exactly(connection, 9))
    if length > MAX_FRAME:
        raise ConnectionError(f"a message of {length} bytes is not one of ours")
    return kind, _receive_exactly(connection, length)


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise ConnectionError("the other side closed the connection")
        parts += part
    return bytes(parts)


class FrameBuffer:
    """Cuts a stream of bytes, as they arrive, into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Add bytes; return the messages that are now complete. Raises ValueError for what is no message."""
        self._data += data
        messages = []
        while len(self._data) >= 9:
            kind, length = struct.unpack_from("<cQ", self._data)
            if length > MAX_FRAME or kind not in b"BRX":
                raise ValueError(NOT_OURS)
            if len(self._data) < 9 + length:
                break
            messages.append((kind, bytes(self._data[9 : 9 + length])))
            del self._data[: 9 + length]
        return messages
