"""Async client of one SGLang engine's control calls. A deadline on every call; nothing is sent that could kill it.

What SGLang does with bad requests is measured (docs/weights.md): an unknown tensor name is accepted in silence and a
wrong shape ends the process, so names, shapes and dtypes are checked against the known tensors before a call leaves.
Errors: `EngineSilent` (no answer: no connection, or past the deadline) and `EngineRefused` (it answered no), both
`ServiceError`. The client holds no state about the engine.
With an `epoch` every call carries it; the engine's door (`rl360.engines.door`) refuses those of an epoch that is over.
"""

from __future__ import annotations

import asyncio
import functools
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import orjson

from rl360.config.services import home_dir, load_services, service_token
from rl360.errors import BadInput, ServiceError

if TYPE_CHECKING:
    from rl360.weights.messages import TensorSpec

PAUSE_MODES = ("abort", "retract", "in_place")
EPOCH_HEADER = "X-RL360-Epoch"
TRICKLE_S = 0.5  # past the deadline of each read: an answer that comes byte by byte never misses that one


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    return httpx.create_ssl_context()


def open_http() -> httpx.AsyncClient:
    """A client for control calls; loading certificates costs more than a push's calls do, so it happens once."""
    return httpx.AsyncClient(verify=_ssl_context())


def deployment_token() -> str | None:
    """The token of the file that RL360_TOKEN_FILE names, else that of the home; None when there is neither."""
    home = home_dir()
    if os.environ.get("RL360_TOKEN_FILE") or (home / "token").exists():
        return service_token()
    return load_services(home).secrets().token if (home / "secrets.json").exists() else None


class EngineSilent(ServiceError):
    """No answer. `connected`: a connection was made, so something lives there but is stuck."""

    def __init__(self, message: str, connected: bool = False) -> None:
        super().__init__(message)
        self.connected = connected


class EngineRefused(ServiceError):
    """It answered, and the answer is no."""

    def __init__(self, message: str, status: int = 200) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Pulled:
    """A version's files that an engine's host has fetched, checked and applied: the directory to load from there."""

    dir: str
    bytes: int
    seconds: float


def check_tensors(tensors: Sequence[TensorSpec], known: Mapping[str, TensorSpec]) -> None:
    """Refuse what an engine would swallow or die of: unknown names, other shapes, other dtypes, repeats."""
    if not tensors:
        raise BadInput("update without tensors: name at least one")
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise BadInput(f"tensor {repeated} is named twice in one update")
    for tensor in tensors:
        expected = known.get(tensor.name)
        if expected is None:
            raise BadInput(f"tensor {tensor.name} is not one of the model's {len(known)}; the engine would ignore it")
        if tuple(tensor.shape) != tuple(expected.shape) or tensor.dtype != expected.dtype:
            raise BadInput(
                f"tensor {tensor.name} is {tensor.dtype}{list(tensor.shape)}, the model has "
                f"{expected.dtype}{list(expected.shape)}; the engine would die of it"
            )


class EngineClient:
    """Control calls to one engine. `deadline_s` of a call defaults to the client's. `token`: of this deployment, shown
    at the door of every engine that is not `external`, which somebody else started."""

    def __init__(
        self,
        url: str,
        http: httpx.AsyncClient,
        deadline_s: float,
        epoch: int | None = None,
        token: str | None = None,
        external: bool = False,
    ) -> None:
        self.url = url.rstrip("/")
        self.deadline_s = deadline_s
        self.epoch = epoch
        self.external, self.token = external, None if external else token
        self._http = http
        self._headers = {"content-type": "application/json"}
        if epoch is not None:
            self._headers[EPOCH_HEADER] = str(epoch)
        if self.token is not None:
            self._headers["authorization"] = f"Bearer {self.token}"

    async def _call(self, method: str, path: str, body: Any = None, deadline_s: float | None = None) -> httpx.Response:
        deadline = self.deadline_s if deadline_s is None else deadline_s
        # httpx limits each phase, not the sum: connecting gets its own short limit so that it can be told apart
        timeout = httpx.Timeout(deadline, connect=min(deadline, 5.0))
        try:
            content = None if body is None else orjson.dumps(body)
            async with asyncio.timeout(deadline + TRICKLE_S):
                reply = await self._http.request(
                    method, self.url + path, content=content, headers=self._headers, timeout=timeout
                )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise EngineSilent(f"engine {self.url}{path}: no connection ({type(error).__name__})", False) from None
        except (httpx.TimeoutException, TimeoutError):
            raise EngineSilent(f"engine {self.url}{path}: no answer within {deadline:g} s", True) from None
        except httpx.HTTPError as error:
            raise EngineSilent(f"engine {self.url}{path}: connection lost ({type(error).__name__})", False) from None
        if reply.status_code >= 400:
            raise EngineRefused(
                f"engine {self.url}{path}: answered {reply.status_code}: {reply.text[:300].strip()}", reply.status_code
            )
        return reply

    async def _ask(self, method: str, path: str, body: Any = None, deadline_s: float | None = None) -> dict[str, Any]:
        reply = await self._call(method, path, body, deadline_s)
        try:
            value = orjson.loads(reply.content)
        except orjson.JSONDecodeError:
            raise EngineRefused(f"engine {self.url}{path}: reply is not JSON: {reply.text[:80]!r}") from None
        if not isinstance(value, dict):
            raise EngineRefused(f"engine {self.url}{path}: reply is a {type(value).__name__}, expected an object")
        if value.get("success") is False:
            raise EngineRefused(f"engine {self.url}{path}: {value.get('message', 'success=false')}")
        return value

    async def ping(self, deadline_s: float | None = None) -> None:
        """Liveness; true while paused too (`/health` is not: it generates)."""
        await self._call("GET", "/ping", deadline_s=deadline_s)

    async def model_info(self, deadline_s: float | None = None) -> dict[str, Any]:
        return await self._ask("GET", "/model_info", deadline_s=deadline_s)

    async def server_info(self, deadline_s: float | None = None) -> dict[str, Any]:
        """Start-up facts and live state; goes through the scheduler."""
        return await self._ask("GET", "/server_info", deadline_s=deadline_s)

    async def weight_version(self, deadline_s: float | None = None) -> str:
        return str((await self.model_info(deadline_s)).get("weight_version"))

    async def set_weight_version(self, version: str, deadline_s: float | None = None) -> None:
        """Rename the weights it holds; running requests go on and report both names in their spans."""
        body = {"new_version": version, "abort_all_requests": False}
        await self._ask("POST", "/update_weight_version", body, deadline_s)

    async def pause(self, mode: str, deadline_s: float | None = None) -> None:
        if mode not in PAUSE_MODES:
            raise BadInput(f"pause mode {mode!r}: use one of {', '.join(PAUSE_MODES)}")
        await self._ask("POST", "/pause_generation", {"mode": mode}, deadline_s)

    async def resume(self, deadline_s: float | None = None) -> None:
        await self._ask("POST", "/continue_generation", {}, deadline_s)

    async def flush_cache(self, deadline_s: float | None = None) -> None:
        """Drop the KV cache the old weights made; refused while requests run."""
        await self._call("POST", "/flush_cache", deadline_s=deadline_s)

    async def abort_all(self, deadline_s: float | None = None) -> None:
        await self._call("POST", "/abort_request", {"abort_all": True}, deadline_s)

    async def begin_weight_update(self, deadline_s: float | None = None) -> None:
        await self._ask("POST", "/begin_weight_update", {}, deadline_s)

    async def end_weight_update(self, deadline_s: float | None = None) -> None:
        await self._ask("POST", "/end_weight_update", {}, deadline_s)

    async def init_group(
        self, name: str, *, address: str, port: int, rank: int, world_size: int, backend: str, deadline_s: float
    ) -> None:
        """Join a process group as `rank`; answers once every member joined."""
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        await self._ask("POST", "/init_weights_update_group", body, deadline_s)

    async def destroy_group(self, name: str, deadline_s: float | None = None) -> bool:
        """Leave a process group. False when the engine isn't in it, which is as good."""
        try:
            await self._ask("POST", "/destroy_weights_update_group", {"group_name": name}, deadline_s)
        except EngineRefused as error:
            if "does not exist" in str(error):
                return False
            raise
        return True

    async def update_from_distributed(
        self, tensors: Sequence[TensorSpec], known: Mapping[str, TensorSpec], group: str, deadline_s: float
    ) -> None:
        """Receive these tensors, back to back in one broadcast from rank 0, and load them. Never sets the version."""
        check_tensors(tensors, known)
        body = {
            "names": [tensor.name for tensor in tensors],
            "dtypes": [tensor.dtype for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": group,
            "flush_cache": False,
            "load_format": "flattened_bucket",
        }
        await self._ask("POST", "/update_weights_from_distributed", body, deadline_s)

    async def update_from_tensor(
        self, tensors: Sequence[TensorSpec], known: Mapping[str, TensorSpec], handle: str, deadline_s: float
    ) -> None:
        """Load these tensors from memory of this host. `handle`: what SGLang unpickles into them, base64."""
        check_tensors(tensors, known)
        body = {"serialized_named_tensors": [handle], "flush_cache": False}
        await self._ask("POST", "/update_weights_from_tensor", body, deadline_s)

    async def transfer_engine(self, rank: int, deadline_s: float) -> Any:
        """[session, {parameter: [address, elements, bytes an element]}] of an engine rank that others may write."""
        reply = await self._ask("GET", f"/remote_instance_transfer_engine_info?rank={rank}", None, deadline_s)
        return reply.get("remote_instance_transfer_engine_info")

    async def update_from_disk(self, folder: str, deadline_s: float | None = None) -> None:
        """Load a directory on its host. The engine keeps what it calls its weights."""
        body = {"model_path": folder, "flush_cache": False}
        await self._ask("POST", "/update_weights_from_disk", body, deadline_s)

    async def door(self, deadline_s: float | None = None) -> dict[str, Any] | None:
        """`epoch`, `admitted_version`, `incarnation`, `started_at` and more of its door; None: it has no door."""
        return await self._at_door("GET", "/rl360/door", None, deadline_s)

    async def admit(self, version: str, deadline_s: float | None = None) -> bool:
        """Let it generate: this epoch's push confirmed `version`. False: it has no door."""
        body = {"epoch": self._epoch_for("admit"), "version": version}
        return await self._at_door("POST", "/rl360/admit", body, deadline_s) is not None

    async def bar(self, reason: str, deadline_s: float | None = None) -> bool:
        """Let it generate nothing that it has not begun, until it is admitted. False: it has no door."""
        body = {"epoch": self._epoch_for("bar"), "reason": reason}
        return await self._at_door("POST", "/rl360/bar", body, deadline_s) is not None

    async def pull(self, folder: str, version: str, base_version: str | None, deadline_s: float) -> Pulled | None:
        """Have its host fetch a version's files and apply them to the base it holds; it serves meanwhile. None: it has
        no door. `EngineRefused` with status 409: it does not hold that base."""
        body = {"folder": folder, "version": version, "base_version": base_version}
        reply = await self._at_door("POST", "/rl360/pull", body | {"epoch": self._epoch_for("pull")}, deadline_s)
        if reply is None:
            return None
        try:
            return Pulled(str(reply["dir"]), int(reply["bytes"]), float(reply["seconds"]))
        except (KeyError, TypeError, ValueError):
            raise EngineRefused(f"engine {self.url}/rl360/pull: unexpected reply {str(reply)[:200]}") from None

    def _epoch_for(self, what: str) -> int:
        if self.epoch is None:
            raise BadInput(f"engine {self.url}: {what} is an act of a push, give the client its epoch")
        return self.epoch

    async def _at_door(self, method: str, path: str, body: Any, deadline_s: float | None) -> dict[str, Any] | None:
        try:
            return await self._ask(method, path, body, deadline_s)
        except EngineRefused as error:
            if error.status == 404:
                return None
            raise

    async def checksums(self, deadline_s: float | None = None) -> dict[str, str]:
        """Checksum of every parameter it holds, by the engine's own names."""
        path = "/weights_checker"
        reply = await self._ask("POST", path, {"action": "checksum"}, deadline_s)
        ranks = reply.get("ranks")
        if not isinstance(ranks, list) or not ranks or not isinstance(ranks[0].get("checksums"), dict):
            raise EngineRefused(f"engine {self.url}{path}: reply has no ranks[0].checksums")
        if len(ranks) != 1:
            raise EngineRefused(
                f"engine {self.url}{path}: {len(ranks)} tensor-parallel ranks; checksums of sharded engines can't be "
                "compared with the trainer's, use --tp 1"
            )
        return {str(name): str(value) for name, value in ranks[0]["checksums"].items()}
