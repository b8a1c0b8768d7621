"""Harbor's process: `python -m rl360.harbor.real.worker` in its Python 3.12. One connection, one trial.

Standard input is a socket: each message on it brings the descriptor of a connection. A connection brings an order (one
JSON line), then answers to the environment's requests; what goes back are those requests and at last `{"end": ...}`.
It closes when the trial is cancelled. The process ends when standard input does, so none outlives who started it.
Harbor's agents, their factory and its environment class are used; its trial and its verifier are not: a verdict is
rl360's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

from harbor.agents.factory import AgentFactory
from harbor.models.agent.context import AgentContext
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.config import AgentConfig
from harbor.models.trial.paths import TrialPaths

from rl360.harbor.real.sandbox import LINE_BYTES, AttemptEnvironment, Channel


async def trial(order: dict[str, Any], channel: Channel, scratch: Path) -> None:
    """Set the agent up and let it run; whatever it raises is its own."""
    folder = Path(tempfile.mkdtemp(prefix="trial-", dir=scratch))
    try:
        paths = TrialPaths(trial_dir=folder / "trial")
        paths.mkdir()
        environment = AttemptEnvironment(
            environment_dir=folder,
            environment_name="attempt",
            session_id=folder.name,
            trial_paths=paths,
            task_env_config=EnvironmentConfig(),
            network_policy=NetworkPolicy(network_mode=NetworkMode.NO_NETWORK),
            persistent_env=order["env"],
            channel=channel,
        )
        named = {"name": order["agent"], "model_name": order["model"], "base_url": order["base_url"]}
        config = AgentConfig(**named, kwargs=order["kwargs"])
        agent = AgentFactory.create_agent_from_config(config, logs_dir=paths.agent_dir)
        await environment.start(force_build=False)
        await agent.setup(environment)
        await agent.run(order["instruction"], environment, AgentContext())
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def serve(connection: socket.socket, scratch: Path) -> None:
    """One trial."""
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=LINE_BYTES)
    channel = Channel(reader, writer)
    try:
        order = json.loads(await reader.readline())
        work = asyncio.create_task(trial(order, channel, scratch))
        gone = asyncio.create_task(channel.listen())
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            error = work.exception()
            end = {} if error is None else {"exception": type(error).__name__, "message": str(error)[-2000:]}
            await channel.send({"end": end})
        work.cancel()
        gone.cancel()
        await asyncio.wait({work, gone})
    finally:
        writer.close()


async def main() -> None:
    """Until standard input ends. All trials' files are in one folder, which goes with this process."""
    scratch = Path(tempfile.mkdtemp(prefix="rl360-harbor-"))
    control = socket.socket(fileno=0)
    control.setblocking(False)
    loop, trials, over = asyncio.get_running_loop(), set[asyncio.Task[None]](), asyncio.Event()

    def take() -> None:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            over.set()
        for descriptor in descriptors:
            task = asyncio.create_task(serve(socket.socket(fileno=descriptor), scratch))
            trials.add(task)
            task.add_done_callback(trials.discard)

    loop.add_reader(control, take)
    await over.wait()
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)  # trials whose sandboxes are nobody's any more


if __name__ == "__main__":
    logging.disable(logging.INFO)
    asyncio.run(main())
