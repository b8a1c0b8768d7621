"""Real engines behind a real gateway for the push benchmark and the tests that kill engines: a tiny mixture of experts.

`Fleet` has SGLang processes that can be killed and started again at the same URL, and the gateway before them. The
weights come from this process (`SentWeights`), by the transports of the trainer, so that a push carries new weights
without training; the store is a folder of this process alone (`FolderStore`), so that nothing else has to run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from rl360.bench.nursery import Nursery
from rl360.bench.processes import LOOPBACK, free_port
from rl360.config.run import PushConfig
from rl360.config.services import Services
from rl360.engines.processes import ProcessId, alive, end_tree, tree_of_pid
from rl360.errors import Rl360Error
from rl360.weights.messages import ChecksumReply, PushPlan, PushRecord, TransferReport
from rl360.weights.push import push

if TYPE_CHECKING:
    import torch

EXPERTS, LAYERS = 8, 2
READY_S = 420.0  # several engines start on few cores


def write_moe(folder: Path, hidden: int = 64) -> None:
    """A random Qwen3-MoE with the laptop policy's tokenizer; `hidden` decides how much travels."""
    import torch
    from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from rl360.policy.tokenizer import VOCAB_SIZE, save_tokenizer, train_tokenizer

    disable_progress_bar()
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=2048,
        tie_word_embeddings=False,  # SGLang reads no tied head of this family: it would sample from empty memory
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        dtype="bfloat16",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)
    save_tokenizer(train_tokenizer(), folder)


class FolderStore:
    """The part of the object store that pushes need, as files; puts are atomic."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked: Callable[[str], None] | None = None  # told what `exists` is asked for

    def get(self, key: str) -> bytes:
        try:
            return (self.root / key).read_bytes()
        except FileNotFoundError:
            raise KeyError(key) from None

    def _written(self, data: bytes) -> Path:
        self.root.mkdir(parents=True, exist_ok=True)
        path = self.root / f".{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
        path.write_bytes(data)
        return path

    def put(self, key: str, data: bytes) -> None:
        written = self._written(data)
        (self.root / key).parent.mkdir(parents=True, exist_ok=True)
        written.replace(self.root / key)

    def put_once(self, key: str, data: bytes) -> bool:
        written = self._written(data)
        (self.root / key).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(written, self.root / key)
        except FileExistsError:
            return False
        finally:
            written.unlink()
        return True

    def exists(self, key: str) -> bool:
        if self.asked is not None:
            self.asked(key)
        return (self.root / key).exists()

    def list(self, prefix: str) -> list[str]:
        files = (path.relative_to(self.root).as_posix() for path in self.root.rglob("*") if path.is_file())
        return sorted(name for name in files if name.startswith(prefix))


class SentWeights:
    """The engines' model with noise on it. `before` is called with each plan just before it is carried out, `asked`
    when a push asks what it holds, before it touches an engine."""

    def __init__(self, model_dir: Path) -> None:
        import torch
        from safetensors.torch import load_file

        from rl360.weights.transports import Senders

        self.tensors: dict[str, torch.Tensor] = {}
        for path in sorted(model_dir.glob("*.safetensors")):
            self.tensors.update({name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()})
        self.model = dict(self.tensors)
        self.senders = Senders()
        self.before: Callable[[PushPlan], None] | None = None
        self.asked: Callable[[], None] | None = None

    def change(self, seed: int) -> None:
        """Other weights, the same for the same seed. The noise is on the model, not on the weights before: on top of
        much noise a little more changes no answer."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            name: (tensor.float() + 0.1 * torch.randn(tensor.shape, generator=generator)).to(torch.bfloat16)
            for name, tensor in self.model.items()
        }

    def expected(self) -> dict[str, str]:
        from rl360.weights.checksum import expected_checksums

        return expected_checksums(self.tensors)

    async def checksums(self, run: str, version: str, deadline_s: float | None = None) -> ChecksumReply:
        from rl360.weights.checksum import tensor_specs

        if self.asked is not None:
            self.asked()
        specs = tuple(tensor_specs(self.tensors))
        return ChecksumReply(run=run, version=version, tensors=specs, checksums=self.expected())

    async def prepare(self, plan: PushPlan, deadline_s: float | None = None) -> None:
        await asyncio.to_thread(self.senders.prepare, plan, self.tensors)

    async def transfer(self, plan: PushPlan, deadline_s: float | None = None) -> TransferReport:
        if self.before is not None:
            self.before(plan)
        return await asyncio.to_thread(self.senders.transfer, plan, self.tensors)


@dataclass
class EngineProcess:
    """One engine's URL, and whatever process serves it now."""

    port: int
    argv: list[str]
    log: Path
    nursery: Nursery
    process: ProcessId | None = None

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def start(self) -> None:
        self.process = self.nursery.start(self.argv, self.log)

    def wait(self, deadline_s: float = READY_S) -> None:
        until = time.monotonic() + deadline_s
        while not answers(f"{self.url}/server_info"):
            if not self.alive:
                raise Rl360Error(f"engine at {self.url} ended: {self.log.read_text()[-2000:]}")
            if time.monotonic() > until:
                raise Rl360Error(f"engine at {self.url} not ready within {deadline_s:g} s")
            time.sleep(0.25)

    @property
    def alive(self) -> bool:
        return self.process is not None and alive(self.process)

    def strike(self, how: signal.Signals) -> None:
        """SIGKILL, SIGSTOP or SIGCONT to the whole tree."""
        tree = tree_of_pid(self.process.pid) if self.process is not None and self.alive else None
        for member in tree.members if tree else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, how)

    def end(self) -> None:
        if self.process is not None and self.alive:
            asyncio.run(end_tree(tree_of_pid(self.process.pid), 15.0))


@dataclass
class Fleet:
    """`engines` behind `gateway_url`; all processes are this one's children."""

    home: Path
    model_dir: Path
    gateway_url: str
    engines: list[EngineProcess]
    weights: SentWeights
    store: FolderStore
    config: PushConfig
    run: str = "bench"
    step: int = -1
    records: list[PushRecord] = field(default_factory=list)

    @property
    def services(self) -> Services:
        return Services(
            home=str(self.home),
            prefect_api_url="-",
            prefect_ui_url="-",
            s3_endpoint="-",
            s3_bucket="-",
            gateway_url=self.gateway_url,
            engine_urls=[engine.url for engine in self.engines],
            session_urls=["-"],
            sandbox_urls=["-"],
            trainer_url="-",
            model_dir=str(self.model_dir),
        )

    @property
    def version(self) -> str:
        return f"{self.run}:{self.step + 1}"

    def next_push(self) -> tuple[PushRecord, float]:
        """Push other weights as the next version: its record, and seconds."""
        self.step += 1
        self.weights.change(self.step)
        return self.push_again()

    def push_again(self) -> tuple[PushRecord, float]:
        """Push the weights of this step."""
        began = time.monotonic()
        record = asyncio.run(
            push(self.store, self.services, self.run, self.step, self.version, self.weights, self.config)
        )
        took = time.monotonic() - began
        self.records.append(record)
        return record, took

    def usable(self) -> list[str]:
        """URLs that the gateway sends to."""
        rows = httpx.get(f"{self.gateway_url}/workers", timeout=10).json()["workers"]
        return sorted(str(row["url"]).rstrip("/") for row in rows if row["is_healthy"] and row["status"] == "ready")


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def gateway_argv(port: int, prometheus_port: int) -> list[str]:
    program = Path(sys.executable).with_name("smg")
    argv = [str(program), "launch", "--host", LOOPBACK, "--port", str(port), "--policy", "manual"]
    argv += ["--assignment-mode", "min_load", "--prometheus-host", LOOPBACK, "--prometheus-port", str(prometheus_port)]
    argv += ["--disable-tokenizer-autoload", "--enable-rl", "--health-check-endpoint", "/ping"]
    argv += ["--health-check-interval-secs", "2", "--health-failure-threshold", "2", "--health-success-threshold", "1"]
    return [*argv, "--cb-timeout-duration-secs", "5", "--log-level", "warn"]


@contextlib.contextmanager
def fleet(home: Path, count: int = 3, hidden: int = 64, bucket_bytes: int = 1 << 20) -> Iterator[Fleet]:
    """`count` engines that answer, and a gateway that knows none of them yet."""
    model_dir = home / "model"
    write_moe(model_dir, hidden)
    nursery, engines = Nursery(home / "nursery.log"), []
    for number in range(count):
        port = free_port()
        argv = ["--model", str(model_dir), "--port", str(port), "--max-total-tokens", "4096"]
        argv += ["--max-running-requests", "16", "--weights-dir", str(home / f"w{number}")]
        engines.append(EngineProcess(port, argv, home / f"engine-{number}.log", nursery))
    port = free_port()
    with (home / "gateway.log").open("wb") as log:
        gateway = subprocess.Popen(gateway_argv(port, free_port()), stdout=log, stderr=subprocess.STDOUT)
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait()
        config = PushConfig(call_deadline_s=20, bucket_bytes=bucket_bytes)
        weights, store = SentWeights(model_dir), FolderStore(home / "store")
        yield Fleet(home, model_dir, f"http://{LOOPBACK}:{port}", engines, weights, store, config)
        weights.senders.close()
    finally:
        for engine in engines:
            engine.end()
        gateway.terminate()
        gateway.wait(timeout=15)
        nursery.close()


def generate(
    url: str, tokens: int = 8, prompt: tuple[int, ...] = (11, 12, 13, 14, 15, 16), key: str = "", **more: Any
) -> dict[str, Any]:
    """A greedy reply, as it comes; `key` is the session that the gateway routes by."""
    body = {"input_ids": list(prompt), **more}
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    headers = {"X-SMG-Routing-Key": key or os.urandom(8).hex()}
    reply = httpx.post(f"{url}/generate", json=body, timeout=60, headers=headers)
    reply.raise_for_status()
    return dict(reply.json())
