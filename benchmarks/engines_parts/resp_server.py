"""As much of a Redis server as LMCache's own client asks for: SET, GET, EXISTS and DEL, in memory."""

from __future__ import annotations

import socketserver
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

Values = dict[bytes, bytes]


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        """Answer commands until the connection ends."""
        while line := self.rfile.readline():
            words = [self._word() for _ in range(int(line[1:]))]
            self.wfile.write(self._answer(words))
            self.wfile.flush()

    def _word(self) -> bytes:
        length = int(self.rfile.readline()[1:])
        word = self.rfile.read(length)
        self.rfile.read(2)
        return word

    def _answer(self, words: list[bytes]) -> bytes:
        values, name = self.server.values, words[0].upper()
        if name == b"SET":
            values[words[1]] = words[2]
            return b"+OK\r\n"
        if name == b"GET":
            value = values.get(words[1])
            return b"$-1\r\n" if value is None else b"$%d\r\n%s\r\n" % (len(value), value)
        if name == b"EXISTS":
            return b":%d\r\n" % (words[1] in values)
        if name == b"DEL":
            return b":%d\r\n" % (values.pop(words[1], None) is not None)
        return b"-ERR unknown command\r\n"


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    values: Values


@contextmanager
def resp_server() -> Iterator[tuple[int, Values]]:
    """Serve while the block runs.

    Yields:
        The port on the loopback, and what is stored.
    """
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.values = {}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1], server.values
        finally:
            server.shutdown()
