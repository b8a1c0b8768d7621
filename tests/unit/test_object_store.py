"""What an S3 answer to a conditional put means."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from rl360.errors import StoreUnavailable
from rl360.store.object_store import ObjectStore


def put_once(status: int, code: str) -> bool:
    """A conditional put that a server answers with this error."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # "100 Continue" when asked for it, as S3 says: the client would wait a second

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            body = f"<Error><Code>{code}</Code></Error>".encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        return ObjectStore(f"http://127.0.0.1:{http.server_port}", "b", "key", "secret").put_once("k", b"x")
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def test_taken_is_not_written() -> None:
    assert put_once(412, "PreconditionFailed") is False


@pytest.mark.parametrize(("status", "code"), [(409, "ConditionalRequestConflict"), (403, "AccessDenied")])
def test_neither_written_nor_taken_is_unavailable(status: int, code: str) -> None:
    with pytest.raises(StoreUnavailable, match=f"refused to write b/k: {code}"):
        put_once(status, code)
