"""Following a run: Prefect may be away for a while; and what counts as an active flow run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rl360 import preflight
from rl360.commands import follow as follow_module
from rl360.commands import prefect_api
from rl360.commands.prefect_api import PrefectApi
from rl360.commands.run import launch
from rl360.config.run import RunConfig
from rl360.config.services import Services
from rl360.errors import Rl360Error, ServiceError

NAMES = {"s3_endpoint", "gateway_url", "trainer_url", "prefect_ui_url"}


def flow_run(state: str, **more: Any) -> dict[str, Any]:
    return {"id": "1", "name": "demo", "state_type": state, "state_name": state.title(), **more}


@contextmanager
def prefect(*answers: tuple[int, Any]) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """A server that gives these answers in turn, the last again and again, and an object store without objects."""
    asked: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/bucket/"):
                self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            elif self.path.startswith("/bucket"):
                self.answer(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
            else:
                self.play(None)

        def do_HEAD(self) -> None:
            self.answer(404, b"")

        def do_POST(self) -> None:
            self.play(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def play(self, body: Any) -> None:
            status, value = answers[min(len(asked), len(answers) - 1)]
            asked.append((self.path, body))
            self.answer(status, json.dumps(value).encode())

        def answer(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            return

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", asked
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def services_at(home: Path, url: str) -> Services:
    (home / "secrets.json").write_text(json.dumps({"token": "t" * 16, "s3_access_key": "a", "s3_secret_key": "b"}))
    (home / "secrets.json").chmod(0o600)
    return Services(
        home=str(home), s3_bucket="bucket", engine_urls=[url], session_urls=[url], sandbox_urls=[url], model_dir="m",
        prefect_api_url=url, **dict.fromkeys(NAMES, url),
    )  # fmt: skip


def follow(home: Path, url: str) -> None:
    follow_module.follow(services_at(home, url), "demo", 30, "1")


def test_a_restart_of_prefect_does_not_end_the_watching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_module, "_POLL_S", 0.01)
    with prefect((200, flow_run("RUNNING")), (503, {}), (503, {}), (200, flow_run("COMPLETED"))) as (url, asked):
        follow(tmp_path, url)
    assert len(asked) == 4
    with prefect((503, {}), (200, flow_run("FAILED"))) as (url, _), pytest.raises(Rl360Error, match="ended as Failed"):
        follow(tmp_path, url)


def test_a_queued_run_says_at_once_what_it_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(follow_module, "_POLL_S", 0.01)
    late = flow_run("SCHEDULED", state_name="Late")
    ahead = [flow_run("RUNNING", id="0", parameters={"config": {"run": "first"}}), late]
    with prefect((200, late), (200, ahead), (200, flow_run("COMPLETED"))) as (url, _):
        follow(tmp_path, url)
    assert capsys.readouterr().out.splitlines()[1:] == ["queued behind first: one flow run goes at a time"]


@pytest.mark.parametrize(
    ("active", "said"),
    [
        (["a RUNNING"], "queued behind a: one"),
        (["b SCHEDULED", "a RUNNING"], "queued behind a: one"),
        (["c SCHEDULED", "b PENDING", "a CANCELLING"], "queued behind a: one"),
        (["c SCHEDULED", "b PENDING", "a SCHEDULED"], "queued behind b: one"),
        (["b SCHEDULED", "a SCHEDULED"], "queued behind a: one"),  # the one before them has just ended
    ],
)
def test_a_start_behind_others_says_so(
    active: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        flow_run(state, id=name, parameters={"config": {"run": name}})
        for name, state in (item.split() for item in active)
    ]
    monkeypatch.setattr(preflight, "check_start", lambda *_: None)
    with prefect((200, runs), (200, {"id": "d"}), (200, flow_run("SCHEDULED"))) as (url, _):
        launch(services_at(tmp_path, url), RunConfig(), follow=False)
    assert said in capsys.readouterr().out


def test_silence_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_module, "_POLL_S", 0.01)
    monkeypatch.setattr(follow_module, "_SILENCE_S", 0.05)
    monkeypatch.setattr(prefect_api, "_BUSY_PATIENCE_S", 0.05)
    with prefect((503, {})) as (url, _), pytest.raises(ServiceError, match="answered 503"):
        follow(tmp_path, url)


def test_what_a_schedule_plans_for_later_is_not_active() -> None:
    runs = [
        flow_run("SCHEDULED", auto_scheduled=True),
        flow_run("SCHEDULED", auto_scheduled=False),
        {**flow_run("SCHEDULED", auto_scheduled=True), "state_name": "Late"},
    ]
    with prefect((200, runs)) as (url, _):
        assert [run.state_name for run in PrefectApi(url, url).active()] == ["Scheduled", "Late"]


def test_pages_of_what_is_planned_hide_no_flow_run() -> None:
    """Schedules of two deployments plan 200 flow runs, which stand before all others."""
    planned = [flow_run("SCHEDULED", auto_scheduled=True)] * 200
    running = flow_run("RUNNING", parameters={"config": {"run": "demo"}})
    for ask in (lambda api: api.active()[0].state, lambda api: api.newest_by_run()["demo"].state):
        with prefect((200, planned), (200, planned), (200, [running])) as (url, asked):
            assert ask(PrefectApi(url, url)) == "RUNNING"
        assert [body["offset"] for _path, body in asked] == [0, 200, 400]


def test_a_busy_prefect_is_asked_again_for_the_same_flow_run() -> None:
    with prefect((200, {"id": "d"}), (503, {}), (200, flow_run("SCHEDULED"))) as (url, asked):
        assert PrefectApi(url, url).trigger("rl_run/local", {"config": {}}).state == "SCHEDULED"
    (_path, first), (_path, second) = asked[1:]
    assert first == second and len(first["idempotency_key"]) == 32


def test_a_deployment_of_another_version_is_named_as_that() -> None:
    refused = (409, {"detail": "Validation failed for field 'config.trainer'. 'witness' was unexpected"})
    with (
        prefect((200, {"id": "d"}), refused) as (url, _),
        pytest.raises(Rl360Error, match=r"another version .* `rl360 up`"),
    ):
        PrefectApi(url, url).trigger("rl_run/local", {"config": {}})


def test_cancelling_is_asked_for_not_forced() -> None:
    with prefect((200, {})) as (url, asked):
        PrefectApi(url, url).cancel("1", "why")
    path, body = asked[0]
    assert path == "/flow_runs/1/set_state"
    assert body == {"state": {"type": "CANCELLING", "name": "Cancelling", "message": "why"}}


def test_a_server_that_wants_a_csrf_token_gets_one_and_only_then() -> None:
    missing = (403, {"detail": "Missing CSRF token."})
    with prefect(missing, (200, {"token": "t1"}), (200, {})) as (url, asked):
        PrefectApi(url, url).cancel("1", "why")
    change = "/flow_runs/1/set_state"
    assert [path.partition("?")[0] for path, _ in asked] == [change, "/csrf-token", change]
    with prefect(missing, (422, {})) as (url, _), pytest.raises(ServiceError, match="answered 403"):
        PrefectApi(url, url).cancel("1", "why")


def test_a_run_at_work_is_refused_or_joined_never_started_twice(tmp_path: Path) -> None:
    at_work = (200, [flow_run("RUNNING", parameters={"config": {"run": "demo"}})])
    with prefect(at_work, (200, flow_run("COMPLETED"))) as (url, asked):
        launch(services_at(tmp_path, url), RunConfig(), follow=True, join=True)
    assert [path for path, _ in asked] == ["/flow_runs/filter", "/flow_runs/1"]
    with prefect(at_work) as (url, asked), pytest.raises(Rl360Error, match="run demo is already active"):
        launch(services_at(tmp_path, url), RunConfig(), follow=True)
    assert len(asked) == 1
