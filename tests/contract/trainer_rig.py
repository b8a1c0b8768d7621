"""A real trainer (torchrun) over a real SeaweedFS, and a wire between them where a test can cut or kill.

The wire forwards bytes. A test arms it for the moment when the trainer sends or gets a certain object: then a chosen
action runs (for example SIGKILL), and the connection is dropped or goes on.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from rl360.config.run import RunConfig
from rl360.store.layout import run_config_key
from rl360.store.object_store import ObjectStore
from tests.unit.training_data import put_batch, samples_of, write_model

REPO = Path(__file__).parents[2]
KEYS = ("trainer-test", "trainer-test-secret")
TOKEN = "trainer-test-token-0123456789"
READY_S = 240.0  # importing torch and megatron takes 15-30 s on an idle machine


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@dataclass
class Trap:
    """When a request line matches: `action` before it is sent on, or (`on_reply`) before its reply is sent back."""

    pattern: re.Pattern[bytes]
    action: Callable[[], None]
    on_reply: bool = False
    drop: bool = True
    times: int = 1


@dataclass
class Wire:
    """A TCP forwarder from a port of its own to `target`."""

    target: int
    trap: Trap | None = None
    sprung: int = 0
    _server: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))

    def __post_init__(self) -> None:
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        upstream = socket.create_connection(("127.0.0.1", self.target))
        replies = threading.Event()  # set while the trap waits for the reply of the request that matched

        def back() -> None:
            try:
                while data := upstream.recv(65536):
                    trap = self.trap
                    if replies.is_set() and trap is not None and not data.startswith(b"HTTP/1.1 100"):
                        replies.clear()
                        if self._spring(trap):
                            break
                    client.sendall(data)
            except OSError:
                pass
            finally:
                client.close()

        threading.Thread(target=back, daemon=True).start()
        try:
            while data := client.recv(65536):
                trap = self.trap
                if trap is not None and trap.pattern.match(data):
                    if trap.on_reply:
                        replies.set()
                    elif self._spring(trap):
                        break
                upstream.sendall(data)
        except OSError:
            pass
        finally:
            for end in (upstream, client):
                end.close()

    def _spring(self, trap: Trap) -> bool:
        """Run the action; True when the connection is to be dropped."""
        self.sprung += 1
        if self.sprung >= trap.times:
            self.trap = None
        trap.action()
        return trap.drop


class Rig:
    """Everything up; `close` ends what was started."""

    def __init__(self, folder: Path, ranks: int = 1, experts: int = 0, options: tuple[str, ...] = ()) -> None:
        self.folder, self.ranks, self.options = folder, ranks, options
        self.model = write_model(folder / "model", experts=experts)
        s3, master, volume, filer, admin = free_ports(5)
        environment = {**os.environ, "AWS_ACCESS_KEY_ID": KEYS[0], "AWS_SECRET_ACCESS_KEY": KEYS[1]}
        (folder / "s3").mkdir()
        command = [str(Path(sys.executable).parent / "weed"), "mini", f"-dir={folder / 's3'}", "-ip=127.0.0.1"]
        command += ["-ip.bind=127.0.0.1", f"-s3.port={s3}", f"-master.port={master}", f"-volume.port={volume}"]
        command += [f"-filer.port={filer}", f"-admin.port={admin}", "-webdav=false", "-bucket=rl360"]
        with (folder / "weed.log").open("wb") as log:
            self.weed = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
        self.trainer: subprocess.Popen[bytes] | None = None
        self.wire = Wire(s3)
        self.store = ObjectStore(f"http://127.0.0.1:{s3}", "rl360", *KEYS)
        self.port, self.rendezvous = free_ports(2)
        self.url = f"http://127.0.0.1:{self.port}"
        self._write_home()
        try:
            self._wait_for_bucket()
            self.start()
        except BaseException:  # whatever ended the start, nothing of it may stay behind
            self.close()
            raise

    def _wait_for_bucket(self) -> None:
        until = time.monotonic() + 60
        while True:
            try:
                if self.store.put_once("ready", b"1") or self.store.exists("ready"):
                    return
            except Exception:  # it is starting: refused connections, missing bucket
                if time.monotonic() > until:
                    raise
            time.sleep(0.3)

    def _write_home(self) -> None:
        url = "http://127.0.0.1:9"
        services = {
            "home": str(self.folder),
            "prefect_api_url": url,
            "prefect_ui_url": url,
            "s3_endpoint": f"http://127.0.0.1:{self.wire.port}",
            "s3_bucket": "rl360",
            "gateway_url": url,
            "engine_urls": [url],
            "session_urls": [url],
            "sandbox_urls": [url],
            "trainer_url": self.url,
            "model_dir": str(self.model),
        }
        (self.folder / "services.json").write_text(json.dumps(services))
        secrets = {"token": TOKEN, "s3_access_key": KEYS[0], "s3_secret_key": KEYS[1]}
        for name, text in (("secrets.json", json.dumps(secrets)), ("token", TOKEN)):
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o600)

    def start(self) -> None:
        """Start torchrun and wait until the trainer answers."""
        environment = {
            **os.environ,
            "RL360_HOME": str(self.folder),
            "RL360_TOKEN_FILE": str(self.folder / "token"),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(REPO),
        }
        command = [sys.executable, "-m", "rl360.training.torchrun", "--nnodes", "1", "--max-restarts", "0"]
        command += ["--nproc-per-node", str(self.ranks), "--master-addr", "127.0.0.1"]
        command += ["--master-port", str(self.rendezvous), "-m", "rl360.training.service", "--port", str(self.port)]
        command += self.options
        with (self.folder / "trainer.log").open("ab") as log:
            self.trainer = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            assert self.trainer.poll() is None, (self.folder / "trainer.log").read_text()[-3000:]
            try:
                if httpx.get(self.url + "/health", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.3)
        raise AssertionError(f"trainer not ready in {READY_S} s")

    def kill(self) -> None:
        """SIGKILL to torchrun alone: its ranks must follow by themselves."""
        assert self.trainer is not None
        pid = int(httpx.get(self.url + "/health", timeout=5).json()["pid"]) if self.trainer.poll() is None else 0
        self.trainer.send_signal(signal.SIGKILL)
        self.trainer.wait(10)
        until = time.monotonic() + 10
        while pid and Path(f"/proc/{pid}").exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert not pid or not Path(f"/proc/{pid}").exists(), "a rank outlived torchrun"

    def kill_rank(self) -> None:
        """SIGKILL to the process that trains and answers, from inside a request of it."""
        assert self.trainer is not None
        children = Path(f"/proc/{self.trainer.pid}/task/{self.trainer.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)

    def restart(self) -> None:
        assert self.trainer is not None
        if self.trainer.poll() is None:
            self.trainer.send_signal(signal.SIGKILL)
        self.trainer.wait(30)
        self.start()

    def close(self) -> None:
        self.wire.close()
        for process in (self.trainer, self.weed):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait(10)

    # -- requests -----------------------------------------------------------------------------------------------

    def ask(self, method: str, path: str, body: Any = None, token: str = TOKEN) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.request(method, self.url + path, json=body, headers=headers, timeout=120)

    def new_run(self, run: str, **config: Any) -> str:
        found = RunConfig.parse({"run": run, "model": {"path": str(self.model)}, "trainer": {"lr": 1e-3}} | config)
        self.store.put_once(run_config_key(run), found.to_json())
        return run

    def put_batch(self, run: str, step: int, samples: list[dict[str, Any]] | None = None) -> dict[str, str]:
        """Store a batch and its samples and return the body that asks for its step."""
        return put_batch(self.store, run, step, samples_of(step) if samples is None else samples)

    def train(self, run: str, step: int, samples: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        reply = self.ask("PUT", f"/steps/{step}", self.put_batch(run, step, samples))
        assert reply.status_code == 200, reply.text
        return reply.json()

    def state(self, run: str) -> dict[str, Any]:
        reply = self.ask("GET", f"/runs/{run}")
        assert reply.status_code == 200, reply.text
        return reply.json()
