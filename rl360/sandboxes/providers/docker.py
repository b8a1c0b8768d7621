"""Sandboxes as containers of a Docker daemon, over its HTTP API (version 1.43). Not run against a real daemon.

HTTP and not docker-py: that library blocks a thread for each call, has no deadline for a command, and a step has
thousands of them under way. A container has no network unless its task asks for one, no capabilities, one user
(`nobody`), memory, pids and cpus by cgroup; a disk quota only where the daemon's storage driver has them
(`RL360_DOCKER_DISK_QUOTA=1`). It is killed before its files are read, so that nothing changes them any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import IO, Any
from urllib.parse import quote

import orjson

from rl360.errors import BadInput, ServiceError
from rl360.http_api import Api, Endpoint, Refused
from rl360.sandboxes.leases import Lease
from rl360.sandboxes.providers.remote import (
    AGENT_UID,
    CHUNK,
    KEEP_ALIVE,
    NO_IMAGE,
    Box,
    Lost,
    Order,
    Output,
    download,
    known,
    limited,
    pull_status,
    text_of,
)
from rl360.sandboxes.providers.tars import Hostile, Part, pack

VERSION = "/v1.43"
IMAGE = "python:3.12-bookworm"
SOCKET = "/var/run/docker.sock"
POLL_S = 1.0  # how often a command whose output pipe stays open is asked whether it ended
LAST_S = 0.3
FRAME = 8


def endpoint_at(url: str, socket: str | None = None) -> Endpoint:
    return Endpoint(f"Docker daemon at {socket or url}", url + VERSION, socket=socket, absent=_absent)


def _absent(body: Mapping[str, Any]) -> bool:
    return str(body.get("message")).startswith(("No such", "Could not find"))


class Docker:
    """One daemon."""

    kind = "docker"

    def __init__(self, endpoint: Endpoint, image: str = IMAGE, disk_quota: bool = False) -> None:
        self.api, self.image, self.disk_quota = Api(endpoint), image, disk_quota

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Docker:
        host = env.get("DOCKER_HOST", f"unix://{SOCKET}")
        scheme, _, rest = host.partition("://")
        if scheme == "unix":
            endpoint = endpoint_at("http://docker", rest)
        elif scheme in ("tcp", "http"):
            endpoint = endpoint_at(f"http://{rest.rstrip('/')}")
        else:
            raise BadInput(f"DOCKER_HOST {host!r}: use unix:///path or tcp://host:port")
        return cls(endpoint, env.get("RL360_SANDBOX_IMAGE", IMAGE), env.get("RL360_DOCKER_DISK_QUOTA") == "1")

    def _config(self, order: Order) -> dict[str, Any]:
        spec, limits = order.spec, order.spec.limits
        memory = limits.memory_mb << 20
        host: dict[str, Any] = {
            "Memory": memory,
            "MemorySwap": memory,
            "MemoryReservation": memory,
            "CpuShares": max(2, int(1024 * limits.reserved_cpus)),
            "NanoCpus": int(limits.cpus * 1e9),
            "PidsLimit": limits.pids,
            "NetworkMode": "none" if spec.network == "no-network" else "bridge",
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "RestartPolicy": {"Name": "no"},
            "LogConfig": {"Type": "none"},
        }
        if self.disk_quota:
            host["StorageOpt"] = {"size": f"{spec.disk_mb}M"}
        return {
            "Image": spec.image or self.image,
            "Entrypoint": ["bash", "-c"],
            "Cmd": [KEEP_ALIVE.format(seconds=int(spec.lifetime_s))],
            "User": f"{AGENT_UID}:{AGENT_UID}",
            "WorkingDir": spec.workdir,
            "Hostname": "sandbox",
            "Env": [f"{name}={value}" for name, value in spec.env.items()],
            "Labels": dict(order.labels),
            "HostConfig": host,
        }

    async def start(self, order: Order, deadline_s: float) -> Box:
        until = time.monotonic() + deadline_s
        config = self._config(order)
        path = f"/containers/create?name={order.name}"
        made = await self.api.call("POST", path, deadline_s, config, also=(404,), repeat=False, try_s=deadline_s)
        if made.status_code == 404:  # no such image here yet
            await self._pull(config["Image"], until - time.monotonic())
            left = until - time.monotonic()
            made = await self.api.call("POST", path, left, config, repeat=False, try_s=left)
        return Box(text_of(self.api.document(made), "Id", "Docker daemon"), order.spec)

    async def _pull(self, image: str, deadline_s: float) -> None:
        """Its failure is in the stream or the status, in words that are the registry's (`pull_status`)."""
        name, _, tag = image.rpartition(":") if ":" in image.rpartition("/")[2] else (image, "", "latest")
        path = f"/images/create?fromImage={quote(name, safe='')}&tag={quote(tag, safe='')}"
        last = b""
        try:
            async with self.api.stream("POST", path, deadline_s) as reply:
                async for chunk in reply.aiter_bytes():
                    last = (last + chunk)[-4096:]
        except (Refused, ServiceError) as error:
            status = (
                error.status if isinstance(error, Refused) and error.status < 500 else pull_status(str(error), image)
            )
            status = NO_IMAGE if status in (401, 403) else status
            raise Refused(f"{error}; image {image} cannot be pulled", status) from None
        if b'"error"' in last:
            said = last.decode("utf-8", "replace")[-300:]
            text = f"Docker daemon: image {image} cannot be pulled: {said}"
            raise Refused(text, pull_status(said, image))

    async def fill(self, box: Box, parts: list[Part], scratch: IO[bytes], deadline_s: float) -> None:
        """Into the container before it runs; then it is started."""
        until = time.monotonic() + deadline_s
        await asyncio.to_thread(pack, parts, scratch, roots=True)

        async def content() -> AsyncIterator[bytes]:
            scratch.seek(0)
            while chunk := scratch.read(CHUNK):
                yield chunk

        await known(self.api, "PUT", f"/containers/{box.ident}/archive?path=/", deadline_s, content=content)
        await known(self.api, "POST", f"/containers/{box.ident}/start", until - time.monotonic(), also=(304,))
        check = Output(500)
        if await self.run(box, "command -v tar bash kill >/dev/null", check, until - time.monotonic()) != 0:
            raise ServiceError(f"image {box.spec.image or self.image}: has no bash and tar; use another image")

    async def run(self, box: Box, command: str, output: Output, deadline_s: float) -> int:
        until = time.monotonic() + deadline_s
        order = {"AttachStdout": True, "AttachStderr": True, "Cmd": limited(box.spec.limits, command)}
        made = await known(
            self.api,
            "POST",
            f"/containers/{box.ident}/exec",
            deadline_s,
            order,
            also=(409,),
            repeat=False,
            try_s=deadline_s,
        )
        if made.status_code == 409:  # it does not run any more
            raise await self._ended(box.ident, until - time.monotonic())
        path = f"/exec/{text_of(self.api.document(made), 'Id', 'Docker daemon')}"
        reading = asyncio.ensure_future(self._read(path, output, until - time.monotonic()))
        try:
            while not (await asyncio.wait({reading}, timeout=POLL_S))[0]:
                if not (await self._state(path, until - time.monotonic()))["Running"]:
                    await asyncio.wait({reading}, timeout=LAST_S)
                    break  # what still holds its output open is a process it left behind
            if reading.done():
                reading.result()
        finally:
            reading.cancel()
            await asyncio.wait({reading})
            if not reading.cancelled():
                reading.exception()
        state = await self._state(path, until - time.monotonic())
        if state["ExitCode"] is None:
            raise await self._ended(box.ident, until - time.monotonic())
        return int(state["ExitCode"])

    async def _read(self, path: str, output: Output, deadline_s: float) -> None:
        """Frames of eight bytes (stream, three zeros, length big-endian) and what they announce."""
        buffer = b""
        left = 0
        async with self.api.stream("POST", f"{path}/start", deadline_s, {"Detach": False, "Tty": False}) as reply:
            async for chunk in reply.aiter_bytes():
                buffer += chunk
                while buffer:
                    if left:
                        output.feed(buffer[:left])
                        buffer, left = buffer[left:], max(0, left - len(buffer))
                    elif len(buffer) < FRAME:
                        break
                    else:
                        if buffer[1:4] != b"\0\0\0":
                            raise ServiceError(f"Docker daemon: {path}: output is not in frames")
                        left, buffer = int.from_bytes(buffer[4:FRAME], "big"), buffer[FRAME:]

    async def _state(self, path: str, deadline_s: float) -> Mapping[str, Any]:
        state = self.api.document(await known(self.api, "GET", f"{path}/json", deadline_s))
        if not isinstance(state, dict) or not {"Running", "ExitCode"} <= state.keys():
            raise ServiceError("Docker daemon: the state of a command has no Running and ExitCode")
        return state

    async def _ended(self, ident: str, deadline_s: float) -> Lost:
        """Why a container does not run. Memory exhausted is its contents' doing; anything else is not."""
        found = await known(self.api, "GET", f"/containers/{ident}/json", deadline_s)
        state = self.api.document(found).get("State") or {}
        if state.get("OOMKilled"):
            return Lost("limit hit: memory", by_contents=True)
        return Lost(f"its container ended ({state.get('Status')}, code {state.get('ExitCode')})")

    async def quiet(self, box: Box, deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        await known(self.api, "POST", f"/containers/{box.ident}/kill", deadline_s, also=(409,))
        path = f"/containers/{box.ident}/wait?condition=not-running"
        await known(self.api, "POST", path, until - time.monotonic(), try_s=deadline_s)

    async def fetch(self, box: Box, path: str, into: IO[bytes], limit_bytes: int, deadline_s: float) -> None:
        try:
            archive = f"/containers/{box.ident}/archive?path={quote(path)}"
            await download(self.api, archive, into, limit_bytes, deadline_s)
        except Refused as error:
            if error.status != 404:
                raise
            if await self.missing(box.ident, deadline_s) is not None:
                raise Lost(str(error)) from None
            raise Hostile(f"there is no {path}") from None

    async def end(self, ident: str, deadline_s: float) -> None:
        await self.api.call("DELETE", f"/containers/{ident}?force=1&v=1", deadline_s, also=(404, 409))

    async def missing(self, ident: str, deadline_s: float) -> str | None:
        reply = await self.api.call("GET", f"/containers/{ident}/json", max(0.1, deadline_s), also=(404,))
        return f"the Docker daemon has no container {ident[:12]}" if reply.status_code == 404 else None

    async def listed(self, wanted: Mapping[str, str], deadline_s: float) -> list[Lease]:
        filters = orjson.dumps({"label": [f"{name}={value}" for name, value in wanted.items()]}).decode()
        found = await self.api.json("GET", f"/containers/json?all=1&filters={quote(filters)}", deadline_s)
        try:
            return [Lease(self.kind, str(item["Id"]), dict(item["Labels"] or {})) for item in found]
        except (TypeError, KeyError, ValueError):
            raise ServiceError("Docker daemon: its list of containers has none with Id and Labels") from None

    async def close(self) -> None:
        await self.api.close()
