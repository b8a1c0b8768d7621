"""HTTP servers that answer at once, for what a benchmark does not measure: as little CPU as a reply takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import uvloop

from rl360.bench.processes import LOOPBACK

Answer = Callable[[bytes, bytes], tuple[bytes, bytes]]  # request line and headers in lower case, body -> status, body


class Http(asyncio.Protocol):
    """Keep-alive HTTP/1.1 with Content-Length bodies; nothing else comes from our own clients."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._data = bytearray()
        self._told_to_go_on = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (head_end := self._data.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._data[:head_end]).lower()
            _, named, rest = head.partition(b"content-length:")
            end = head_end + 4 + (int(rest.split(b"\r\n", 1)[0]) if named else 0)
            if len(self._data) < end:
                if b"100-continue" in head and not self._told_to_go_on:
                    self._told_to_go_on = True
                    self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                return
            body = bytes(self._data[head_end + 4 : end])
            del self._data[:end]
            self._told_to_go_on = False
            status, reply = self._answer(head, body)
            lead = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(reply))
            self._transport.writelines([lead, reply])


def serve(port: int, answer: Answer) -> None:
    """Until the process is ended."""

    async def forever() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: Http(answer), LOOPBACK, port, backlog=4096)
        await server.serve_forever()

    uvloop.run(forever())
