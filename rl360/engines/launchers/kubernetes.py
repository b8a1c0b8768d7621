"""Engines as pods, over the API server's HTTP: create, get, list, delete. Not run on a real cluster.

The pod is `infra/kubernetes/engine-pod.yaml` (or `kubernetes/engine-pod.yaml` in the home) with name, labels, arguments
and port filled in; everything else is the operator's. One start is one pod that is never restarted in place
(`restartPolicy: Never`): another try is another pod. Proof of an end: the API server says that it has no pod of that
name, or one with another uid, or the pod's kubelet says that its container `engine` has terminated. A pod that is only
being deleted, or whose node doesn't answer, is not gone, whatever phase a controller gave it; it is never deleted by
force, because that removes the object and not the processes. Token and CA come from the service account and are read
again for each call, for they rotate.
"""

from __future__ import annotations

import asyncio
import copy
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from rl360.config.services import Services
from rl360.engines.launchers.base import Handle, Start, fleet_id
from rl360.engines.processes import EndProof
from rl360.errors import BadInput, Rl360Error, ServiceError
from rl360.http_api import Api, Refused
from rl360.kube import Cluster, pods, states

TEMPLATE = Path(__file__).resolve().parents[3] / "infra" / "kubernetes" / "engine-pod.yaml"
FLEET_LABEL, MARK_LABEL = "rl360/fleet", "rl360/engine"
GRACE_S = 30
POLL_S = 1.0


def render_pod(template: Mapping[str, Any], start: Start, fleet: str, namespace: str) -> dict[str, Any]:
    """The pod of one start. `BadInput` when the template is not a pod with a container `engine`."""
    pod = copy.deepcopy(dict(template))
    if pod.get("apiVersion") != "v1" or pod.get("kind") != "Pod" or not isinstance(pod.get("spec"), dict):
        raise BadInput("engine-pod.yaml: not a v1 Pod")
    engines = [item for item in pod["spec"].get("containers") or [] if item.get("name") == "engine"]
    if len(engines) != 1:
        raise BadInput(f"engine-pod.yaml: {len(engines)} containers are called engine, there must be one")
    pod["spec"]["restartPolicy"] = "Never"
    meta = pod.setdefault("metadata", {})
    meta |= {"name": f"rl360-{fleet}-{start.mark}", "namespace": namespace}
    meta["labels"] = {**(meta.get("labels") or {}), FLEET_LABEL: fleet, MARK_LABEL: start.mark}
    engines[0]["args"] = [*(engines[0].get("args") or []), *start.argv("0.0.0.0")]
    engines[0]["ports"] = [{"name": "http", "containerPort": start.port}]
    return pod


def load_template(home: Path) -> dict[str, Any]:
    """The home's own template, else the project's."""
    own = home / "kubernetes" / "engine-pod.yaml"
    path = own if own.is_file() else TEMPLATE
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise BadInput(f"{path}: cannot be read ({type(error).__name__})") from None
    if not isinstance(found, dict):
        raise BadInput(f"{path}: not a v1 Pod")
    return found


class KubernetesLauncher:
    """Pods of one fleet in one namespace."""

    kind = "kubernetes"
    starts = True

    def __init__(self, cluster: Cluster, template: Mapping[str, Any], fleet: str) -> None:
        self.cluster = cluster
        self.template = template
        self.fleet = fleet
        self.path = f"/api/v1/namespaces/{cluster.namespace}/pods"

    @classmethod
    def in_cluster(cls, services: Services) -> KubernetesLauncher:
        return cls(Cluster.of_pod(os.environ), load_template(Path(services.home)), fleet_id(services))

    def port_of(self, number: int) -> int:
        """Each pod has an address of its own."""
        return 13_000

    async def start(self, start: Start, deadline_s: float) -> Handle:
        pod = render_pod(self.template, start, self.fleet, self.cluster.namespace)
        name, until = pod["metadata"]["name"], time.monotonic() + deadline_s
        while True:
            status, made = await self._call("POST", self.path, pod, max(1.0, until - time.monotonic()))
            if status == 404:
                raise ServiceError(f"pod {name}: the API server knows no namespace {self.cluster.namespace}")
            if status != 409:
                break
            # an earlier try of this start whose reply was lost, somebody else's pod, or a quota that changed meanwhile
            status, found = await self._call("GET", f"{self.path}/{name}", None, max(1.0, until - time.monotonic()))
            if status == 200:
                made = found
                break
            if time.monotonic() > until:
                raise ServiceError(f"pod {name}: the API server answers 409 and has no such pod: {_said(made)}")
            await asyncio.sleep(POLL_S)
        handle = self._handle(made)
        if handle.mark != start.mark:
            raise ServiceError(f"pod {name} is there and is not this fleet's (label {MARK_LABEL}); delete or rename it")
        return handle

    async def locate(self, handle: Handle, deadline_s: float) -> Handle:
        """Running when its container is; while it waits, `state` is why (the scheduler's or the kubelet's one word)."""
        pod = await self._pod(handle, deadline_s)
        if pod is None:
            return handle
        handle = handle.model_copy(update={"ref": self._handle(pod).ref} | _progress(pod))
        address = (pod.get("status") or {}).get("podIP")
        if not address or not handle.running:
            return handle
        containers = {item["name"]: item for item in pod["spec"]["containers"]}
        port = containers["engine"]["ports"][0]["containerPort"]
        host = f"[{address}]" if ":" in address else address
        return handle.model_copy(update={"url": f"http://{host}:{port}"})

    async def find(self, deadline_s: float) -> list[Handle]:
        async with self._api() as api:
            found = await pods(api, self.cluster, f"{FLEET_LABEL}={self.fleet}", deadline_s)
        return [self._handle(pod) for pod in found]

    async def proof(self, handle: Handle, deadline_s: float) -> EndProof:
        name = self._name(handle)
        pod = await self._pod(handle, deadline_s)
        if pod is None:
            uid = handle.ref.get("uid")
            return EndProof(
                gone=True, evidence=f"the API server has no pod {name}" + (f" with uid {uid}" if uid else "")
            )
        state, meta = pod.get("status") or {}, pod["metadata"]
        if ended := _terminated(pod):
            return EndProof(gone=True, evidence=f"pod {name} (uid {meta['uid']}): {ended}")
        leaving = f", being deleted since {meta['deletionTimestamp']}" if meta.get("deletionTimestamp") else ""
        node = pod.get("spec", {}).get("nodeName") or "no node yet"
        phase = state.get("phase", "phase unknown")
        return EndProof(gone=False, evidence=f"pod {name} (uid {meta['uid']}) is there: {phase} on {node}{leaving}")

    async def end(self, handle: Handle, deadline_s: float) -> EndProof:
        until = time.monotonic() + deadline_s
        pod = await self._pod(handle, deadline_s)
        if pod is not None:  # also when its container has ended: the object would be a leftover
            body = {"gracePeriodSeconds": GRACE_S, "preconditions": {"uid": pod["metadata"]["uid"]}}
            # 404 and 409 (another uid by now) both mean that this pod is no more; the look below says so
            await self._call("DELETE", f"{self.path}/{self._name(handle)}", body, max(1.0, until - time.monotonic()))
        while True:
            proof = await self.proof(handle, max(1.0, until - time.monotonic()))
            if proof.gone or time.monotonic() > until:
                return proof
            await asyncio.sleep(POLL_S)

    def _name(self, handle: Handle) -> str:
        return handle.ref.get("pod") or f"rl360-{self.fleet}-{handle.mark}"

    async def _pod(self, handle: Handle, deadline_s: float) -> dict[str, Any] | None:
        """The pod of this handle; None when there is none of its name and uid."""
        status, pod = await self._call("GET", f"{self.path}/{self._name(handle)}", None, deadline_s)
        if status == 404:
            return None
        if status != 200:
            raise ServiceError(f"API server {self.cluster.url}: a look at a pod answered {status}: {_said(pod)}")
        known = self._handle(pod)
        wanted = handle.ref.get("uid")
        if wanted and known.ref["uid"] != wanted:
            return None
        if known.mark != handle.mark:
            raise ServiceError(f"pod {self._name(handle)} is not this fleet's: no label {MARK_LABEL}={handle.mark}")
        return pod

    def _handle(self, pod: Mapping[str, Any]) -> Handle:
        try:
            meta = pod["metadata"]
            labels = meta.get("labels") or {}
            mark = labels.get(MARK_LABEL, "") if labels.get(FLEET_LABEL) == self.fleet else ""
            return Handle(mark=mark, ref={"pod": str(meta["name"]), "uid": str(meta["uid"])})
        except (KeyError, TypeError, AttributeError):
            raise ServiceError(f"API server {self.cluster.url}: a pod without name and uid") from None

    async def _call(self, method: str, path: str, body: Any, deadline_s: float) -> tuple[int, dict[str, Any]]:
        """Status 200-299, 404 or 409, and the body. Tries again what may pass until the deadline;
        create and delete are safe to repeat by name and uid."""
        async with self._api() as api:
            reply = await api.call(method, path, deadline_s, body, also=(404, 409))
            said = api.document(reply)
        if not isinstance(said, dict):
            raise ServiceError(f"API server {self.cluster.url}: reply is not a JSON object: {reply.text[:80]!r}")
        return reply.status_code, said

    @asynccontextmanager
    async def _api(self) -> AsyncIterator[Api]:
        """The API server; its refusals say what would mend them."""
        async with Api(self.cluster.endpoint({})) as api:
            try:
                yield api
            except Refused as error:
                if error.status in (401, 429):
                    raise ServiceError(str(error)) from None
                if error.status == 403 and "exceeded quota" in str(error):
                    later = f"started when the quota of {self.cluster.namespace} has room"
                    raise ServiceError(f"{error}; {later}") from None
                if error.status == 403:
                    rights = f"create, get, list and delete on pods in {self.cluster.namespace}"
                    account = f"the service account needs {rights} (infra/kubernetes/fleet.yaml)"
                    raise Rl360Error(f"{error}; {account}") from None
                raise Rl360Error(f"{error}; look at infra/kubernetes/engine-pod.yaml") from None


def _said(body: Mapping[str, Any]) -> str:
    return str(body.get("message") or body.get("reason") or "no message")[:200]


def _terminated(pod: Mapping[str, Any]) -> str:
    """How the container ended, by the kubelet's word; empty when it doesn't say so. It is never started again in this
    pod. A phase alone proves nothing: controllers set it for nodes that they lost sight of, and a kubelet that finds no
    trace of the container says ContainerStatusUnknown."""
    ended = states(pod).get("engine", {}).get("terminated") or {}
    if not ended.get("finishedAt") or ended.get("reason") == "ContainerStatusUnknown":
        return ""
    return f"container engine ended at {ended['finishedAt']}: {ended.get('reason')}, exit code {ended.get('exitCode')}"


def _progress(pod: Mapping[str, Any]) -> dict[str, Any]:
    """`running`, `state` and `detail` of a start."""
    status, engine = pod.get("status") or {}, states(pod).get("engine", {})
    if engine.get("running"):
        return {"running": True, "state": "Running", "detail": f"on {pod['spec'].get('nodeName')}"}
    phase = str(status.get("phase") or "Pending")
    conditions = status.get("conditions") or []
    unmet = [item for item in conditions if item.get("type") == "PodScheduled" and item.get("status") == "False"]
    why = engine.get("waiting") or (unmet[0] if unmet else {})
    reason = why.get("reason") or status.get("reason") or ""
    state = f"{phase} ({reason})" if reason else phase
    return {
        "running": False,
        "state": state,
        # refused or evicted by its node, or an init container failed
        "failed": f"{state}: {status.get('message') or ''}"[:200] if phase in ("Failed", "Succeeded") else "",
        "detail": f"{phase} {reason}: {str(why.get('message') or '')[:160]}".strip(": "),
    }
