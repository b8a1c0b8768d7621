"""Pods over a fake API server that speaks real HTTP: create, look, delete, and every answer that is not a yes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
import yaml

from rl360.config.services import service_token
from rl360.engines.launch import parse_options
from rl360.engines.launchers import kubernetes
from rl360.engines.launchers.base import Handle, Start
from rl360.engines.launchers.kubernetes import (
    FLEET_LABEL,
    MARK_LABEL,
    TEMPLATE,
    Cluster,
    KubernetesLauncher,
    load_template,
    render_pod,
)
from rl360.errors import BadInput, Rl360Error, ServiceError

FLEET = "abc123"
START = Start(name="kubernetes-0", number=1, model_dir="/model", port=13_000, seed=3)
NAME = f"rl360-{FLEET}-kubernetes-0-1"


class ApiServer:
    """Pods by name. `script`: answers given instead, one a request: (status, headers), "hang" or "drop"."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.calls: list[tuple[str, str, Any]] = []
        self.script: list[Any] = []
        self.tokens = {"good"}
        self.deletes_at_once = True
        self.released = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _do(self) -> None:
                size = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(size) or b"null")
                outer.calls.append((self.command, self.path, body))
                told = outer.script.pop(0) if outer.script else None
                if told == "hang":
                    outer.released.wait(20)
                if told in ("hang", "drop"):
                    self.close_connection = True
                    return
                if self.headers.get("authorization", "").removeprefix("Bearer ") not in outer.tokens:
                    told = (401, {})
                status, headers, *given = told or (0, {})
                reply = {"kind": "Status", "message": f"scripted {status}"} if status else None
                reply = given[0] if given else reply
                if reply is None:
                    status, reply = outer.answer(self.command, self.path, body)
                data = json.dumps(reply).encode() if reply != "html" else b"<html>"
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = _do

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        path, _, query = path.partition("?")
        asked = dict(parse_qsl(query))
        assert path.startswith("/api/v1/namespaces/rl/pods")
        name = path.removeprefix("/api/v1/namespaces/rl/pods").strip("/")
        if method == "POST":
            name = body["metadata"]["name"]
            if name in self.pods:
                return 409, {"kind": "Status", "reason": "AlreadyExists"}
            self.pods[name] = body | {"status": {"phase": "Pending"}}
            self.pods[name]["metadata"]["uid"] = uuid.uuid4().hex
            return 201, self.pods[name]
        if not name:
            wanted = asked["labelSelector"].partition("=")
            found = [pod for pod in self.pods.values() if pod["metadata"]["labels"].get(wanted[0]) == wanted[2]]
            first, last = int(asked.get("continue", 0)), int(asked.get("continue", 0)) + int(asked["limit"])
            more = {"continue": str(last)} if last < len(found) else {}
            return 200, {"kind": "PodList", "metadata": more, "items": found[first:last]}
        pod = self.pods.get(name)
        if pod is None:
            return 404, {"kind": "Status", "reason": "NotFound", "details": {"name": name, "kind": "pods"}}
        if method == "GET":
            return 200, pod
        if body["preconditions"]["uid"] != pod["metadata"]["uid"]:
            return 409, {"kind": "Status", "reason": "Conflict"}
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        if self.deletes_at_once:
            del self.pods[name]
        return 200, pod

    def runs(self, address: str = "10.1.2.3") -> None:
        for pod in self.pods.values():
            began = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
            pod["status"] = {
                "phase": "Running",
                "podIP": address,
                "containerStatuses": [{"name": "other", "state": {}}, {"name": "engine", "state": began}],
            }
            pod["spec"]["nodeName"] = "n7"

    def says(self, engine: dict[str, Any] | None = None, **status: Any) -> None:
        """What the kubelet says of the container, and others of the pod."""
        told = {} if engine is None else {"containerStatuses": [{"name": "engine", "state": engine}]}
        for pod in self.pods.values():
            pod["status"] = status | told
            pod["spec"]["nodeName"] = "n7"


@pytest.fixture
def api() -> Iterator[ApiServer]:
    made = ApiServer()
    yield made
    made.released.set()
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture
def launcher(api: ApiServer, tmp_path: Path) -> KubernetesLauncher:
    (tmp_path / "token").write_text("good\n")
    return KubernetesLauncher(Cluster(api.url, "rl", tmp_path / "token"), load_template(tmp_path), FLEET)


def test_the_rendered_manifest_is_a_pod_that_starts_one_engine() -> None:
    pod = render_pod(yaml.safe_load(TEMPLATE.read_text()), START, FLEET, "rl")
    assert (pod["apiVersion"], pod["kind"], pod["spec"]["restartPolicy"]) == ("v1", "Pod", "Never")
    assert pod["metadata"]["name"] == NAME and pod["metadata"]["namespace"] == "rl"
    assert pod["metadata"]["labels"] | {FLEET_LABEL: FLEET, MARK_LABEL: "kubernetes-0-1"} == pod["metadata"]["labels"]
    (engine,) = pod["spec"]["containers"]
    assert engine["command"] == ["python", "-m", "rl360.engines.launch"]
    assert engine["ports"] == [{"name": "http", "containerPort": 13_000}]
    assert engine["args"][engine["args"].index("--host") :][:2] == ["--host", "0.0.0.0"]
    mounts = [mount for each in (engine, *pod["spec"]["initContainers"]) for mount in each["volumeMounts"]]
    assert {item["name"] for item in pod["spec"]["volumes"]} == {mount["name"] for mount in mounts}
    yaml.safe_dump(pod)


def test_the_arguments_of_the_pod_are_options_of_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    start = START.model_copy(update={"model_dir": str(tmp_path), "routed_experts": True})
    (engine,) = render_pod(yaml.safe_load(TEMPLATE.read_text()), start, FLEET, "rl")["spec"]["containers"]
    options, rest = parse_options(engine["args"])
    assert (options.port, options.host, options.seed, options.routed_experts, rest) == (13_000, "0.0.0.0", 3, True, [])
    assert (options.strict, options.weights_dir) == (True, "/weights")


def test_the_pod_sees_the_home_that_its_door_and_its_pulls_read(tmp_path: Path) -> None:
    spec = render_pod(yaml.safe_load(TEMPLATE.read_text()), START, FLEET, "rl")["spec"]
    (engine,) = spec["containers"]
    mounts = {mount["mountPath"]: mount for mount in engine["volumeMounts"]}
    env = {item["name"]: item["value"] for item in engine["env"]}
    assert env["RL360_TOKEN_FILE"] == f"{env['RL360_HOME']}/token"
    volumes = {item["name"]: item for item in spec["volumes"]}
    # as with fsGroup, where a secret's files are links, and their group may read them
    secret, home = tmp_path / "secret", tmp_path / "home"
    (secret / "..data").mkdir(parents=True), home.mkdir()
    for name in ("services.json", "secrets.json", "token"):
        (secret / "..data" / name).write_text("token-of-the-pod-tests")
        (secret / "..data" / name).chmod(0o440)
        (secret / name).symlink_to(f"..data/{name}")
    (copies,) = spec["initContainers"]
    from_to = {mount["mountPath"]: volumes[mount["name"]] for mount in copies["volumeMounts"]}
    assert from_to["/secret"]["secret"]["secretName"] == "rl360-home"
    assert "emptyDir" in from_to[env["RL360_HOME"]] and from_to[env["RL360_HOME"]] is volumes["home"]
    assert mounts[env["RL360_HOME"]] == {"name": "home", "mountPath": env["RL360_HOME"], "readOnly": True}
    shell = copies["command"][-1].replace("/secret", f"{secret}").replace(env["RL360_HOME"], f"{home}")
    subprocess.run([*copies["command"][:-1], shell], check=True, timeout=10)
    assert {path.name for path in home.iterdir()} == {"services.json", "secrets.json", "token"}
    assert not any(path.stat().st_mode & 0o077 for path in home.iterdir())
    assert service_token(home / "token") == "token-of-the-pod-tests"
    assert not mounts["/weights"].get("readOnly")


def test_what_the_keeper_may_do_is_what_the_launcher_asks() -> None:
    documents = list(yaml.safe_load_all((TEMPLATE.parent / "fleet.yaml").read_text()))
    role = next(item for item in documents if item["kind"] == "Role")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "get", "list", "delete"]}]
    deployment = next(item for item in documents if item["kind"] == "Deployment")
    assert deployment["spec"]["replicas"] == 1 and deployment["spec"]["strategy"] == {"type": "Recreate"}


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("kind: Deployment\napiVersion: apps/v1\nspec: {}", "not a v1 Pod"),
        ("kind: Pod\napiVersion: v1\nspec: {containers: [{name: main}]}", "0 containers are called engine"),
        ("[1]", "not a v1 Pod"),
        (":\n- {", "cannot be read"),
    ],
)
def test_a_template_that_is_no_engines_pod_is_refused(tmp_path: Path, template: str, match: str) -> None:
    (tmp_path / "kubernetes").mkdir()
    (tmp_path / "kubernetes" / "engine-pod.yaml").write_text(template)
    with pytest.raises(BadInput, match=match):
        render_pod(load_template(tmp_path), START, FLEET, "rl")


def test_in_a_pod_the_service_account_says_who_we_are(tmp_path: Path) -> None:
    env = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(Rl360Error, match="KUBERNETES_SERVICE_HOST"):
        Cluster.of_pod({}, tmp_path)
    with pytest.raises(Rl360Error, match="no service account"):
        Cluster.of_pod(env, tmp_path)
    (tmp_path / "namespace").write_text("rl\n")
    cluster = Cluster.of_pod(env, tmp_path)
    assert (cluster.url, cluster.namespace, cluster.ca_path) == ("https://[fd00::1]:443", "rl", tmp_path / "ca.crt")


def test_a_life_of_a_pod(launcher: KubernetesLauncher, api: ApiServer) -> None:
    handle = asyncio.run(launcher.start(START, 5))
    assert handle.mark == "kubernetes-0-1" and handle.ref["pod"] == NAME and handle.url == ""
    assert asyncio.run(launcher.locate(handle, 5)).url == ""
    api.runs()
    assert asyncio.run(launcher.locate(handle, 5)).url == "http://10.1.2.3:13000"
    api.runs("fd00::7")
    assert asyncio.run(launcher.locate(handle, 5)).url == "http://[fd00::7]:13000"
    assert [found.mark for found in asyncio.run(launcher.find(5))] == ["kubernetes-0-1"]
    seen = asyncio.run(launcher.proof(handle, 5))
    assert not seen.gone and "Running on n7" in seen.evidence
    proof = asyncio.run(launcher.end(handle, 5))
    assert proof.gone and handle.ref["uid"] in proof.evidence
    method, _, body = next(call for call in api.calls if call[0] == "DELETE")
    assert body == {"gracePeriodSeconds": 30, "preconditions": {"uid": handle.ref["uid"]}}, method


def test_starting_twice_is_one_pod(launcher: KubernetesLauncher, api: ApiServer) -> None:
    first = asyncio.run(launcher.start(START, 5))
    assert asyncio.run(launcher.start(START, 5)) == first
    assert len(api.pods) == 1
    api.pods[NAME]["metadata"]["labels"] = {}
    with pytest.raises(ServiceError, match="is not this fleet's"):
        asyncio.run(launcher.start(START, 5))


def test_a_create_whose_reply_was_lost_finds_its_pod(launcher: KubernetesLauncher, api: ApiServer) -> None:
    asyncio.run(launcher.start(START, 5))
    api.script = ["drop"]
    assert asyncio.run(launcher.start(START, 5)).ref["pod"] == NAME


def test_a_pod_that_is_only_being_deleted_is_not_gone(launcher: KubernetesLauncher, api: ApiServer) -> None:
    handle = asyncio.run(launcher.start(START, 5))
    api.runs()
    api.deletes_at_once = False
    proof = asyncio.run(launcher.end(handle, 0.3))
    assert not proof.gone and "being deleted since 2026-01-01T00:00:00Z" in proof.evidence and "n7" in proof.evidence
    assert all(body["gracePeriodSeconds"] > 0 for method, _, body in api.calls if method == "DELETE")


def test_another_pod_under_the_name_is_another_pod(launcher: KubernetesLauncher, api: ApiServer) -> None:
    handle = asyncio.run(launcher.start(START, 5))
    api.pods[NAME]["metadata"]["uid"] = "another"
    assert asyncio.run(launcher.end(handle, 2)).gone
    assert NAME in api.pods, "it was not deleted"


def test_a_start_that_was_never_recorded_is_ended_by_its_name(launcher: KubernetesLauncher, api: ApiServer) -> None:
    asyncio.run(launcher.start(START, 5))
    assert asyncio.run(launcher.end(Handle(mark=START.mark), 5)).gone
    assert api.pods == {}
    assert "has no pod" in asyncio.run(launcher.end(Handle(mark=START.mark), 5)).evidence


@pytest.mark.parametrize(
    "script",
    [[(429, {"retry-after": "0"})], [(500, {})], [(503, {}), (500, {})], ["drop"], [(401, {})]],
    ids=["429", "500", "503-500", "dropped", "401-once"],
)
def test_what_passes_is_tried_again(launcher: KubernetesLauncher, api: ApiServer, script: list[Any]) -> None:
    api.script = list(script)
    assert asyncio.run(launcher.start(START, 8)).ref["pod"] == NAME
    assert len(api.calls) >= len(script) + 1


@pytest.mark.parametrize(
    ("script", "error", "match"),
    [
        ([(401, {}), (401, {})], ServiceError, "answered 401: scripted 401; the token in .* is not taken"),
        ([(403, {})], Rl360Error, "needs create, get, list and delete on pods in rl"),
        ([(404, {})], ServiceError, "answered 404 and not as this API does"),
        ([(422, {})], Rl360Error, r"answered 422.*engine-pod\.yaml"),
        ([(429, {"retry-after": "60"})], ServiceError, "answered 429.*gave up after 1 s"),
        ([(500, {})] * 9, ServiceError, "answered 500.*gave up after 1 s"),
        (["hang"] * 9, ServiceError, r"no answer \(ReadTimeout\); gave up after 1 s"),
    ],
    ids=["401", "403", "404", "422", "429", "500", "timeout"],
)
def test_what_does_not_pass_is_said(
    launcher: KubernetesLauncher, api: ApiServer, script: list[Any], error: type[Exception], match: str
) -> None:
    api.script = list(script)
    with pytest.raises(error, match=match):
        asyncio.run(launcher.start(START, 1))
    assert api.pods == {}


def test_no_answer_proves_nothing(launcher: KubernetesLauncher, api: ApiServer) -> None:
    handle = asyncio.run(launcher.start(START, 5))
    for told in ((500, {}), (403, {}), "hang"):
        api.script = [told] * 9
        with pytest.raises(Rl360Error):
            asyncio.run(launcher.proof(handle, 0.5))
        api.script = []
    api.http.shutdown()
    api.http.server_close()
    with pytest.raises(ServiceError, match="no answer"):
        asyncio.run(launcher.end(handle, 0.5))


def test_an_end_is_proven_by_the_kubelets_word_and_not_by_a_phase(launcher: KubernetesLauncher, api: ApiServer) -> None:
    """Controllers set phases of pods whose node they lost; only a kubelet says how a container ended."""
    handle = asyncio.run(launcher.start(START, 5))
    ended = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-01-01T00:00:00Z"}
    for state, phase, gone in (
        (None, "Failed", False),
        ({"running": {}}, "Failed", False),
        ({"terminated": ended | {"reason": "ContainerStatusUnknown"}}, "Failed", False),
        ({"terminated": ended | {"finishedAt": None}}, "Failed", False),
        ({"terminated": ended}, "Failed", True),
        ({"terminated": ended}, "Running", True),
    ):
        api.says(state, phase=phase)
        proof = asyncio.run(launcher.proof(handle, 5))
        assert proof.gone is gone, (state, phase, proof.evidence)
    assert "ended at 2026-01-01T00:00:00Z: OOMKilled, exit code 137" in proof.evidence
    assert asyncio.run(launcher.end(handle, 5)).gone and api.pods == {}, "its object is no leftover"


@pytest.mark.parametrize(
    ("told", "running", "state", "failed"),
    [
        ({"phase": "Pending"}, False, "Pending", ""),
        (
            {
                "phase": "Pending",
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/9"}
                ],
            },
            False,
            "Pending (Unschedulable)",
            "",
        ),
        (
            {"phase": "Pending", "engine": {"waiting": {"reason": "ImagePullBackOff"}}},
            False,
            "Pending (ImagePullBackOff)",
            "",
        ),
        ({"phase": "Running", "engine": {"running": {"startedAt": "2026"}}}, True, "Running", ""),
        (
            {"phase": "Failed", "reason": "OutOfcpu", "message": "Pod was rejected"},
            False,
            "Failed (OutOfcpu)",
            "Failed (OutOfcpu): Pod was rejected",
        ),
    ],
)
def test_what_is_seen_of_a_start(
    launcher: KubernetesLauncher, api: ApiServer, told: dict[str, Any], running: bool, state: str, failed: str
) -> None:
    handle = asyncio.run(launcher.start(START, 5))
    api.says(told.pop("engine", None), **told, podIP="10.1.2.3")
    found = asyncio.run(launcher.locate(handle, 5))
    assert (found.running, found.state, found.failed) == (running, state, failed)
    assert bool(found.url) is running and found.ref == handle.ref


def test_a_404_of_something_else_proves_nothing(launcher: KubernetesLauncher, api: ApiServer) -> None:
    handle = asyncio.run(launcher.start(START, 5))
    for reply in ({"error": "no route"}, {"kind": "Status", "reason": "Gone"}, "html"):
        api.script = [(404, {}, reply)]
        with pytest.raises(ServiceError, match=r"404 and not as this API does|not a JSON object"):
            asyncio.run(launcher.proof(handle, 2))


def test_a_long_list_comes_in_pages_and_begins_again_when_it_grew_too_old(
    launcher: KubernetesLauncher, api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl360.kube.PAGE", 2)
    for number in range(5):
        asyncio.run(launcher.start(START.model_copy(update={"name": f"kubernetes-{number}"}), 5))
    marks = [f"kubernetes-{number}-1" for number in range(5)]
    assert [found.mark for found in asyncio.run(launcher.find(5))] == marks
    api.script = [None, (410, {})]
    assert [found.mark for found in asyncio.run(launcher.find(5))] == marks
    api.script = [(410, {})]
    with pytest.raises(ServiceError, match=r"no items \(status 410\)"):
        asyncio.run(launcher.find(5))


def test_a_conflict_without_a_pod_is_tried_again_and_a_full_quota_is_said(
    launcher: KubernetesLauncher, api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that create at once may both be told to try again by the quota that they both change."""
    monkeypatch.setattr(kubernetes, "POLL_S", 0.05)
    api.script = [(409, {})]
    assert asyncio.run(launcher.start(START, 5)).ref["pod"] == NAME
    api.pods.clear()
    api.script = [(409, {}), None] * 50
    with pytest.raises(ServiceError, match="answers 409 and has no such pod: scripted 409"):
        asyncio.run(launcher.start(START, 0.3))
    full = {"kind": "Status", "message": 'pods "x" is forbidden: exceeded quota: gpus'}
    api.script = [(403, {}, full)]
    with pytest.raises(ServiceError, match="exceeded quota: gpus; started when the quota of rl has room"):
        asyncio.run(launcher.start(START, 1))


def test_a_rotated_token_is_read_again(launcher: KubernetesLauncher, api: ApiServer) -> None:
    asyncio.run(launcher.start(START, 5))
    api.tokens = {"fresh"}
    launcher.cluster.token_path.write_text("fresh")
    assert len(asyncio.run(launcher.find(5))) == 1
    launcher.cluster.token_path.unlink()
    with pytest.raises(Rl360Error, match="no token in"):
        asyncio.run(launcher.find(5))


def test_a_reply_that_is_no_pod_is_refused(
    launcher: KubernetesLauncher, api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for reply, match in (("html", "not a JSON object"), ([1], "not a JSON object"), ({"kind": "Pod"}, "without name")):
        monkeypatch.setattr(api, "answer", lambda *_, reply=reply: (200, reply))
        with pytest.raises(ServiceError, match=match):
            asyncio.run(launcher.proof(Handle(mark=START.mark), 2))
    with pytest.raises(ServiceError, match="has no items"):
        asyncio.run(launcher.find(2))
