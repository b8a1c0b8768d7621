"""Sessions in front of a real engine behind a real gateway: what was sampled is what is merged.

The gateway and the session server are started here, over the engines of `services` (their own gateway routes only to
engines that a weight push has confirmed). Every check holds for any weights and any version the engines carry.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest

from rl360.config.services import Services
from rl360.engines.health import headers_for
from rl360.policy.parity import engine_logprobs
from rl360.policy.tokenizer import VOCAB_SIZE
from rl360.sessions.sample import MergedSample
from tests.contract.session_rig import BASH, MESSAGES, Rig, admit_if_new, session_rig

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def rig(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    url, token = services.engine_urls[0], services.secrets().token
    admit_if_new(url, token)
    folder = tmp_path_factory.mktemp("sessions")
    with (
        pytest.MonkeyPatch.context() as patch,
        session_rig(url, services.model_dir, folder, engine_token=token) as rig,
    ):
        patch.setenv("RL360_HOME", services.home)  # its token is shown to its engines
        yield rig


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
                assert sample.tokens[end - 1] != rig.template.stop_ids[0]
                continue
            ended += 1
            assert sample.tokens[end - 1] == rig.template.stop_ids[0]
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
    reply = httpx.post(f"{rig.engine_url}/generate", json=body, headers=headers_for(rig.engine_url), timeout=60)
    meta = reply.json()["meta_info"]
    rows = meta["input_token_logprobs"]
    # SGLang 0.5.23 tells the vocabulary's last id as 0 in this list (logprob_result_processor.py clips one too early);
    # the log-probability is that of the id sent
    assert [row[1] for row in rows] == [0 if i == VOCAB_SIZE - 1 else i for i in longest.tokens.tolist()]
    scored = np.array([row[0] if row[0] is not None else 0.0 for row in rows], dtype=np.float32)
    sampled = longest.loss_mask == 1
    gap = np.abs(scored[sampled] - longest.logprobs[sampled])
    assert gap.mean() < 0.05 and gap.max() < 0.5, f"mean {gap.mean():.4f} max {gap.max():.4f}"
    # shifted by one token they do not fit: the comparison can fail
    shifted = np.abs(np.roll(scored, 1)[sampled] - longest.logprobs[sampled])
    assert shifted.mean() > 4 * gap.mean()


def test_the_vocabularys_last_id_is_scored_though_it_is_told_as_0(rig: Rig) -> None:
    """The score in the list is that of the id itself: what the engine says of it as the next token."""
    last = VOCAB_SIZE - 1
    body = {
        "input_ids": [11, 12],
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": [last],
    }
    reply = httpx.post(f"{rig.engine_url}/generate", json=body, headers=headers_for(rig.engine_url), timeout=60)
    meta = reply.json()["meta_info"]
    ((logprob, told, _text),) = meta["output_token_ids_logprobs"][0]
    (scored,) = engine_logprobs(rig.engine_url, [np.array([11, 12, last, 13])])
    assert told == last and abs(scored[1] - logprob) < 0.02


def test_the_stock_openai_client(rig: Rig) -> None:
    for stream in (False, True):
        session_id, base_url = rig.create()
        with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:
            reply = client.chat.completions.create(
                model="policy", messages=MESSAGES, tools=[BASH], temperature=0.2, max_tokens=1, stream=stream
            )
            reasons = [c.choices[0].finish_reason for c in reply] if stream else [reply.choices[0].finish_reason]
        assert reasons[-1] in ("stop", "tool_calls", "length")
        told = rig.told(session_id)
        assert told["ignored_params"] == {"temperature": 1, "max_new_tokens": 1}
        assert told["sampled_tokens"] > 1 or reasons[-1] != "length"


def test_of_two_racing_requests_one_is_recorded(rig: Rig) -> None:
    session_id, _ = rig.create()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        statuses = sorted(r.status_code for r in pool.map(lambda _n: rig.chat(session_id, MESSAGES), range(2)))
    told = rig.told(session_id)
    if statuses == [200, 409]:
        assert told["epoch"] == 1
        if told["requests_after_cut"]:  # they did not meet: the second was refused before anything was sampled
            assert (told["cut"], told["dropped"]) == (True, {})
        else:
            assert set(told["dropped"]) == {"after_truncation" if told["cut"] else "duplicate"}
    else:  # they did not meet: the second came after the first and regenerated it
        assert statuses == [200, 200]
        assert told["epoch"] == 2
        assert set(told["dropped"]) == {"prefix_break"}


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
    told = rig.told(session_id)
    assert told["sampled_tokens"] == sum(turn["sampled_tokens"] for turn in told["turns"])
    if rig.http.get("/health").json()["disconnects"]:
        assert (told["epoch"], told["turns"]) == (0, [])


def test_a_version_that_is_not_expected_is_not_recorded(rig: Rig) -> None:
    session_id, _ = rig.create(expected_weight_version="another-run:7")
    reply = rig.chat(session_id, MESSAGES)
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "wrong_version")
    told = rig.told(session_id)
    assert told["epoch"] == 0 and told["dropped"] == {"stale": told["sampled_tokens"]}
    agreed, _ = rig.create(expected_weight_version=rig.version)
    assert rig.chat(agreed, MESSAGES).status_code == 200


def test_a_tree_keeps_every_try_and_trains_each_completion_once(rig: Rig) -> None:
    """Siblings of one request through a real engine: all leaves together hold what was sampled, each id once."""
    session_id, _ = rig.create(mode="tree")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert [r.status_code for r in pool.map(lambda _n: rig.chat(session_id, MESSAGES), range(4))] == [200] * 4
    first = rig.chat(session_id, MESSAGES).json()["choices"][0]
    if first["finish_reason"] != "length":
        assert rig.chat(session_id, [*MESSAGES, first["message"], {"role": "tool", "content": "ok"}]).status_code == 200
    told = rig.told(session_id)
    leaves = rig.samples(session_id, "all")
    assert len(leaves) == 5
    assert sum(int(leaf.loss_mask.sum()) for leaf in leaves) == told["sampled_tokens"]
    (last,) = rig.samples(session_id, "last")
    assert last.sampled_tokens == told["sampled_tokens"] == int(last.loss_mask.sum()) + last.dropped["prefix_break"]
