"""Fake engines that take weights for real: members of gloo groups, bytes kept by tensor name.

They join groups and receive as SGLang does (same store, same prefixes, one flat broadcast a call), so that the sender's
side is tested with real sockets. What they hold is compared with what was sent.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rl360.engines.fleet import EngineIdentity
from rl360.weights.messages import EngineSet
from tests.unit.fake_engines import FakeEngine

MEET_S = 20.0


@dataclass
class GlooEngine(FakeEngine):
    """`held`: tensor name -> bytes. `seen`: how often each path was called."""

    held: dict[str, bytes] = field(default_factory=dict)
    members: dict[str, Any] = field(default_factory=dict)
    incarnation: str = "a"
    taken_at: float = 0.0  # when it last took weights, monotonic

    @property
    def seen(self) -> Counter[str]:
        return Counter(path for path, _ in self.calls)

    def identity(self) -> EngineIdentity:
        return EngineIdentity(url=self.url, incarnation=self.incarnation)

    def close(self) -> None:
        for member in self.members.values():
            member.abort()
        super().close()

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.faults.get(path) or self.faults.get("*"):
            return super().answer(method, path, body)
        try:
            if path == "/init_weights_update_group":
                self._join(body)
                self.groups.add(body["group_name"])
            elif path == "/destroy_weights_update_group" and body["group_name"] in self.members:
                self.members.pop(body["group_name"]).abort()
            elif path == "/update_weights_from_distributed":
                if not self.session:
                    return 400, {"success": False, "message": "must run between begin and end"}
                self._receive(body)
        except RuntimeError as error:
            self.calls.append((path, body))
            return 400, {"success": False, "message": f"Failed to receive weights: {error}"}
        return super().answer(method, path, body)

    def _join(self, body: dict[str, Any]) -> None:
        name = body["group_name"]
        if name in self.members:
            raise RuntimeError(f"the group {name} exists already")
        patience = timedelta(seconds=MEET_S)
        store = dist.TCPStore(body["master_address"], body["master_port"], None, is_master=False, timeout=patience)
        prefixed = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        self.members[name] = dist.ProcessGroupGloo(prefixed, body["rank_offset"], body["world_size"], patience)

    def _receive(self, body: dict[str, Any]) -> None:
        sizes = [torch.Size(shape).numel() * getattr(torch, dtype).itemsize
                 for shape, dtype in zip(body["shapes"], body["dtypes"], strict=True)]  # fmt: skip
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self.members[body["group_name"]].broadcast([flat], options).wait()
        for name, part in zip(body["names"], flat.split(sizes), strict=True):
            self.held[name] = part.numpy().tobytes()
        self.taken_at = time.monotonic()


def engine_set(engines: list[GlooEngine], epoch: int = 1) -> EngineSet:
    return EngineSet(epoch=epoch, engines=tuple(engine.identity() for engine in engines))


def bytes_of(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def moe_tensors(seed: int = 0, experts: int = 4, layers: int = 2) -> dict[str, torch.Tensor]:
    """Hugging Face tensors of a small mixture of experts, as they travel."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": random(32, 8), "model.norm.weight": random(8)}
    for layer in range(layers):
        head = f"model.layers.{layer}."
        for part in ("q", "k", "v"):
            tensors[f"{head}self_attn.{part}_proj.weight"] = random(8, 8)
        tensors[f"{head}mlp.gate.weight"] = random(experts, 8)
        for expert in range(experts):
            for part, shape in (("gate", (6, 8)), ("up", (6, 8)), ("down", (8, 6))):
                tensors[f"{head}mlp.experts.{expert}.{part}_proj.weight"] = random(*shape)
    return tensors


def run_beside(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
