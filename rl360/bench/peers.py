"""What a coordinator talks to, answering at once: `python -m rl360.bench.peers --port P --reference FILE`.

Session server, sandbox server and object store in one: sessions are opened, stored (all with the reference in FILE) and
closed; `/run` says, signed, that the attempt passed or failed; objects are kept in memory, under conditional puts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import orjson

from rl360.bench.instant import serve
from rl360.bench.processes import LOOPBACK
from rl360.harbor.verdict import Verdict, run_key, sign

TOKEN = "0" * 32  # of the coordinator these answer; nothing else knows them
RAN = {
    "trial_id": "bench",
    "exit_status": "submitted",
    "agent_metrics": {"turns": 61.0, "completion_tokens": 14_000.0},
    "phases": {"queue": 0.1, "setup": 0.5, "agent": 300.0, "verify": 20.0, "teardown": 0.1},
    "cleanup": {"confirmed": True, "evidence": "bench"},
}
NOTHING_THERE = b"<Error><Code>NoSuchKey</Code></Error>"
NOTHING_LISTED = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"


def verdict_of(run: str, task_id: str, attempt_id: str, reward: float) -> Verdict:
    """What the benched verifier says."""
    said = {"run": run, "task_id": task_id, "attempt_id": attempt_id, "verifier_digest": "ab" * 32}
    return sign(run_key(TOKEN, run), finished_at=1_700_000_320.0, reward=reward, **said)


class Peers:
    """The three of them."""

    def __init__(self, port: int, reference: dict) -> None:
        self._url = f"http://{LOOPBACK}:{port}"
        self._reference = reference
        self._objects: dict[bytes, bytes] = {}

    def answer(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        method, path, _ = head.split(b" ", 2)
        if method == b"delete":
            return b"204 No Content", b""
        if method == b"post":
            return b"200 OK", orjson.dumps(self._post(path.decode(), orjson.loads(body)))
        if path == b"/health":
            return b"200 OK", b"{}"
        return self._object(method, path, b"if-none-match" in head, body)

    def _post(self, path: str, asked: dict) -> dict:
        if path == "/sessions":
            return {"session_id": f"{asked['attempt_id']:A>32}", "base_url": f"{self._url}/sessions/a/v1"}
        if path == "/sessions/store":
            return {"stored": [{**self._reference, "key": each["key"]} for each in asked["sessions"]]}
        if path.endswith("/store"):
            return {**self._reference, "key": asked["key"]}
        reward = float(asked["attempt_id"].endswith(("0-t0", "2-t0", "4-t0", "6-t0", "8-t0")))
        verdict = verdict_of(asked["run"], asked["instance_id"], asked["attempt_id"], reward).model_dump()
        return {**RAN, "outcome": "passed" if reward else "failed", "reward": reward, "verdict": verdict}

    def _object(self, method: bytes, path: bytes, once: bool, body: bytes) -> tuple[bytes, bytes]:
        if method == b"put":
            if once and path in self._objects:
                return b"412 Precondition Failed", b"<Error><Code>PreconditionFailed</Code></Error>"
            self._objects[path] = body
            return b"200 OK", b""
        if b"?" in path:
            return b"200 OK", NOTHING_LISTED
        found = self._objects.get(path)
        return (b"404 Not Found", NOTHING_THERE) if found is None else (b"200 OK", found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rl360.bench.peers", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--reference", type=Path, required=True)
    options = parser.parse_args()
    serve(options.port, Peers(options.port, orjson.loads(options.reference.read_bytes())).answer)


if __name__ == "__main__":
    main()
