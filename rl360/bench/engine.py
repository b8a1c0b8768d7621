"""An engine that answers at once: `python -m rl360.bench.engine --port P --script FILE [--routing FILE]`.

It speaks SGLang's `/generate` as far as a session server asks for it. The script (msgpack) says what is sampled after a
prompt of so many tokens; a prompt length that is not in it is answered 400, so that a session whose ids came out
differently than planned cannot go unnoticed. Routing rows come from an `.npy` of uint8 `[positions, layers, top_k]`.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import orjson
import uvloop

from rl360.bench.baseline import as_base64

VERSION = "bench:0"


def write_script(path: Path, turns: dict[int, tuple[list[int], list[float], int]]) -> None:
    """prompt length -> (sampled ids, their log-probs, cached tokens)."""
    path.write_bytes(msgpack.packb({str(length): list(turn) for length, turn in turns.items()}))


class Script:
    """What to answer."""

    def __init__(self, path: str, routing: str | None) -> None:
        wire = msgpack.unpackb(Path(path).read_bytes())
        self._turns = {int(length): turn for length, turn in wire.items()}
        self._routing = None if routing is None else np.load(routing, mmap_mode="r")

    def answer(self, body: dict[str, Any]) -> bytes | None:
        """The reply to one request; None when nothing is scripted for its length."""
        prompt = body["input_ids"]
        turn = self._turns.get(len(prompt))
        if turn is None:
            return None
        ids, logprobs, cached = turn
        meta: dict[str, Any] = {
            "id": "bench",
            "finish_reason": {"type": "stop"},
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "cached_tokens": cached,
            "weight_version": VERSION,
            "weight_versions": [{"version": VERSION, "start": 0, "end": len(ids)}],
            "num_retractions": 0,
            "output_token_logprobs": [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)],
        }
        if body.get("return_routed_experts") and self._routing is not None:
            start = body.get("routed_experts_start_len", 0)
            meta["routed_experts"] = as_base64(self._routing[start : len(prompt) + len(ids) - 1])
        reply = {"text": "", "output_ids": ids, "meta_info": meta}
        if body.get("return_prompt_token_ids"):
            reply["prompt_token_ids"] = prompt
        return orjson.dumps(reply)


class Http(asyncio.Protocol):
    """Keep-alive HTTP/1.1 with Content-Length bodies; nothing else comes from our own clients."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (head_end := self._data.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._data[:head_end]).lower()
            _, named, rest = head.partition(b"content-length:")
            end = head_end + 4 + (int(rest.split(b"\r\n", 1)[0]) if named else 0)
            if len(self._data) < end:
                return
            body = bytes(self._data[head_end + 4 : end])
            del self._data[:end]
            self._respond(head, body)

    def _respond(self, head: bytes, body: bytes) -> None:
        reply: bytes | None = b"{}"
        if head.startswith(b"post /generate"):
            reply = self._script.answer(orjson.loads(body))
        status = b"200 OK" if reply is not None else b"400 Bad Request"
        reply = reply or b'{"error":"no turn of the script has a prompt of this length"}'
        lead = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(reply))
        self._transport.writelines([lead, reply])


async def serve(port: int, script: Script) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Http(script), "127.0.0.1", port)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rl360.bench.engine", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--script", required=True)
    parser.add_argument("--routing")
    options = parser.parse_args()
    uvloop.run(serve(options.port, Script(options.script, options.routing)))


if __name__ == "__main__":
    main()
