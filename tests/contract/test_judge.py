"""Attempts in real sandboxes, judged over HTTP by a service that speaks OpenAI's protocol.

The judge here is no model: it scores by a rule (`tests/judge_server.py`), so that the same work gets the same score.
What is real is the rest: bubblewrap, the sandbox server's process, its HTTP, and the rollout client of the flow.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # helpers shared by the parts of the suite
from scripted_session import Bash, Say, ScriptedSessions

from rl360.agents.budgets import Budgets, StepBudget
from rl360.agents.rollout import AttemptSpec, RolloutClient, roll_out_slot
from rl360.config.run import ObjectiveConfig, RunConfig
from rl360.config.services import Services
from rl360.harbor.protocol import RunReply
from rl360.harbor.verdict import receipt_problem, run_key
from rl360.ledger.outcomes import Outcome
from rl360.objective.filters import filter_groups
from rl360.sessions.sample import AttemptRecord
from tests.contract.test_sandboxes import REASON, REPOSITORY, TOKEN, Server, free_port
from tests.judge_server import Answer, JudgeServer, completion, judging, score
from tests.unit.memory_store import MemoryStore
from tests.unit.objective_data import sample_of, store_samples

pytestmark = [pytest.mark.contract, pytest.mark.skipif(REASON is not None, reason=REASON or "")]

KEY = "sk-contract-0123456789"
ORDER = {"model": "judge-1", "timeout_s": 10.0, "call_s": 5.0, "retries": 1}
TERMS = 'rubric = "One point for each reason, at most ten."\nscore_max = 10.0\nfiles = ["answer.md"]\n'


def reasons(body: dict[str, Any]) -> Answer:
    """A point for each `because` in the file the task asks for: by rule what the rubric says."""
    shown = "\n".join(message["content"] for message in body["messages"])
    files = re.search(r"begin files\n(.*)\n==\w+== end files", shown, re.DOTALL)
    return score(min(10, files[1].count("because")) if files else 0)


@pytest.fixture(scope="module")
def judge() -> Iterator[JudgeServer]:
    with judging(grade=reasons) as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, judge: JudgeServer) -> Iterator[Server]:
    options = ("--judge-url", judge.url, "--judge-key-env", "KEY_OF_JUDGE", "--judge-concurrency", "2")
    home = tmp_path_factory.mktemp("home")
    running = Server(home, free_port(), options=options, env={"KEY_OF_JUDGE": KEY})
    running.start()
    assert running.process is not None
    assert KEY.encode() not in Path(f"/proc/{running.process.pid}/cmdline").read_bytes()
    yield running
    assert running.live() == [], "an attempt left its folder"
    running.stop()
    held = [path for path in home.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert held == [], "the key is in the header of a call and nowhere else"


@pytest.fixture(scope="module")
def sessions() -> Iterator[ScriptedSessions]:
    scripted = ScriptedSessions()
    scripted.start()
    yield scripted
    scripted.stop()


def make_task(path: Path, terms: str = TERMS, test_sh: str | None = None) -> Path:
    (path / "tests").mkdir(parents=True)
    (path / "environment").mkdir()
    (path / "environment" / "notes.txt").write_text("the sky is blue\n")
    (path / "environment" / "Dockerfile").write_text("FROM debian\nWORKDIR /app\nCOPY . /app\n")
    (path / "task.toml").write_text('[task]\nname = "t/why"\n')
    (path / "instruction.md").write_text("Write into answer.md why the sky is blue.\n")
    (path / "tests" / "rl360_judge.toml").write_text(terms)
    if test_sh is not None:
        (path / "tests" / "test.sh").write_text(test_sh)
    return path


def play(
    server: Server, sessions: ScriptedSessions, task: Path, name: str, *turns: Any, judge: dict[str, Any] | None = None
) -> RunReply:
    body = {"instance_id": "t/why", "task_dir": str(task), "attempt_id": name, "run": "tests"}
    body |= {"base_url": sessions.add(name, *turns), "judge": judge or ORDER, "deadline_s": 200.0}
    return server.run(body)


def why(times: int) -> Bash:
    return Bash("printf 'because\\n%.0s' $(seq " + str(times) + ") > answer.md")


def test_a_judged_attempt(server: Server, sessions: ScriptedSessions, judge: JudgeServer, tmp_path: Path) -> None:
    task, alive = make_task(tmp_path / "task"), []

    def grade(body: dict[str, Any]) -> Answer:
        commands = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # one that ended meanwhile
                commands.append(path.read_bytes())
        alive.append([command for command in commands if b"98765" in command])
        return reasons(body)

    judge.grade = grade
    turns = (
        Bash("(setsid sleep 98765 &) ; sleep 0.2; pgrep -c sleep; echo left one"),
        why(7),
        Say("I gave because because because."),
    )
    try:
        reply = play(server, sessions, task, "good", *turns)
    finally:
        judge.grade = reasons
    assert (reply.outcome, reply.reward, reply.exit_status) == ("failed", 0.7, "Submitted"), "below 1 is no pass"
    verdict = reply.verdict
    assert verdict is not None and verdict.judge is not None
    assert (verdict.judge.score, verdict.judge.model, verdict.judge.host) == (7.0, "judge-1", judge.url.split("/")[2])
    assert (verdict.judge.reply_id, verdict.judge.prompt_tokens) == ("chatcmpl-1", 812)
    assert receipt_problem(verdict, run_key(TOKEN, "tests"), "tests") is None
    assert alive == [[]], "nothing of the agent lives while the judge looks"
    assert reply.phases.judge > 0 and reply.phases.verify == 0, "no script was run"
    told = {
        name: reply.agent_metrics[name] for name in ("judge_calls", "judge_prompt_tokens", "judge_completion_tokens")
    }
    assert told == {"judge_calls": 1, "judge_prompt_tokens": 812, "judge_completion_tokens": 9}
    assert reply.agent_metrics["eval_time"] == reply.phases.judge
    assert "judge-1 at 127.0.0.1" in reply.eval_report["verifier_log"] and ": 7 of 0 to 10" in str(reply.eval_report)
    assert KEY not in reply.model_dump_json() and judge.keys[-1] == f"Bearer {KEY}"
    shown = judge.shown()
    for part in ("why the sky is blue", "  1\n  left one", "because because", '--- "answer.md"\n  because\n'):
        assert part in shown, part
    assert "blue\n---" not in shown and TOKEN not in shown


def test_passes_and_repeats(server: Server, sessions: ScriptedSessions, judge: JudgeServer, tmp_path: Path) -> None:
    task = make_task(tmp_path / "task", TERMS + "threshold = 5\n")
    good = play(server, sessions, task, "pass", why(5), Say("done"))
    bad = play(server, sessions, task, "fail", why(4), Say("done"))
    assert [(r.outcome, r.reward) for r in (good, bad)] == [("passed", 1.0), ("failed", 0.0)]
    assert bad.verdict is not None and bad.verdict.judge is not None and bad.verdict.judge.score == 4.0
    calls = len(judge.bodies)
    again = server.run({
        "instance_id": "t/why", "task_dir": str(task), "attempt_id": "pass", "run": "tests", "judge": ORDER,
        "base_url": sessions.url("pass"), "deadline_s": 200.0,
    })  # fmt: skip
    assert again == good and len(judge.bodies) == calls, "a repeat is not judged again"


SCRIPT = """echo rubbed out > /app/answer.md
if [ -e /app/ok ]; then echo 1; else echo 0.25; fi > /logs/verifier/reward.txt
"""


def test_a_judge_after_a_script(server: Server, sessions: ScriptedSessions, judge: JudgeServer, tmp_path: Path) -> None:
    task = make_task(tmp_path / "task", TERMS + 'mode = "after_script"\n', SCRIPT)
    calls = len(judge.bodies)
    fails = play(server, sessions, task, "script-fails", why(9), Say("done"))
    assert (fails.outcome, fails.reward, len(judge.bodies)) == ("failed", 0.25, calls), "not worth a call"
    assert fails.verdict is not None and fails.verdict.judge is None and fails.phases.verify > 0
    passes = play(server, sessions, task, "script-passes", Bash("touch ok"), why(9), Say("done"))
    assert passes.reward == 0.9, "the judge sees what the agent left, not what the tests made of it"
    assert passes.verdict is not None and passes.verdict.judge is not None
    assert passes.verdict.judge.script_reward == 1.0
    assert receipt_problem(passes.verdict, run_key(TOKEN, "tests"), "tests") is None
    silent = make_task(tmp_path / "silent", TERMS + 'mode = "after_script"\n', "true\n")
    none = play(server, sessions, silent, "script-silent", why(9), Say("done"))
    assert (none.outcome, none.reward, len(judge.bodies)) == ("no_verdict", None, calls + 1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(completion("It is a 7.")), "not one JSON object"),
        (score(11), "not a score from 0 to 10"),
        (Answer({"error": f"bad key {KEY}"}, 401), "answered 401"),
        (Answer({"error": "busy"}, 503), "answered 503"),
        (Answer(completion('{"score": 7}'), wait_s=30), "no whole answer within judge.call_s 0.3"),
    ],
    ids=["prose", "range", "401", "503", "timeout"],
)
def test_a_judge_that_fails_is_infrastructure(
    server: Server, sessions: ScriptedSessions, judge: JudgeServer, tmp_path: Path, answer: Answer, words: str,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    task, name = make_task(tmp_path / "task"), request.node.callspec.id
    judge.grade = lambda _: answer
    calls = len(judge.bodies)
    try:
        reply = play(server, sessions, task, f"no-{name}", why(7), Say("done"), judge={**ORDER, "call_s": 0.3})
    finally:
        judge.grade = reasons
    assert (reply.outcome, reply.reward, reply.verdict) == ("judge_error", None, None)
    assert (reply.failure_phase, reply.retryable, reply.cleanup.confirmed) == ("judge", True, True)
    assert words in reply.detail and KEY not in reply.model_dump_json()
    assert reply.agent_metrics["judge_calls"] == len(judge.bodies) - calls == (2 if name in ("503", "timeout") else 1)


def test_what_cannot_be_judged_is_refused_before_it_runs(server: Server, tmp_path: Path) -> None:
    body = {"instance_id": "t", "task_dir": str(make_task(tmp_path / "task")), "attempt_id": "a", "run": "tests"}
    body |= {"base_url": "http://127.0.0.1:9", "deadline_s": 200.0}
    refused = server.post("/run", body)
    assert refused.status_code == 400 and "set judge.model and deadlines.judge_s" in refused.text
    refused = server.post("/run", {**body, "judge": {**ORDER, "timeout_s": 30.0}, "deadline_s": 190.0})
    assert refused.status_code == 400 and "judge.timeout_s 30" in refused.text
    refused = server.post("/run", {**body, "judge": {**ORDER, "url": "http://elsewhere"}})
    assert refused.status_code == 400, "where the judge is, and its key, no request may say"


# -- as a step sees it ------------------------------------------------------------------------------------------------


class Sessions:
    """What the rollout client asks of a session server: opens a scripted one, stores made-up samples, closes."""

    def __init__(self, scripted: ScriptedSessions, turns: dict[str, list[Any]]) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 16

            def do_POST(self) -> None:
                sent = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.path == "/sessions":
                    name = sent["attempt_id"]
                    body: dict[str, Any] = {"session_id": name, "base_url": scripted.add(name, *turns[name[:-3]])}
                else:
                    name = self.path.split("/")[2]
                    body = store_samples([sample_of(name, name.rsplit("-", 2)[0])], sent["key"]).to_wire()
                self.answer(200, json.dumps(body).encode())

            def do_DELETE(self) -> None:
                self.answer(204, b"")

            def answer(self, status: int, data: bytes) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                return

        outer.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        outer.url = f"http://127.0.0.1:{outer.http.server_port}"
        threading.Thread(target=outer.http.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()


def roll_out(home: Path, sandbox: str, sessions: str, specs: list[AttemptSpec]) -> list[AttemptRecord]:
    """The records of a wave of these attempts, as the roll_out task makes them."""
    (home / "secrets.json").write_text(json.dumps({"token": TOKEN, "s3_access_key": "a", "s3_secret_key": "b"}))
    (home / "secrets.json").chmod(0o600)
    gone = dict.fromkeys(
        ("prefect_api_url", "prefect_ui_url", "s3_endpoint", "gateway_url", "trainer_url"), "http://127.0.0.1:9"
    )
    services = Services(
        home=str(home), s3_bucket="b", engine_urls=["http://127.0.0.1:9"], session_urls=[sessions],
        sandbox_urls=[sandbox], model_dir="m", **gone,
    )  # fmt: skip
    judge = {"model": "judge-1", "call_s": 5.0, "retries": 0}
    config = RunConfig.parse({"judge": judge, "deadlines": {"judge_s": 10.0}, "rollout": {"infra_retries": 1}})
    kept: list[AttemptRecord] = []

    async def keep(record: AttemptRecord) -> None:
        kept.append(AttemptRecord.from_wire(record.to_wire(), record.attempt_id))

    async def mend(_: AttemptRecord) -> None:
        return

    async def go() -> None:
        async with RolloutClient(services, config, 0, 0, "demo:0") as client:
            room = asyncio.Semaphore(4)
            share = StepBudget(config.run, 0, config.rollout.max_infra_rate, 8)
            budgets = Budgets(cast(Any, MemoryStore()), config, 0, share)
            await asyncio.gather(*(roll_out_slot(client, spec, [], room, keep, mend, budgets) for spec in specs))

    asyncio.run(go())
    return sorted(kept, key=lambda record: record.attempt_id)


def test_a_step_with_a_judge_that_comes_and_goes(
    server: Server, sessions: ScriptedSessions, judge: JudgeServer, tmp_path: Path
) -> None:
    """Three attempts of a group: judged 2, judged 8, and one whose judge is down at its first try, or at both."""
    task = str(make_task(tmp_path / "task"))
    specs = {
        group: [AttemptSpec(f"{group}-a{n:02}", group, "t/why", task, "d") for n in range(3)]
        for group in ("s000000-g000", "s000001-g000")
    }
    turns = {
        spec.slot_id: [why(n), Say("done")]
        for three in specs.values()
        for spec, n in zip(three, (2, 8, 5), strict=True)
    }
    down: list[bool] = []  # at each call for the attempt of five reasons

    def grade(body: dict[str, Any]) -> Answer:
        given = reasons(body)
        return Answer({"error": "down"}, 503) if given == score(5) and down.pop(0) else given

    judge.grade = grade
    front = Sessions(sessions, turns)
    try:
        down[:] = [True, False]
        records = roll_out(tmp_path, server.url, front.url, specs["s000000-g000"])
        down[:] = [True, True]
        without = roll_out(tmp_path, server.url, front.url, specs["s000001-g000"])
    finally:
        front.stop()
        judge.grade = reasons
    failed, lost = Outcome.FAILED, Outcome.JUDGE_ERROR
    assert [(record.attempt_id[-6:], record.outcome) for record in records] == [
        ("a00-t0", failed), ("a01-t0", failed), ("a02-t0", lost), ("a02-t1", failed),
    ]  # fmt: skip
    (error,) = [record for record in records if record.outcome is Outcome.JUDGE_ERROR]
    assert error.verdict is None and "answered 503" in error.detail and error.sampled_tokens > 0
    assert error.phases_s["judge"] > 0 and error.agent_metrics["judge_calls"] == 1.0
    fields: dict[str, Any] = {"expected_version": "run:0", "max_seq_len": 384}
    result = filter_groups(records, ObjectiveConfig(), **fields)
    by_name = {decision.attempt_id[-6:]: decision for decision in result.decisions}
    assert {name: decision.reward for name, decision in by_name.items()} == {
        "a00-t0": 0.2, "a01-t0": 0.8, "a02-t0": None, "a02-t1": 0.5,
    }  # fmt: skip
    assert by_name["a02-t0"].score is None and by_name["a02-t0"].bucket == "infra"
    advantages = {row.attempt_id[-6:]: round(row.advantage, 12) for row in result.kept}
    assert advantages == {"a00-t0": -0.3, "a01-t0": 0.3, "a02-t1": 0.0}, "the mean of three judged attempts"
    two = [record for record in without if record.outcome is not Outcome.JUDGE_ERROR]
    assert len(without) == 4 and len(two) == 2
    assert (
        filter_groups(without, ObjectiveConfig(), **fields).kept == filter_groups(two, ObjectiveConfig(), **fields).kept
    )


def test_a_judge_that_is_not_there(sessions: ScriptedSessions, tmp_path: Path) -> None:
    running = Server(tmp_path / "home", free_port(), options=("--judge-url", "http://127.0.0.1:9/v1"))
    running.start()
    try:
        reply = play(running, sessions, make_task(tmp_path / "task"), "nobody", why(7), Say("done"))
    finally:
        running.stop()
    assert (reply.outcome, reply.verdict, reply.retryable) == ("judge_error", None, True)
    assert "ConnectError" in reply.detail and "(2 calls)" in reply.detail


def test_tasks_check_asks_the_judge_too(judge: JudgeServer, tmp_path: Path) -> None:
    for name, solution in (("good", "printf 'because\\n' > answer.md\n"), ("bad", "true\n")):
        task = make_task(tmp_path / "set" / name)
        (task / "solution").mkdir()
        (task / "solution" / "solve.sh").write_text(solution)

    def check(*options: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "rl360.cli", "tasks", "check", str(tmp_path / "set"), "--json", *options]
        env = {**os.environ, "RL360_HOME": str(tmp_path / "home"), "KEY_OF_JUDGE": KEY}
        return subprocess.run(argv, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=120, check=False)

    done = check("--judge-url", judge.url, "--judge-model", "judge-1", "--judge-key-env", "KEY_OF_JUDGE")
    assert done.returncode == 1, done.stderr
    rows = {Path(row["path"]).name: row for row in json.loads(done.stdout)["tasks"]}
    assert (rows["good"]["oracle"], rows["good"]["nop"], rows["good"]["problem"]) == (0.1, 0.0, None)
    assert rows["bad"]["problem"] == "does not discriminate: doing nothing got 0"
    without = json.loads(check().stdout)["tasks"]
    assert all("is judged by an LLM" in row["problem"] for row in without)
    assert check("--judge-url", judge.url).returncode == 2
