"""Sessions in front of a real engine behind a real gateway: what was sampled is what is merged.

The gateway and the session server are started here, over the engines of `services` (their own gateway routes only to
engines that a weight push has confirmed). Every check holds for any weights and any version the engines carry.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import orjson
import pytest

from rl360.config.services import Services
from rl360.sessions.chat_template import ChatTemplate
from rl360.sessions.sample import MergedSample
from rl360.store.codec import unpack

pytestmark = pytest.mark.contract

TOKEN = "token-of-the-session-contract-tests"
BASH = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Use bash."},
    {"role": "user", "content": "Create the file hello.txt with the line hello."},
]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def _process(argv: list[str], ready_url: str, log: Path, env: dict[str, str]) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **env})
        try:
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(ready_url, timeout=2).status_code == 200:
                        break
                assert process.poll() is None, f"{argv[0]} ended: {log.read_text()[-1000:]}"
                assert time.monotonic() < deadline, f"{argv[0]} not ready in 60 s: {log.read_text()[-1000:]}"
                time.sleep(0.1)
            yield
        finally:
            process.terminate()
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass
class Rig:
    """One engine, a gateway of our own in front of it, and a session server process on top."""

    engine_url: str
    url: str
    version: str
    template: ChatTemplate
    http: httpx.Client

    def create(self, **changes: Any) -> tuple[str, str]:
        body = {
            "attempt_id": "s000000-g000-a00-t0",
            "group_id": "s000000-g000",
            "task_id": "hello",
            "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 32},
            "max_seq_len": 512,
            "expected_weight_version": None,
        }
        reply = self.http.post("/sessions", json={**body, **changes})
        assert reply.status_code == 200, reply.text
        return reply.json()["session_id"], reply.json()["base_url"]

    def chat(self, session_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> httpx.Response:
        body = orjson.dumps({"model": "policy", "messages": messages, "tools": [BASH]})
        return self.http.post(f"/sessions/{session_id}/v1/chat/completions", content=body, **kwargs)

    def sample(self, session_id: str) -> MergedSample:
        reply = self.http.get(f"/sessions/{session_id}/merged")
        assert reply.status_code == 200, reply.text
        return MergedSample.from_wire(unpack(reply.content, "merged"), "merged")

    def attempt(self, turns: int) -> tuple[str, list[str]]:
        """Take up to `turns` turns in a new session; its id and the finish reasons."""
        session_id, _ = self.create()
        messages, reasons = list(MESSAGES), []
        for _ in range(turns):
            reply = self.chat(session_id, messages)
            assert reply.status_code == 200, reply.text
            choice = reply.json()["choices"][0]
            reasons.append(choice["finish_reason"])
            if choice["finish_reason"] == "length":
                break
            messages += [choice["message"], {"role": "tool", "content": "ok"}]
        return session_id, reasons


@pytest.fixture(scope="module")
def rig(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("sessions")
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    engine = services.engine_urls[0]
    gateway, metrics, port = _free_port(), _free_port(), _free_port()
    gateway_url, url = f"http://127.0.0.1:{gateway}", f"http://127.0.0.1:{port}"
    smg = [str(Path(sys.executable).parent / "smg"), "launch", "--host", "127.0.0.1", "--port", str(gateway)]
    smg += ["--policy", "manual", "--worker-urls", engine, "--prometheus-port", str(metrics), "--enable-rl"]
    smg += ["--disable-tokenizer-autoload", "--health-check-endpoint", "/ping"]
    server = [sys.executable, "-m", "rl360.sessions.server", "--port", str(port), "--upstream", gateway_url]
    server += ["--model", services.model_dir, "--deadline-s", "120"]
    with (
        _process(smg, f"{gateway_url}/readiness", folder / "smg.log", {}),
        _process(server, f"{url}/health", folder / "sessions.log", {"RL360_TOKEN_FILE": str(token)}),
        httpx.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=120, trust_env=False) as http,
    ):
        version = httpx.get(f"{engine}/model_info", timeout=30).json()["weight_version"]
        yield Rig(engine, url, version, ChatTemplate.load(services.model_dir), http)


@pytest.fixture(scope="module")
def attempts(rig: Rig) -> list[tuple[MergedSample, list[str]]]:
    """Attempts until one turn has ended by itself (random weights need some), at least eight and at most 256."""
    found: list[tuple[MergedSample, list[str]]] = []
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        while len(found) < 256 and not (len(found) >= 8 and any(reasons[0] != "length" for _s, reasons in found)):
            for session_id, reasons in pool.map(rig.attempt, [3] * 8):
                found.append((rig.sample(session_id), reasons))
    return found


def test_every_sampled_token_is_in_the_sample(attempts: list[tuple[MergedSample, list[str]]], rig: Rig) -> None:
    for sample, reasons in attempts:
        assert int(sample.loss_mask.sum()) == sample.sampled_tokens
        assert sample.turns == len(reasons)
        assert sample.truncated == (reasons[-1] == "length")
        assert {version for _a, _b, version in sample.version_spans} == {rig.version}
        assert np.all(sample.logprobs[sample.loss_mask == 1] <= 1e-3)


def test_a_turn_that_ends_keeps_its_end_token_and_log_probability(
    attempts: list[tuple[MergedSample, list[str]]], rig: Rig
) -> None:
    ended = 0
    for sample, reasons in attempts:
        for (_start, end, _version), reason in zip(sample.version_spans, reasons, strict=True):
            if reason == "length":
                assert sample.tokens[end - 1] != rig.template.end_id
                continue
            ended += 1
            assert sample.tokens[end - 1] == rig.template.end_id
            assert sample.loss_mask[end - 1] == 1
            assert np.isfinite(sample.logprobs[end - 1]) and sample.logprobs[end - 1] <= 1e-3
    assert ended > 0


def test_the_engine_scores_the_merged_ids_as_it_sampled_them(
    attempts: list[tuple[MergedSample, list[str]]], rig: Rig
) -> None:
    """The engine's own log-probabilities of the merged ids, asked for in one go, meet the recorded ones."""
    longest = max((sample for sample, _r in attempts), key=lambda sample: (sample.turns, len(sample.tokens)))
    body = {
        "input_ids": longest.tokens.tolist(),
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    meta = httpx.post(f"{rig.engine_url}/generate", json=body, timeout=60).json()["meta_info"]
    rows = meta["input_token_logprobs"]
    assert [row[1] for row in rows] == longest.tokens.tolist()
    scored = np.array([row[0] if row[0] is not None else 0.0 for row in rows], dtype=np.float32)
    sampled = longest.loss_mask == 1
    gap = np.abs(scored[sampled] - longest.logprobs[sampled])
    assert gap.mean() < 0.05 and gap.max() < 0.5, f"mean {gap.mean():.4f} max {gap.max():.4f}"
    # shifted by one token they do not fit: the comparison can fail
    shifted = np.abs(np.roll(scored, 1)[sampled] - longest.logprobs[sampled])
    assert shifted.mean() > 4 * gap.mean()


def test_the_stock_openai_client(rig: Rig) -> None:
    for stream in (False, True):
        session_id, base_url = rig.create()
        with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:
            reply = client.chat.completions.create(
                model="policy", messages=MESSAGES, tools=[BASH], temperature=0.2, max_tokens=1, stream=stream
            )
            reasons = [c.choices[0].finish_reason for c in reply] if stream else [reply.choices[0].finish_reason]
        assert reasons[-1] in ("stop", "tool_calls", "length")
        told = rig.http.get(f"/sessions/{session_id}").json()
        assert told["ignored_params"] == {"temperature": 1, "max_tokens": 1}
        assert told["sampled_tokens"] > 1 or reasons[-1] != "length"


def test_of_two_racing_requests_one_is_recorded(rig: Rig) -> None:
    session_id, _ = rig.create()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        statuses = sorted(r.status_code for r in pool.map(lambda _n: rig.chat(session_id, MESSAGES), range(2)))
    told = rig.http.get(f"/sessions/{session_id}").json()
    if statuses == [200, 409]:
        assert (told["epoch"], told["rollbacks"]) == (1, 0)
        assert told["lost_race_tokens"] > 0 or told["cut"]
    else:  # they did not meet: the second came after the first and regenerated it
        assert statuses == [200, 200]
        assert (told["epoch"], told["rollbacks"]) == (2, 1)
        assert told["prefix_break_tokens"] > 0


def test_a_client_that_goes_away_is_recorded_nowhere(rig: Rig) -> None:
    session_id, _ = rig.create(
        sampling={"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 400}, max_seq_len=500
    )
    with contextlib.suppress(httpx.ReadTimeout):
        rig.chat(session_id, MESSAGES, timeout=httpx.Timeout(30, read=0.02))
    deadline = time.monotonic() + 30
    while rig.http.get("/health").json()["in_flight"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    told = rig.http.get(f"/sessions/{session_id}").json()
    assert told["sampled_tokens"] == sum(turn["sampled_tokens"] for turn in told["turns"])
    if rig.http.get("/health").json()["disconnects"]:
        assert (told["epoch"], told["turns"]) == (0, [])


def test_a_version_that_is_not_expected_is_not_recorded(rig: Rig) -> None:
    session_id, _ = rig.create(expected_weight_version="another-run:7")
    reply = rig.chat(session_id, MESSAGES)
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "wrong_version")
    assert rig.http.get(f"/sessions/{session_id}").json()["epoch"] == 0
    agreed, _ = rig.create(expected_weight_version=rig.version)
    assert rig.chat(agreed, MESSAGES).status_code == 200
