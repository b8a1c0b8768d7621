"""What cannot work is refused before there is a flow run, by one line, and nothing of the run is written."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest

from rl360 import preflight
from rl360.commands.run import forked_config, launch
from rl360.config.freeze import freeze_config, note_target
from rl360.config.run import RunConfig
from rl360.config.services import Services
from rl360.errors import BadInput
from rl360.preflight import check_start
from rl360.store.layout import checkpoint_prefix, manifest_key, run_config_key
from rl360.store.manifest import Manifest, commit_manifest
from rl360.training import saved
from tests.unit.memory_store import MemoryStore
from tests.unit.test_follow import flow_run, prefect
from tests.unit.test_follow import services_at as services_of_prefect
from tests.unit.training_data import write_model

NAMES = ("prefect_api_url", "prefect_ui_url", "s3_endpoint", "gateway_url", "trainer_url")
SESSIONS = {"matchers": ["strict", "role_content"], "routing": None}


@contextmanager
def server(told: dict[str, Any], status: int = 200, pause_s: float = 0.0) -> Iterator[str]:
    """Answers every GET with `told`, byte by byte where there is a pause."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(OSError):
                for part in (data[at : at + 1] for at in range(len(data))) if pause_s else (data,):
                    self.wfile.write(part)
                    time.sleep(pause_s)

        def log_message(self, *_: object) -> None:
            return

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def services_at(model: Path, sessions: str = "http://127.0.0.1:1", engine: str = "http://127.0.0.1:1") -> Services:
    nowhere = dict.fromkeys(NAMES, "http://127.0.0.1:1")
    return Services(
        home="/h", s3_bucket="b", engine_urls=[engine], session_urls=[sessions], sandbox_urls=["http://127.0.0.1:1"],
        model_dir=str(model), **nowhere,
    )  # fmt: skip


def check(store: MemoryStore, services: Services, **fields: Any) -> RunConfig:
    return check_start(cast(Any, store), services, RunConfig.parse({"run": "r1", **fields}))


def refused(services: Services, words: str, **fields: Any) -> None:
    store = MemoryStore()
    with pytest.raises(BadInput, match=words) as error:
        check(store, services, **fields)
    assert "\n" not in str(error.value)
    assert store.objects == {}


def test_services_that_do_not_answer_are_not_judged(model: Path) -> None:
    store = MemoryStore()
    found = check(store, services_at(model), rollout={"matcher": "agents.echo:same"})
    assert found.model.path == str(model)
    assert store.objects == {}


def test_proxies_errors_and_services_that_trickle_are_not_judged(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flow asks services themselves; what a proxy or an error says is no answer, nor is one without an end."""
    monkeypatch.setattr(preflight, "_ASKED_S", 0.1)
    told = {"matchers": []}
    with server(told) as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        check(MemoryStore(), services_at(model, sessions="http://127.0.0.1:1"))
        refused(services_at(model, sessions=proxy), "is not one that session server")
    for how in ({"status": 503}, {"pause_s": 0.03}):
        with server(told, **how) as sessions:
            check(MemoryStore(), services_at(model, sessions=sessions))


def test_services_that_hang_cost_one_deadline_together(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many and of whatever kind: silent ones, and one whose head has no end. Who answers is heard."""

    def trickle(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\n")
            for number in range(200):
                connection.sendall(b"x-%d: y\r\n" % number)
                time.sleep(0.05)

    monkeypatch.setattr(preflight, "_ASKED_S", 1.0)
    with contextlib.ExitStack() as open_:
        urls = []
        for _ in range(2):
            listener = open_.enter_context(socket.create_server(("127.0.0.1", 0), backlog=256))
            urls.append(f"http://127.0.0.1:{listener.getsockname()[1]}")
        threading.Thread(target=trickle, args=(listener,), daemon=True).start()
        silent, endless = urls
        allows_nothing = open_.enter_context(server({"matchers": []}))
        changes = {"engine_urls": [endless, *[silent] * 50], "sandbox_urls": [silent] * 50}
        services = services_at(model).model_copy(update={**changes, "session_urls": [*[silent] * 50, allows_nothing]})
        began = time.monotonic()
        refused(services, f"is not one that session server {allows_nothing} allows", **judged_tasks(tmp_path))
        assert 0.9 < time.monotonic() - began < 2.5  # one kind after another would be three deadlines


def test_directories_of_other_hosts_are_not_judged(model: Path) -> None:
    """Where the engines' own model is not to be seen, this is not a host that flows run on."""
    services = services_at(model).model_copy(update={"model_dir": "/of/another/host"})
    check(MemoryStore(), services, taskset={"path": "/there/too"}, model={"path": "/there/as-well"})
    refused(services, "'builtin:no' is unknown", taskset={"path": "builtin:no"})


def test_a_task_set_that_is_missing_empty_or_broken(model: Path, tmp_path: Path) -> None:
    services = services_at(model)
    refused(services, "task set '/no/such' is not a directory", taskset={"path": "/no/such"})
    refused(services, "holds no task directory", taskset={"path": str(tmp_path)})
    (tmp_path / "a").mkdir()
    refused(services, r"task\.toml", taskset={"path": str(tmp_path)})


def test_a_model_that_is_missing_dense_or_of_another_shape(model: Path, tmp_path: Path) -> None:
    services = services_at(model)
    refused(services, r"model\.path /no/model is no Hugging Face model", model={"path": "/no/model"})
    refused(services, "routing_replay is on and .* is a dense model", trainer={"routing_replay": True})
    experts = write_model(tmp_path / "experts", experts=4)
    refused(services, "has model.layers.0.mlp.*the model the services were started with", model={"path": str(experts)})
    other = str(write_model(tmp_path / "other-weights", seed=1))
    check(MemoryStore(), services, model={"path": other})
    for path, words in (
        ("/no/model", "objective.reference /no/model is no Hugging"),
        (experts, "its reference policy"),
    ):
        refused(services, words, objective={"kl_coef": 0.1, "reference": str(path)})
    check(MemoryStore(), services, objective={"kl_coef": 0.1, "reference": other})


def test_an_engine_with_another_model(model: Path, tmp_path: Path) -> None:
    experts = write_model(tmp_path / "experts", experts=4)
    with server({"model_path": str(experts)}) as engine:
        refused(services_at(model, engine=engine), f"that of engine {engine}, {experts}, has")
    with server({"model_path": str(model)}) as engine:
        check(MemoryStore(), services_at(model, engine=engine))


def judged_tasks(folder: Path) -> dict[str, Any]:
    """Fields of a run on one task that an LLM judges."""
    (folder / "set" / "essay" / "tests").mkdir(parents=True)
    (folder / "set" / "essay" / "task.toml").write_text("")
    (folder / "set" / "essay" / "instruction.md").write_text("Write.")
    (folder / "set" / "essay" / "tests" / "rl360_judge.toml").write_text('rubric = "r"')
    return {"taskset": {"path": str(folder / "set")}, "judge": {"model": "j"}, "deadlines": {"judge_s": 40}}


def test_a_judged_task_needs_a_judge(model: Path, tmp_path: Path) -> None:
    judged = judged_tasks(tmp_path)
    words = r"essay: is judged by an LLM; set judge\.model and deadlines\.judge_s"
    refused(services_at(model), words, taskset=judged["taskset"])
    for told, words in (({"judge": None}, "knows none: .*--judge-url URL`$"), ({"judge": "h:1"}, ""), ({}, "")):
        with server(told) as sandbox:
            services = services_at(model).model_copy(update={"sandbox_urls": [sandbox]})
            if words:
                refused(services, words, **judged)
            else:
                check(MemoryStore(), services, **judged)


def test_what_session_servers_allow(model: Path, tmp_path: Path) -> None:
    with server(SESSIONS) as sessions:
        services = services_at(model, sessions)
        check(MemoryStore(), services, rollout={"matcher": "role_content"})
        refused(services, r"allows \(strict, role_content\): .*`rl360 up --matcher json:loads` allow it$",
                rollout={"matcher": "json:loads"})  # fmt: skip
        refused(
            services, "there is no module nosuchmodule in this environment", rollout={"matcher": "nosuchmodule.a:b"}
        )
        experts = write_model(tmp_path / "experts", experts=4)
        refused(
            services_at(experts, sessions),
            "keeps no routed experts: .*--routed-experts",
            trainer={"routing_replay": True},
        )
    with server(SESSIONS | {"routing": [2, 2, 4]}) as sessions:
        check(MemoryStore(), services_at(experts, sessions), trainer={"routing_replay": True})


def test_a_name_that_is_taken_and_fewer_steps_than_there_are(model: Path) -> None:
    store, services = MemoryStore(), services_at(model)
    freeze_config(cast(Any, store), RunConfig(run="r1"), default_model=str(model))
    check(store, services, steps=99)
    with pytest.raises(BadInput, match=r"seed: 0 -> 1\).*`rl360 run fork r1 NEW -s FIELD=VALUE`.*another name"):
        check(store, services, seed=1)
    for step in range(45):
        commit_manifest(cast(Any, store), Manifest(run="r1", step=step, task="report"))
    with pytest.raises(BadInput, match="run r1 has 45 steps and 30 are asked for; give --steps"):
        check(store, services)


def test_no_flow_run_is_made_for_what_is_refused(tmp_path: Path) -> None:
    with prefect((200, [])) as (url, asked), pytest.raises(BadInput, match="task set 'builtin:no' is unknown"):
        launch(services_of_prefect(tmp_path, url), RunConfig.parse({"taskset": {"path": "builtin:no"}}), follow=False)
    assert [path for path, _ in asked] == ["/flow_runs/filter"]


def test_not_followed_is_not_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The flow run's id and address, what it waits for, and how to see how it goes."""
    ahead = flow_run("RUNNING", parameters={"config": {"run": "other"}})
    answers = [(200, [ahead]), (404, {}), (404, {}), (404, {}), (200, {"id": "d"}), (200, flow_run("SCHEDULED"))]
    with prefect(*answers) as (url, asked):
        launch(services_of_prefect(tmp_path, url), RunConfig(), follow=False)
    assert asked[-1][0] == "/deployments/d/create_flow_run"
    told = capsys.readouterr().out
    for part in (
        "(1)",
        f"{url}/runs/flow-run/1",
        "queued behind other: ",
        "`rl360 run watch demo`",
        "`rl360 run list`",
    ):
        assert part in told


# -- forks -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def parent(model: Path) -> MemoryStore:
    """Run r1, asked for 30 steps, with checkpoints after steps 4 and 9."""
    store = MemoryStore()
    frozen = freeze_config(cast(Any, store), RunConfig(run="r1", steps=10, seed=7), default_model=str(model))
    note_target(cast(Any, store), frozen.model_copy(update={"steps": 30}))
    for step in (4, 9):
        manifest = saved.CheckpointManifest(
            run="r1", step=step, next_step=step + 1, version=step, weights_digest=f"{step:064x}", layout="l", objects={}
        )
        store.put(checkpoint_prefix("r1", step) + "manifest.json", manifest.model_dump_json().encode())
        store.put(manifest_key("r1", step, "checkpoint"), b"{}")
    return store


def fork(store: MemoryStore, new: str = "f1", from_step: int | None = None, **changes: Any) -> RunConfig:
    return forked_config(cast(Any, store), "r1", new, from_step, changes)


def test_a_fork_has_its_parents_config_but_for_what_is_changed(parent: MemoryStore, model: Path) -> None:
    config = fork(parent, from_step=8, trainer={"lr": 0.5})
    assert config.parent is not None
    assert config.parent.model_dump() == {
        "run": "r1", "step": 4, "weights_digest": f"{4:064x}", "steps_before": 5, "updates_before": 4,
    }  # fmt: skip
    assert (config.run, config.seed, config.trainer.lr, config.model.path) == ("f1", 7, 0.5, str(model))
    assert config.steps == 25 and fork(parent).steps == 20 and fork(parent, steps=3).steps == 3
    check_start(cast(Any, parent), services_at(model), config)
    assert saved.prune(cast(Any, parent), "r1", 1, every=1) == []  # its start stays
    frozen = freeze_config(cast(Any, parent), config, default_model="/other")
    assert json.loads(parent.objects[run_config_key("f1")])["parent"]["run"] == "r1"
    parent.delete(saved.manifest_key("r1", 4))
    check_start(cast(Any, parent), services_at(model), frozen)  # has begun: it may go on from checkpoints of its own


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"from_step": 3}, "run r1 has no checkpoint at or before step 3; it has those after 4, 9"),
        ({"from_step": 12}, "--from-step 12: run r1 has no such step, its last is 9"),
        ({"new": "r1"}, "run r1 is there already; give the fork another name"),
        ({"run": "x"}, "--set run: the fork's name and parent are not set this way"),
        ({"parent": {}}, "--set parent: "),
        ({"trainer": {"rl": 1}}, r"unknown key trainer\.rl"),
        ({"new": "Bad Name"}, "run name 'Bad Name'"),
    ],
)
def test_a_fork_that_cannot_be(parent: MemoryStore, arguments: dict[str, Any], words: str) -> None:
    before = dict(parent.objects)
    with pytest.raises(BadInput, match=words):
        fork(parent, **arguments)
    assert parent.objects == before


def test_a_start_that_is_refused_claims_no_checkpoint(
    parent: MemoryStore, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever refuses it: another parent than there is, another model, a task set, a service. Then it starts."""
    config, store = fork(parent, from_step=4), cast(Any, parent)
    assert config.parent is not None
    before = dict(parent.objects)
    forged = config.model_copy(update={"parent": config.parent.model_copy(update={"updates_before": 9})})
    newer = config.model_copy(update={"parent": config.parent.model_copy(update={"step": 5})})
    tasks = config.model_copy(update={"taskset": config.taskset.model_copy(update={"path": "builtin:no"})})
    for refused, words in ((forged, "parent is not what"), (newer, "parent is not what"), (tasks, "is unknown")):
        with pytest.raises(BadInput, match=words):
            check_start(store, services_at(model), refused)
        assert parent.objects == before

    def other_matcher(*_: Any) -> None:
        raise BadInput("rollout.matcher is not one that session server S allows")

    monkeypatch.setattr(preflight, "_refuse_services", other_matcher)
    with pytest.raises(BadInput, match="session server S"):
        check_start(store, services_at(model), config)
    assert parent.objects == before, "the services are asked last, and before the claim"
    monkeypatch.undo()
    check_start(store, services_at(model), config)
    assert parent.objects.keys() - before.keys() == {checkpoint_prefix("r1", 4) + "claim"}


def test_a_fork_at_the_end_needs_steps(parent: MemoryStore) -> None:
    parent.put("r1/target.json", b'{"steps": 10}')
    with pytest.raises(BadInput, match="no steps left after step 9; say how many the fork takes: --steps N"):
        fork(parent)
    assert fork(parent, steps=4).steps == 4


def test_a_fork_of_another_shape_or_with_a_made_up_parent(parent: MemoryStore, model: Path, tmp_path: Path) -> None:
    experts = write_model(tmp_path / "experts", experts=4)
    with pytest.raises(BadInput, match=f"that of its parent r1, {model}, has"):
        check_start(cast(Any, parent), services_at(experts), fork(parent, model={"path": str(experts)}))
    honest = fork(parent)
    assert honest.parent is not None
    forged = honest.model_copy(update={"parent": honest.parent.model_copy(update={"updates_before": 99})})
    with pytest.raises(BadInput, match="the checkpoint of step 9 of r1 says; use `rl360 run fork r1 f1`"):
        check_start(cast(Any, parent), services_at(model), forged)
    assert run_config_key("f1") not in parent.objects


def test_a_defect_in_asking_is_no_silence(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a service did not say is not judged; what we did wrong must not look like that."""

    def broken(_: Any) -> Any:
        raise ValueError("a defect")

    with server(SESSIONS) as sessions:
        monkeypatch.setattr(preflight.orjson, "loads", broken)
        with pytest.raises(ValueError, match="a defect"):
            preflight._ask([f"{sessions}/health"])
