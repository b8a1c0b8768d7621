"""An engine that answers at once: `python -m rl360.bench.engine --port P --script FILE [--routing FILE]`.

It speaks SGLang's `/generate` as far as a session server asks for it. The script (msgpack) says what is sampled after a
prompt of so many tokens; a prompt length that is not in it is answered 400, so that a session whose ids came out
differently than planned cannot go unnoticed. Routing rows come from an `.npy` of uint8 `[positions, layers, top_k]`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import orjson

from rl360.bench.baseline import as_base64
from rl360.bench.instant import serve

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

    def answer(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        """Status and reply to one request."""
        if not head.startswith(b"post /generate"):
            return b"200 OK", b"{}"
        reply = self._generate(orjson.loads(body))
        if reply is None:
            return b"400 Bad Request", b'{"error":"no turn of the script has a prompt of this length"}'
        return b"200 OK", reply

    def _generate(self, body: dict[str, Any]) -> bytes | None:
        """The reply; None when nothing is scripted for this prompt's length."""
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rl360.bench.engine", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--script", required=True)
    parser.add_argument("--routing")
    options = parser.parse_args()
    serve(options.port, Script(options.script, options.routing).answer)


if __name__ == "__main__":
    main()
