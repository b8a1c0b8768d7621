"""A past optimizer step taken again by a trainer process of its own, on loopback; the running trainer is left alone.

The process restores the newest checkpoint before the step, takes the steps between, each of which must end in the
recorded weights, then the step itself, under the layout (processes, threads) the step was recorded on.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import orjson

from rl360.config.services import Services
from rl360.errors import BadInput, Rl360Error
from rl360.replay.compare import Compared, compared
from rl360.replay.steps import manifest_of
from rl360.store.manifest import get_object
from rl360.store.object_store import ObjectStore
from rl360.training.results import TrainResult

LOOPBACK = "127.0.0.1"
NOT_COMPARED = ("seconds", "incarnation")  # when and by whom, not what
_STOP_S = 15.0
_LAYOUT = r"dp(\d+)-tp(\d+)-pp(\d+)-ep(\d+)-threads(\d+)"


def replay_train(store: ObjectStore, services: Services, run: str, step: int, deadline_s: float) -> list[Compared]:
    """The recorded result and the recomputed one."""
    manifest = manifest_of(store, run, step, "train")
    stored = orjson.loads(get_object(store, manifest.objects[0]))
    answer = take_step(services, run, step, str(stored.get("layout")), deadline_s)
    if "refused" in answer:
        return [Compared("train", "train.json", "(whole)", "committed", f"refused: {answer['refused']}")]
    return [
        compared("train", "train.json", _said(stored), _said(answer["result"])),
        compared("train", "manifests/train.json", {"info": manifest.info}, {"info": stored}),
    ]


def _said(result: dict[str, Any]) -> dict[str, Any]:
    """What is compared; what a result of an earlier rl360 does not say, it would have said by default."""
    defaults = {name: info.default for name, info in TrainResult.model_fields.items() if not info.is_required()}
    said = {name: value for name, value in {**defaults, **result}.items() if name not in NOT_COMPARED}
    whole: dict[str, Any] = orjson.loads(orjson.dumps(said))
    return whole


def sizes(layout: str, run: str, step: int) -> tuple[int, int, int, int]:
    """Data, pipeline and expert parallel sizes and threads; `BadInput` for a layout that no replay can take again."""
    found = re.fullmatch(_LAYOUT, layout)
    if found is None:
        raise BadInput(f"step {step} of {run} was recorded on layout {layout!r}, which this rl360 does not know")
    dp, tp, pp, ep, threads = map(int, found.groups())
    if tp > 1:
        raise BadInput(
            f"step {step} of {run} was trained with tensor parallel {tp} ({layout}) and train is replayed with tensor "
            "parallel 1 only, for a layout does not say whether sequences were split; its other tasks can be (--task)"
        )
    return dp, pp, ep, threads


def launch(layout: str, run: str, step: int, out: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """The command that takes the step, and what it needs in its environment."""
    dp, pp, ep, threads = sizes(layout, run, step)
    argv = [sys.executable, "-m", "rl360.training.torchrun", "--nnodes", "1", "--nproc-per-node", str(dp * pp)]
    argv += ["--max-restarts", "0", "--master-addr", LOOPBACK, "--master-port", str(port)]
    argv += ["-m", "rl360.replay.trainer", run, str(step), str(out), str(pp), str(ep)]
    return argv, {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}


def take_step(services: Services, run: str, step: int, layout: str, deadline_s: float) -> dict[str, Any]:
    """What the process answered: `{"result": ...}` or `{"refused": why}`."""
    with socket.create_server((LOOPBACK, 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="rl360-replay-") as folder:
        out, log = Path(folder) / "answer.json", Path(folder) / "log"
        argv, env = launch(layout, run, step, out, port)
        with log.open("wb") as said:
            process = subprocess.Popen(
                argv,
                stdout=said,
                stderr=said,
                env={**os.environ, **env, "RL360_HOME": services.home},
            )
            try:
                process.wait(deadline_s)
            except subprocess.TimeoutExpired:
                raise Rl360Error(f"replaying step {step} of {run} took more than {deadline_s:g} s") from None
            finally:
                _end(process)
        if not out.exists():
            tail = " ".join(log.read_text(errors="replace").split())[-500:]
            raise Rl360Error(f"the trainer process of the replay ended with {process.returncode}: {tail}")
        answer: dict[str, Any] = orjson.loads(out.read_bytes())
        return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM first: torchrun then ends its ranks, which SIGKILL would leave behind."""
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
