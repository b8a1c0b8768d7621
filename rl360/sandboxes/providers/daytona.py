"""Sandboxes of a Daytona deployment, over its HTTP API and the toolbox inside each. Not run against a real one.

A refusal by quota (403) or rate (429, kept to until the deadline) is the provider's. The toolbox runs as root inside;
commands of the agent and of the tests run as `nobody` without privileges, so that ending theirs (`kill -9 -1`) spares
the toolbox, and files are read back by root's own `tar`. Its command call is ended by our clock and by its own (408);
either is a timeout of the command. What a command prints goes to a file first: a process left behind that keeps its
output open would hold up the reply. Daytona has no limit on processes.
"""

from __future__ import annotations

import asyncio
import base64
import math
import shlex
import time
from collections.abc import Mapping
from typing import IO, Any
from urllib.parse import quote

import orjson

from rl360.errors import BadInput, ServiceError
from rl360.http_api import Api, Endpoint
from rl360.sandboxes.leases import Lease
from rl360.sandboxes.providers.remote import (
    AGENT_UID,
    FLOOD_BYTES,
    KILL_ALL,
    NO_SUCH_PATH,
    TAR_SLACK,
    Box,
    Flood,
    Order,
    Output,
    download,
    known,
    limited,
    packing,
    text_of,
)
from rl360.sandboxes.providers.tars import Hostile, Part, pack

URL = "https://app.daytona.io/api"
IMAGE = "python:3.12-bookworm"
READY_S = 0.5  # between two looks at a sandbox that starts
AS_NOBODY = f"setpriv --reuid {AGENT_UID} --regid {AGENT_UID} --clear-groups --no-new-privs --bounding-set=-all"
FAILED = ("error", "build_failed", "destroyed", "destroying", "stopped", "archived")


def endpoint_at(url: str, key: str) -> Endpoint:
    headers = {"authorization": f"Bearer {key}"}
    hints = {403: "quota or rights of the key", 401: "look at DAYTONA_API_KEY"}
    return Endpoint("Daytona", url.rstrip("/"), lambda: headers, hints=hints, absent=_absent)


def _absent(body: Mapping[str, Any]) -> bool:
    return "not found" in str(body.get("message")).lower()


class Daytona:
    """One organization of one deployment."""

    kind = "daytona"

    def __init__(self, endpoint: Endpoint, image: str = IMAGE, target: str = "") -> None:
        self.endpoint, self.image, self.target = endpoint, image, target
        self.api = Api(endpoint)

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Daytona:
        key = env.get("DAYTONA_API_KEY", "")
        if not key:
            raise BadInput("provider daytona: DAYTONA_API_KEY is not set; give the organization's key")
        endpoint = endpoint_at(env.get("DAYTONA_API_URL", URL), key)
        return cls(endpoint, env.get("RL360_SANDBOX_IMAGE", IMAGE), env.get("DAYTONA_TARGET", ""))

    def _body(self, order: Order) -> dict[str, Any]:
        spec, minutes = order.spec, math.ceil(order.spec.lifetime_s / 60)
        return {
            "name": order.name,
            "buildInfo": {"dockerfileContent": f"FROM {spec.image or self.image}\n"},
            "user": "root",
            "env": dict(spec.env),
            "labels": dict(order.labels),
            "public": False,
            "networkBlockAll": spec.network == "no-network",
            "cpu": math.ceil(spec.limits.cpus),
            "memory": math.ceil(spec.limits.memory_mb / 1024),
            "disk": math.ceil(spec.disk_mb / 1024),
            "autoStopInterval": minutes,
            "autoDeleteInterval": 0,
            "ttlMinutes": minutes,
            **({"target": self.target} if self.target else {}),
        }

    async def start(self, order: Order, deadline_s: float) -> Box:
        until = time.monotonic() + deadline_s
        body = self._body(order)
        found = await self.api.json("POST", "/sandbox", deadline_s, body, repeat=False, try_s=deadline_s)
        ident = text_of(found, "id", "Daytona")
        while found.get("state") != "started":
            if found.get("state") in FAILED:
                raise ServiceError(f"Daytona: sandbox {ident} is {found['state']}: {found.get('errorReason')}")
            await asyncio.sleep(READY_S)
            reply = await known(self.api, "GET", f"/sandbox/{quote(ident)}", until - time.monotonic())
            found = self.api.document(reply)
        url = found.get("toolboxProxyUrl")
        if not url:
            path = f"/sandbox/{quote(ident)}/toolbox-proxy-url"
            reply = await known(self.api, "GET", path, until - time.monotonic())
            url = text_of(self.api.document(reply), "url", "Daytona")
        return Box(ident, order.spec, {"toolbox": f"{str(url).rstrip('/')}/{quote(ident)}"})

    async def _execute(self, box: Box, script: str, deadline_s: float) -> tuple[int, str]:
        """Exit code and output of a script, as root. Encoded: the toolbox splits commands by its own rules."""
        coded = base64.b64encode(script.encode()).decode()
        body = {
            "command": f"bash -c 'exec bash -c \"$(echo {coded} | base64 -d)\" </dev/null'",
            "cwd": "/",
            "timeout": max(1, math.ceil(deadline_s)),
        }
        path = f"{box.ref['toolbox']}/process/execute"
        reply = await known(self.api, "POST", path, deadline_s, body, also=(408,), repeat=False, try_s=deadline_s)
        if reply.status_code == 408:
            raise TimeoutError
        found = self.api.document(reply)
        code, result = (found.get("exitCode"), found.get("result")) if isinstance(found, dict) else (None, None)
        if not isinstance(code, int) or not isinstance(result, str | None):
            raise ServiceError(f"Daytona toolbox: a reply without exitCode and result: {str(found)[:80]}")
        return code, result or ""

    async def run(self, box: Box, command: str, output: Output, deadline_s: float) -> int:
        shell = shlex.join([*AS_NOBODY.split(), *limited(box.spec.limits, command)])
        if command == KILL_ALL:
            code, _ = await self._execute(box, f"{AS_NOBODY} bash -c {shlex.quote(KILL_ALL)}", deadline_s)
            return code
        script = (
            f"out=$(mktemp); ( cd {shlex.quote(box.spec.workdir)} && exec {shell} ) >$out 2>&1; code=$?; "
            f"stat -c %s $out; head -c {output.cap} $out | base64 -w0; rm -f $out; exit $code"
        )
        code, said = await self._execute(box, script, deadline_s)
        size, _, data = said.partition("\n")
        try:
            output.kept += base64.b64decode(data, validate=True)
            output.seen = int(size)
        except ValueError:
            raise ServiceError(f"Daytona toolbox: output of another form: {said[:80]!r}") from None
        if output.seen > FLOOD_BYTES:
            raise Flood
        return code

    async def fill(self, box: Box, parts: list[Part], scratch: IO[bytes], deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        await asyncio.to_thread(pack, parts, scratch, roots=True)

        def files() -> Mapping[str, Any]:
            scratch.seek(0)
            return {"file": ("files.tar", scratch)}

        path = f"{box.ref['toolbox']}/files/upload?path=/root/rl360.tar"
        await self.api.call("POST", path, deadline_s, files=files, try_s=deadline_s)
        script = "tar -x -p -C / -f /root/rl360.tar && rm /root/rl360.tar && command -v setpriv bash base64 stat"
        code, said = await self._execute(box, script, until - time.monotonic())
        if code != 0:
            raise ServiceError(f"Daytona: sandbox {box.ident} cannot be filled ({code}): {said[-200:]}")

    async def quiet(self, box: Box, deadline_s: float) -> None:
        await self._execute(box, f"{AS_NOBODY} bash -c {shlex.quote(KILL_ALL)}; true", deadline_s)

    async def fetch(self, box: Box, path: str, into: IO[bytes], limit_bytes: int, deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        script = f"{packing(path)} | head -c {limit_bytes + TAR_SLACK + 1} >/root/rl360.tar"
        code, said = await self._execute(box, script, deadline_s)
        if code == NO_SUCH_PATH:
            raise Hostile(f"there is no {path}")
        if code != 0:
            raise ServiceError(f"Daytona: {path} cannot be packed ({code}): {said[-200:]}")
        path = f"{box.ref['toolbox']}/files/download?path=/root/rl360.tar"
        await download(self.api, path, into, limit_bytes, until - time.monotonic())

    async def end(self, ident: str, deadline_s: float) -> None:
        await self.api.call("DELETE", f"/sandbox/{quote(ident)}", deadline_s, also=(404, 409))

    async def missing(self, ident: str, deadline_s: float) -> str | None:
        reply = await self.api.call("GET", f"/sandbox/{quote(ident)}", max(0.1, deadline_s), also=(404,))
        if reply.status_code == 404:
            return f"Daytona has no sandbox {ident}"
        found = self.api.document(reply)
        return f"Daytona destroyed sandbox {ident}" if found.get("state") == "destroyed" else None

    async def listed(self, wanted: Mapping[str, str], deadline_s: float) -> list[Lease]:
        until = time.monotonic() + deadline_s
        leases: list[Lease] = []
        params = {"labels": orjson.dumps(dict(wanted)).decode(), "limit": "100"}
        while True:
            page = await self.api.json("GET", "/sandbox", max(0.1, until - time.monotonic()), params=params)
            items: Any = page.get("items") if isinstance(page, dict) else page
            try:
                leases += [Lease(self.kind, str(item["id"]), dict(item.get("labels") or {})) for item in items]
            except (TypeError, KeyError, ValueError):
                raise ServiceError("Daytona: its list of sandboxes has some without id and labels") from None
            cursor = page.get("nextCursor") if isinstance(page, dict) else None
            if not cursor:
                return leases
            params["cursor"] = str(cursor)

    async def close(self) -> None:
        await self.api.close()
