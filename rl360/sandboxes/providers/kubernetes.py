"""Sandboxes as pods, over the API server's HTTP and, for commands, its websocket. Not run on a real cluster.

One pod is one sandbox and never restarts; it ends itself with its lease (`activeDeadlineSeconds`). User `nobody`, no
capabilities, no service account; requests are what is reserved, so that a node never has more promised than it
holds; files live in volumes with a size. Network: pods labelled `rl360/network: none` are cut off by the policy of
infra/kubernetes/sandboxes.yaml, and nothing is started where that policy is missing. The number of processes is the
kubelet's (`podPidsLimit`). Proof of an end: the API server has no pod of that name and uid; never a forced delete,
which removes the object and not the processes.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import IO, Any
from urllib.parse import urlencode

import aiohttp
import orjson

from rl360.errors import ServiceError
from rl360.http_api import Api, NoAnswer, Refused, message_of
from rl360.kube import Cluster, pods, states
from rl360.sandboxes.leases import Lease
from rl360.sandboxes.providers.remote import (
    AGENT_UID,
    KEEP_ALIVE,
    KILL_ALL,
    LOGS_DIR,
    NO_IMAGE,
    NO_SUCH_PATH,
    TAR_SLACK,
    Box,
    Lost,
    Order,
    Output,
    known,
    limited,
    packing,
    pull_status,
)
from rl360.sandboxes.providers.tars import Hostile, Part, pack

IMAGE = "python:3.12-bookworm"
POLICY = "rl360-sandbox-no-network"
LABEL = "rl360/sandbox"
READY_S = (0.2, 2.0)  # between two looks at a pod that starts: the first, the longest
GRACE_S = 1
CHUNK = 1 << 18
STDIN, STDOUT, STDERR, ERROR = 0, 1, 2, 3
PROTOCOL = "v4.channel.k8s.io"
PULL_WAITS = ("ErrImagePull", "ImagePullBackOff")
BAD_WAITS = ("InvalidImageName", "CreateContainerError", "CreateContainerConfigError")
LAST_S = 0.5  # to say that the image did not come, before whoever asked stops waiting


class Pods:
    """Sandboxes of one namespace."""

    kind = "kubernetes"

    def __init__(self, cluster: Cluster, image: str = IMAGE) -> None:
        self.cluster, self.image = cluster, image
        self.api = Api(cluster.endpoint({403: "look at the rights and quotas of the namespace"}))
        self.path = f"/api/v1/namespaces/{cluster.namespace}/pods"
        self._policy_seen = False

    @classmethod
    def of(cls, env: Mapping[str, str] = os.environ) -> Pods:
        return cls(Cluster.of_pod(env), env.get("RL360_SANDBOX_IMAGE", IMAGE))

    def _pod(self, order: Order) -> dict[str, Any]:
        spec = order.spec
        resources = {
            "cpu": _cpu(spec.limits.cpus),
            "memory": f"{spec.limits.memory_mb}Mi",
            "ephemeral-storage": f"{2 * spec.disk_mb}Mi",
        }
        places = [spec.workdir, *spec.read_only, *([LOGS_DIR] if spec.with_logs else []), "/tmp"]
        volumes = [{"name": f"v{n}", "emptyDir": {"sizeLimit": f"{spec.disk_mb}Mi"}} for n in range(len(places))]
        container = {
            "name": "sandbox",
            "image": spec.image or self.image,
            "command": ["bash", "-c", KEEP_ALIVE.format(seconds=math.ceil(spec.lifetime_s))],
            "workingDir": spec.workdir,
            "env": [{"name": name, "value": value.replace("$(", "$$(")} for name, value in spec.env.items()],
            "resources": {"requests": {**resources, "cpu": _cpu(spec.limits.reserved_cpus)}, "limits": resources},
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            "volumeMounts": [{"name": f"v{n}", "mountPath": place} for n, place in enumerate(places)],
        }
        network = "none" if spec.network == "no-network" else "public"
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": order.name,
                "namespace": self.cluster.namespace,
                "labels": {LABEL: "1", "rl360/network": network, **_selectable(order.labels)},
                "annotations": dict(order.labels),
            },
            "spec": {
                "restartPolicy": "Never",
                "activeDeadlineSeconds": math.ceil(spec.lifetime_s),
                "terminationGracePeriodSeconds": GRACE_S,
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "hostname": "sandbox",
                "securityContext": {
                    "runAsUser": AGENT_UID,
                    "runAsGroup": AGENT_UID,
                    "runAsNonRoot": True,
                    "fsGroup": AGENT_UID,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [container],
                "volumes": volumes,
            },
        }

    async def start(self, order: Order, deadline_s: float) -> Box:
        until = time.monotonic() + deadline_s
        if order.spec.network == "no-network" and not self._policy_seen:
            path = f"/apis/networking.k8s.io/v1/namespaces/{self.cluster.namespace}/networkpolicies/{POLICY}"
            found = await self.api.call("GET", path, deadline_s, also=(404,))
            if found.status_code == 404:
                raise ServiceError(
                    f"namespace {self.cluster.namespace} has no NetworkPolicy {POLICY}: they would have a network; "
                    "apply infra/kubernetes/sandboxes.yaml"
                )
            self._policy_seen = True
        made = await self._create(self._pod(order), until)
        pause_s, longest_s = READY_S
        while not _ready(made):
            if waits := _waits(made, PULL_WAITS):  # the kubelet tries again, but not what no registry has
                status = pull_status(waits, order.spec.image or self.image)
                if status == NO_IMAGE or time.monotonic() + pause_s + LAST_S > until:
                    raise Refused(f"pod {order.name}: {waits}", status)
            await asyncio.sleep(pause_s)
            pause_s = min(longest_s, 1.5 * pause_s)
            made = await self._pod_of(order.name, until - time.monotonic())
        return Box(_ident(made), order.spec, {"pod": order.name})

    async def _create(self, pod: Mapping[str, Any], until: float) -> Any:
        """Safe to repeat: the name is this try's own. A conflict is an earlier try whose reply was lost, or a quota
        that several change at once."""
        path = f"{self.path}/{pod['metadata']['name']}"
        while True:
            made = await self.api.call("POST", self.path, max(0.1, until - time.monotonic()), pod, also=(409,))
            if made.status_code != 409:
                return self.api.document(made)
            found = await self.api.call("GET", path, max(0.1, until - time.monotonic()), also=(404,))
            if found.status_code != 404:
                return self.api.document(found)
            if time.monotonic() + READY_S[1] > until:
                raise ServiceError(f"pod {pod['metadata']['name']}: answered 409 and there is none: {message_of(made)}")
            await asyncio.sleep(READY_S[0])

    async def _pod_of(self, name: str, deadline_s: float) -> Any:
        return self.api.document(await known(self.api, "GET", f"{self.path}/{name}", deadline_s))

    async def fill(self, box: Box, parts: list[Part], scratch: IO[bytes], deadline_s: float) -> None:
        """By `tar` inside, as the only user there is: `/tests` is the verifier's pod's own and in no other."""
        size = await asyncio.to_thread(pack, [_owned(part) for part in parts], scratch, roots=False)
        scratch.seek(0)
        said = Output(2000)
        # without half-closed inputs in this protocol, `head` says where the tar ends
        script = f"head -c {size} | tar -x -p --no-same-owner -C / -f - 2>&1"
        code = await self._exec(box, ["bash", "-c", f"set -o pipefail; {script}"], said, deadline_s, scratch)
        if code != 0:
            raise ServiceError(f"pod {box.ref['pod']} cannot be filled ({code}): {bytes(said.kept[-200:])!r}")

    async def run(self, box: Box, command: str, output: Output, deadline_s: float) -> int:
        if command == KILL_ALL:
            return await self._exec(box, ["bash", "-c", KILL_ALL], output, deadline_s)
        argv = limited(box.spec.limits, command)
        # by input, not by argument: the command line is part of the address, and proxies cut long ones
        taken = 'c=$(head -c "$0"); eval "$1"'
        data = command.encode()
        script = f'{argv[2].rsplit(";", 1)[0]}; exec bash -c "$c" </dev/null'
        return await self._exec(box, ["bash", "-c", taken, str(len(data)), script], output, deadline_s, data)

    async def quiet(self, box: Box, deadline_s: float) -> None:
        await self._exec(box, ["bash", "-c", f"{KILL_ALL}; true"], Output(0), deadline_s)

    async def fetch(self, box: Box, path: str, into: IO[bytes], limit_bytes: int, deadline_s: float) -> None:
        spool = _Spool(into, limit_bytes + TAR_SLACK)
        code = await self._exec(box, ["bash", "-c", packing(path)], spool, deadline_s)
        if code == NO_SUCH_PATH:
            raise Hostile(f"there is no {path}")
        if code != 0:
            raise ServiceError(f"pod {box.ref['pod']}: {path} cannot be packed ({code})")

    async def _exec(
        self, box: Box, argv: list[str], output: Output, deadline_s: float, data: IO[bytes] | bytes | None = None
    ) -> int:
        """One command over a websocket; its exit code is in the last message of the error channel."""
        status: Any = None
        async with self._socket(box, argv, deadline_s, stdin=data is not None) as socket:
            if data is not None:
                await _send(socket, data)
            async for message in socket:
                if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                    continue
                channel, payload = message.data[0], message.data[1:]
                if channel in (STDOUT, STDERR):
                    output.feed(payload)
                elif channel == ERROR:
                    status = payload
                    break
        if status is None:  # the connection ended first: is the pod still there?
            await self._raise_if_ended(box)
            raise NoAnswer(f"pod {box.ref['pod']}: the connection of a command ended without its exit code")
        return _exit_code(status, box.ref["pod"])

    @asynccontextmanager
    async def _socket(
        self, box: Box, argv: list[str], deadline_s: float, *, stdin: bool
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        query = [("container", "sandbox"), ("stdout", "1"), ("stderr", "1"), *([("stdin", "1")] if stdin else [])]
        query += [("command", part) for part in argv]
        url = f"{self.cluster.url}{self.path}/{box.ref['pod']}/exec?{urlencode(query)}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=min(10.0, deadline_s))
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
            try:
                async with session.ws_connect(
                    url,
                    protocols=(PROTOCOL,),
                    headers=self.cluster.headers(),
                    ssl=self.cluster.ssl_context() or True,
                    max_msg_size=0,
                    autoping=True,
                ) as socket:
                    yield socket
            except aiohttp.WSServerHandshakeError as error:
                if error.status == 404:
                    raise Lost(f"API server has no pod {box.ref['pod']}") from None
                await self._raise_if_ended(box)
                raise Refused(f"pod {box.ref['pod']}: exec answered {error.status}", error.status) from None
            except aiohttp.ClientError as error:
                raise NoAnswer(f"pod {box.ref['pod']}: exec: no answer ({type(error).__name__})") from None

    async def _raise_if_ended(self, box: Box) -> None:
        """`Lost` when the pod ended. Its own memory or disk over the limit is its contents' doing; a node's is not."""
        pod = await self._pod_of(box.ref["pod"], 10.0)
        state = pod.get("status") or {}
        ended = [each.get("terminated") or {} for each in states(pod).values()]
        reason = str(ended[0].get("reason") if ended else "") or str(state.get("reason"))
        if "OOMKilled" in reason:
            raise Lost("limit hit: memory", by_contents=True)
        if state.get("reason") == "Evicted" and re.search(
            r"local (ephemeral )?storage|emptyDir", str(state.get("message"))
        ):
            raise Lost("limit hit: disk", by_contents=True)
        if _ident(pod) != box.ident or state.get("phase") in ("Failed", "Succeeded") or any(ended):
            raise Lost(f"its pod ended ({state.get('phase')}, {reason})")

    async def end(self, ident: str, deadline_s: float) -> None:
        name, _, uid = ident.partition("/")
        body = {"gracePeriodSeconds": GRACE_S, "preconditions": {"uid": uid}}
        await self.api.call("DELETE", f"{self.path}/{name}", deadline_s, body, also=(404, 409))

    async def missing(self, ident: str, deadline_s: float) -> str | None:
        name, _, uid = ident.partition("/")
        reply = await self.api.call("GET", f"{self.path}/{name}", max(0.1, deadline_s), also=(404,))
        if reply.status_code != 404 and _ident(self.api.document(reply)) == ident:
            return None
        return f"the API server has no pod {name} with uid {uid}"

    async def listed(self, wanted: Mapping[str, str], deadline_s: float) -> list[Lease]:
        selector = ",".join(f"{name}={value}" for name, value in {LABEL: "1", **_selectable(wanted)}.items())
        found = await pods(self.api, self.cluster, selector, deadline_s)
        return [Lease(self.kind, _ident(pod), dict(pod["metadata"].get("annotations") or {})) for pod in found]

    async def close(self) -> None:
        await self.api.close()


class _Spool(Output):
    """Output that goes to a file and has a limit of its own."""

    def __init__(self, into: IO[bytes], limit_bytes: int) -> None:
        super().__init__(0)
        self._into, self._limit_bytes = into, limit_bytes

    def feed(self, data: bytes) -> None:
        self.seen += len(data)
        if self.seen > self._limit_bytes:
            raise Hostile(f"more than {self._limit_bytes >> 20} MB")
        self._into.write(data)


async def _send(socket: aiohttp.ClientWebSocketResponse, data: IO[bytes] | bytes) -> None:
    if isinstance(data, bytes):
        await socket.send_bytes(bytes([STDIN]) + data)
        return
    while chunk := data.read(CHUNK):
        await socket.send_bytes(bytes([STDIN]) + chunk)


def _cpu(cores: float) -> str:
    return f"{max(1, int(cores * 1000))}m"


def _owned(part: Part) -> Part:
    return Part(part.host, part.inside, AGENT_UID, part.writable)


def _selectable(labels: Mapping[str, str]) -> dict[str, str]:
    """Labels a selector can name: a digest where a value has characters or a length that labels don't take."""
    return {name.replace("rl360.", "rl360/"): _label_value(value) for name, value in labels.items()}


def _label_value(value: str) -> str:
    if re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?", value):
        return value
    return f"sha256-{hashlib.sha256(value.encode()).hexdigest()[:40]}"


def _ident(pod: Any) -> str:
    try:
        return f"{pod['metadata']['name']}/{pod['metadata']['uid']}"
    except (KeyError, TypeError):
        raise ServiceError("API server: a pod without name and uid") from None


def _ready(pod: Any) -> bool:
    """Whether commands can run; `ServiceError` when they never will."""
    _ident(pod)
    status = pod.get("status") or {}
    if status.get("phase") in ("Failed", "Succeeded"):
        raise ServiceError(f"pod {pod['metadata']['name']} is {status['phase']}: {status.get('message')}")
    if waits := _waits(pod, BAD_WAITS):
        raise ServiceError(f"pod {pod['metadata']['name']}: {waits}")
    return any(state.get("running") is not None for state in states(pod).values())


def _waits(pod: Any, reasons: tuple[str, ...]) -> str | None:
    """What its container waits for, when that is one of these reasons."""
    for state in states(pod).values():
        waiting = state.get("waiting") or {}
        if waiting.get("reason") in reasons:
            return f"{waiting['reason']}: {waiting.get('message')}"
    return None


def _exit_code(status: bytes, pod: str) -> int:
    """`Success`, or a failure whose causes hold the exit code."""
    try:
        found = orjson.loads(status)
        if found["status"] == "Success":
            return 0
        causes = (found.get("details") or {}).get("causes") or []
        codes = [cause["message"] for cause in causes if cause.get("reason") == "ExitCode"]
        return int(codes[0])
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, IndexError, ValueError):
        raise ServiceError(f"pod {pod}: a command's end of another form: {status[:120]!r}") from None
