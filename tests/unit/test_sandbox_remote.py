"""Sandboxes that a system does not let go of: tried again until proven gone, and nothing else counts as proof."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rl360.harbor.protocol import SandboxLimits
from rl360.http_api import NoAnswer, Refused
from rl360.sandboxes.leases import Lease
from rl360.sandboxes.provider import SandboxSpec, SandboxStartError, Workspace
from rl360.sandboxes.providers import remote
from rl360.sandboxes.providers.remote import Box, RemoteProvider


class Scripted:
    """A system with at most one sandbox. `ends`: how many askings for its end it leaves without an answer."""

    kind, image = "scripted", "i"

    def __init__(self, ends: int = 0, start: Exception | None = None, fill: BaseException | None = None) -> None:
        self.ends, self.failing_start, self.failing_fill = ends, start, fill
        self.there, self.listable = False, True

    async def start(self, order: Any, deadline_s: float) -> Box:
        if self.failing_start is not None:
            raise self.failing_start
        self.there = True
        return Box("one", order.spec)

    async def fill(self, *_: Any) -> None:
        if self.failing_fill is not None:
            raise self.failing_fill

    async def end(self, ident: str, deadline_s: float) -> None:
        self.ends -= 1
        if self.ends >= 0:
            raise NoAnswer("scripted")
        self.there = False

    async def missing(self, ident: str, deadline_s: float) -> str | None:
        return None if self.there else "none here"

    async def listed(self, wanted: Any, deadline_s: float) -> list[Lease]:
        return [Lease(self.kind, "one", dict(wanted))] if self.there and self.listable else []

    async def close(self) -> None:
        pass


@pytest.fixture
def spec(tmp_path: Path) -> SandboxSpec:
    workspace = Workspace(tmp_path / "w")
    workspace.files.mkdir(parents=True)
    return SandboxSpec("demo/one", {}, SandboxLimits(), workspace, start_timeout_s=1.0)


def provided(daemon: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RemoteProvider:
    monkeypatch.setattr(remote, "WATCH_S", 0.001)
    return RemoteProvider(daemon, tmp_path / "root", "tests")  # type: ignore[arg-type]


async def settled(provider: RemoteProvider) -> None:
    async with asyncio.timeout(2):
        while provider.held:
            await asyncio.wait(list(provider._watches.values()))


def test_a_stop_without_proof_is_tried_again(
    spec: SandboxSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        daemon = Scripted(ends=3)
        provider = provided(daemon, tmp_path, monkeypatch)
        sandbox = await provider.create(spec)
        assert not (await sandbox.stop()).confirmed and len(provider.held) == 1
        assert not (await sandbox.stop()).confirmed  # no second watch
        await settled(provider)
        assert not daemon.there and (await sandbox.stop()).confirmed
        await provider.aclose()

    asyncio.run(go())


def test_one_that_cannot_be_filled_is_ended_though_no_list_has_it(
    spec: SandboxSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        daemon = Scripted(fill=Refused("scripted", 403))
        daemon.listable = False
        provider = provided(daemon, tmp_path, monkeypatch)
        with pytest.raises(SandboxStartError) as caught:
            await provider.create(spec)
        assert caught.value.proof is not None and caught.value.proof.confirmed and not daemon.there
        await provider.aclose()

    asyncio.run(go())


@pytest.mark.parametrize(("status", "proven"), [(403, True), (429, True), (503, False)])
def test_only_an_own_word_of_the_system_proves_that_nothing_was_made(
    spec: SandboxSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, proven: bool
) -> None:
    async def go() -> None:
        provider = provided(Scripted(start=Refused("scripted", status)), tmp_path, monkeypatch)
        with pytest.raises(SandboxStartError) as caught:
            await provider.create(spec)
        assert caught.value.refused and caught.value.proof is not None and caught.value.proof.confirmed is proven
        await provider.aclose()

    asyncio.run(go())


def test_a_start_that_is_cancelled_says_how_it_ended(
    spec: SandboxSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        provider = provided(Scripted(ends=1, fill=asyncio.CancelledError()), tmp_path, monkeypatch)
        with pytest.raises(asyncio.CancelledError):
            await provider.create(spec)
        assert [proof.confirmed for proof in spec.stops] == [False]
        await settled(provider)
        await provider.aclose()

    asyncio.run(go())


@pytest.mark.parametrize("ends", [0, 1])
def test_a_start_that_is_cancelled_leaves_its_proof(
    spec: SandboxSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: int
) -> None:
    async def go() -> None:
        provider = provided(Scripted(ends=ends, fill=asyncio.CancelledError()), tmp_path, monkeypatch)
        with pytest.raises(asyncio.CancelledError):
            await provider.create(spec)
        assert [proof.confirmed for proof in spec.stops] == [ends == 0]
        await settled(provider)
        await provider.aclose()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ("manifest for denied/rate:1 not found: manifest unknown: manifest unknown", 404),
        ("pull access denied for denied/rate, repository does not exist or may require 'docker login'", 404),
        ("Head https://registry/v2/x/manifests/1: unauthorized: authentication required", 404),
        ("unexpected status from HEAD request to https://registry/v2/x: 403 Forbidden", 404),
        ("no matching manifest for linux/arm64/v8 in the manifest list entries", 404),
        ("toomanyrequests: You have reached your unauthenticated pull rate limit", 429),
        ("denied: pull rate exceeded", 429),
        ("unexpected status from HEAD request to https://registry/v2/denied/rate:1: 503 Service Unavailable", 429),
        ("failed to do request: dial tcp: lookup registry on 10.0.0.10:53: i/o timeout", 429),
        ('Back-off pulling image "denied/rate:1"', 429),
    ],
)
def test_what_a_failed_pull_counts_as(said: str, status: int) -> None:
    assert remote.pull_status(said, "denied/rate:1") == status
