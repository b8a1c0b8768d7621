"""Hosts of a trainer that hold different copies of a model: refused on every rank before anything is trained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.trainer_rig import REPO, free_ports
from tests.unit.training_data import write_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]

# each rank has a folder of its own, as a host has
RANK = """
import sys
from pathlib import Path
import torch
from rl360.config.run import RunConfig
from rl360.errors import BadInput
from rl360.training.megatron import parallel
from rl360.training.megatron.model import Layout
from rl360.training.replica import OpenRun, Replica
from tests.unit.memory_store import MemoryStore

parallel.enter(Layout())
host = Path(sys.argv[1]) / f"host{torch.distributed.get_rank()}"
store, objective = MemoryStore(), {"kl_coef": 0.1, "reference": str(host / "reference")}
config = RunConfig.parse({"run": "r1", "objective": objective if sys.argv[2] == "reference" else {}})
try:
    Replica(store, Layout(), "x").execute(OpenRun("r1", config.to_json(), str(host / "start"), None, ()))
    told = "opened"
except BadInput as error:
    told = str(error)
(host / "told").write_text(told)
parallel.leave()
"""


def told(folder: Path, spoilt: str, objective: str) -> list[str]:
    for host in range(2):
        for seed, name in enumerate(("start", "reference")):
            write_model(folder / f"host{host}" / name, seed=seed + 7 * (host if name == spoilt else 0))
    script = folder / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    command += ["--master-port", str(free_ports(1)[0]), str(script), str(folder), objective]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, cwd=REPO)
    assert found.returncode == 0, found.stderr[-2000:]
    return [(folder / f"host{host}" / "told").read_text() for host in range(2)]


@pytest.mark.parametrize("spoilt", ["start", "reference"])
def test_copies_that_differ_are_refused_by_every_rank(tmp_path: Path, spoilt: str) -> None:
    for said in told(tmp_path, spoilt, spoilt):
        assert f"/{spoilt} holds weights " in said and "on rank 0 and others on rank 1; give every host" in said
