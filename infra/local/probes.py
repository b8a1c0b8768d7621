"""Whether a service works, seen from outside: bounded requests over loopback, with one client for all of them."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from infra.local import proc
from infra.local.plan import Spec
from rl360.config.services import Services

TIMEOUT_S = 5.0
FRESH_S = 90.0


class Prober:
    """Probes of one instance's services; use it as an async context."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self._http = httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False)
        self._bucket_seen = False

    async def __aenter__(self) -> Prober:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def ok(self, spec: Spec, incarnation: str, exit_code: int | None) -> bool:
        """Whether this spec's probe holds now."""
        kind = spec.probe.kind
        if kind == "exit":
            return exit_code == 0
        if kind == "s3":
            return await self._s3(spec.probe.url)
        if kind == "fresh":
            return _fresh(Path(spec.probe.url), incarnation)
        reply = await self._get(spec.probe.url)
        if reply is None or reply.status_code != 200:
            return False
        body = _json(reply)
        if kind == "worker":
            return body.get("status") == "READY"
        return _is_ours(body, incarnation)

    async def _get(self, url: str) -> httpx.Response | None:
        try:
            return await self._http.get(url)
        except httpx.HTTPError:
            return None

    async def _s3(self, url: str) -> bool:
        """Once: our credentials list our bucket. Later: the server answers at all (403 without a signature)."""
        if await self._get(url) is None:
            return False
        if not self._bucket_seen:
            self._bucket_seen = await asyncio.to_thread(self._list_bucket)
        return self._bucket_seen

    def _list_bucket(self) -> bool:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError

        secrets = self.services.secrets()
        client = boto3.client(
            "s3",
            endpoint_url=self.services.s3_endpoint,
            aws_access_key_id=secrets.s3_access_key,
            aws_secret_access_key=secrets.s3_secret_key,
            region_name="us-east-1",
            config=Config(connect_timeout=TIMEOUT_S, read_timeout=TIMEOUT_S, retries={"max_attempts": 0}),
        )
        try:
            client.list_objects_v2(Bucket=self.services.s3_bucket, MaxKeys=1)
        except (BotoCoreError, ClientError):
            return False
        return True

    async def remove_worker(self, engine_url: str, deadline_s: float) -> None:
        """Take an engine out of the gateway and wait until it is not listed. A gateway that is down routes nothing."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + deadline_s
        asked: set[str] = set()
        while loop.time() < give_up_s:
            reply = await self._get(f"{self.services.gateway_url}/workers")
            if reply is None or reply.status_code != 200:
                return
            ids = [row["id"] for row in _json(reply).get("workers", []) if row.get("url") == engine_url]
            if not ids:
                return
            for worker_id in set(ids) - asked:
                asked.add(worker_id)
                try:
                    await self._http.delete(f"{self.services.gateway_url}/workers/{worker_id}")
                except httpx.HTTPError:
                    return
            await asyncio.sleep(0.25)


def _fresh(path: Path, incarnation: str) -> bool:
    """Whether the process we started has written this file a moment ago."""
    try:
        told = json.loads(path.read_text())
        return bool(told["incarnation"] == incarnation and time.time() - float(told["at"]) < FRESH_S)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _is_ours(body: dict[str, Any], incarnation: str) -> bool:
    """Whether the answer comes from the process we started: something else may hold the port. Services without an
    identity (engines, gateway, Prefect) are taken at their word, their ports were free before they started."""
    if body.get("incarnation") == incarnation or not isinstance(body.get("pid"), int):
        return True
    return f"RL360_INCARNATION={incarnation}" in proc.environ(body["pid"])


def _json(reply: httpx.Response) -> dict[str, Any]:
    try:
        body = reply.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
