"""Ledgers through a real S3: written once, read back, listed, and refused when missing, corrupt or unreachable.

Starts a SeaweedFS of its own: it is cheap, and this needs nothing else.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from rl360.config.run import RunConfig
from rl360.errors import BadInput, CorruptObject, StoreUnavailable
from rl360.ledger.read import list_runs, read_run, read_step
from rl360.ledger.step import write_ledger
from rl360.report.page import render_run
from rl360.store.layout import run_config_key, step_key
from rl360.store.manifest import Manifest, commit_manifest
from rl360.store.object_store import ObjectStore
from tests.unit.ledger_data import made_up_run

pytestmark = pytest.mark.contract
KEYS = ("ledger-test", "ledger-test-secret")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    folder: Path = tmp_path_factory.mktemp("s3")
    s3, master, volume, filer, admin = free_ports(5)
    command = [
        str(Path(sys.executable).parent / "weed"),
        "mini",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-s3.port={s3}",
        f"-master.port={master}",
        f"-volume.port={volume}",
        f"-filer.port={filer}",
        f"-admin.port={admin}",
        "-webdav=false",
        "-bucket=ledgers",
    ]
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": KEYS[0], "AWS_SECRET_ACCESS_KEY": KEYS[1]}
    with (folder / "weed.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
    opened = ObjectStore(f"http://127.0.0.1:{s3}", "ledgers", *KEYS, timeout_s=5)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                opened.list("")
                break
            except (StoreUnavailable, KeyError):
                assert process.poll() is None, (folder / "weed.log").read_text()[-2000:]
                assert time.monotonic() < deadline, "SeaweedFS did not answer within 60 s"
                time.sleep(0.2)
        yield opened
    finally:
        process.terminate()
        process.wait(timeout=20)


def test_ledgers_through_the_store(store: ObjectStore, tmp_path: Path) -> None:
    ledgers = made_up_run(4, groups=4, size=4)
    for run, steps in (("demo", 4), ("another", 9)):
        store.put_once(run_config_key(run), RunConfig(run=run, steps=steps).to_json())
    assert [(entry["run"], entry["state"]) for entry in list_runs(store)] == [("another", "new"), ("demo", "new")]
    commit_manifest(store, Manifest(run="demo", step=0, task="sample_groups", started_at=123.0))
    for ledger in ledgers:
        first = write_ledger(store, ledger)
        assert write_ledger(store, ledger) == first

    assert read_run(store, "demo") == ledgers
    assert read_step(store, "demo", 2) == ledgers[2]
    assert read_run(store, "another") == []
    listed = list_runs(store)
    assert orjson.loads(orjson.dumps(listed)) == listed
    assert listed[0] == {"run": "demo", "steps": 4, "state": "done", "target_steps": 4, "started_at": 123.0}
    assert render_run(read_run(store, "demo"), tmp_path).html.exists()

    with pytest.raises(BadInput, match="no run 'nope' in the store; known runs: another, demo"):
        read_run(store, "nope")
    with pytest.raises(BadInput, match="run demo has no ledger for step 9; steps 0 to 3 have one"):
        read_step(store, "demo", 9)
    with pytest.raises(BadInput, match="use 2 to 41 of a-z"):
        read_run(store, "../etc")

    key = step_key("demo", 3, "ledger.msgpack")
    whole = store.get(key)
    for broken in (whole[: len(whole) // 2], b"\xc1", b"", store.get(step_key("demo", 2, "ledger.msgpack"))):
        store.put(key, broken)
        with pytest.raises(CorruptObject, match=f"object {key}: "):
            read_run(store, "demo")


def test_no_store_is_one_clear_line() -> None:
    nowhere = ObjectStore(f"http://127.0.0.1:{free_ports(1)[0]}", "ledgers", *KEYS, timeout_s=2)
    with pytest.raises(StoreUnavailable, match=r"did not answer while asked to look up ledgers/demo/config.json"):
        read_run(nowhere, "demo")
