"""Real doors in a process of their own, on all addresses of this host, in front of fake engines that take weights.

`python -m tests.contract.far_door FOLDER PORT...` serves one strict door a port, by uvicorn as SGLang serves its app,
with the token of RL360_TOKEN_FILE. `GET /test/seen`, which passes no door, tells what came through it.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pybase64
import torch
import uvicorn

from rl360.engines.client import deployment_token
from rl360.engines.door import Door, Doorkeeper
from rl360.engines.pull import Puller
from rl360.weights.delta import open_tensors
from tests.unit.gloo_engines import GlooEngine


@dataclass
class FarEngine(GlooEngine):
    """Takes weights by every call that carries them."""

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/update_weights_from_disk":
            self.held = {name: held.data.tobytes() for name, held in open_tensors(Path(body["model_path"])).items()}
        elif path == "/update_weights_from_tensor":
            for name, tensor in pickle.loads(pybase64.b64decode(body["serialized_named_tensors"][0])):
                self.held[name] = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        elif path == "/generate":
            self.calls.append((path, body))
            return 200, {"output_ids": [7], "meta_info": {"weight_version": self.version}}
        return super().answer(method, path, body)

    def told(self) -> dict[str, Any]:
        return {
            "calls": [path for path, _ in self.calls],
            "held": {name: sha256(data).hexdigest() for name, data in sorted(self.held.items())},
            "groups": sorted(self.groups),
        }


class App:
    """What stands behind the door, and beside it `/test/seen`."""

    def __init__(self, engine: FarEngine, keeper: Doorkeeper) -> None:
        self.engine, self.door = engine, Door(self.behind, keeper)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/test/seen":
            await _answer(send, 200, self.engine.told())
        else:
            await self.door(scope, receive, send)

    async def behind(self, scope: Any, receive: Any, send: Any) -> None:
        data, more = b"", True
        while more:
            message = await receive()
            data, more = data + message.get("body", b""), message.get("more_body", False)
        body = json.loads(data or b"{}")
        await _answer(send, *await asyncio.to_thread(self.engine.answer, scope["method"], scope["path"], body))


async def _answer(send: Any, status: int, value: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(value).encode()})


async def serve(folder: Path, ports: list[int]) -> None:
    servers = []
    for port in ports:
        engine = FarEngine()
        keeper = Doorkeeper(Puller(folder / str(port), folder / "model"), strict=True, token=deployment_token())
        config = uvicorn.Config(App(engine, keeper), host="0.0.0.0", port=port, lifespan="off", log_level="info")
        servers.append((uvicorn.Server(config), engine))
    try:
        await asyncio.gather(*(server.serve() for server, _ in servers))
    finally:
        for _, engine in servers:
            engine.close()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), [int(port) for port in sys.argv[2:]]))
