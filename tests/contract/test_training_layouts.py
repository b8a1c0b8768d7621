"""Several processes train as one does: data, tensor, pipeline and expert parallel; a checkpoint moves between layouts.

To start processes takes longer than to train in them: those of one torchrun train all cases of their number in turn,
each case under process groups, a model and a store of its own. Log-probs equal those of transformers in fp32.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.contract.trainer_rig import REPO, free_ports
from tests.unit.training_data import EXPERTS, VOCAB, write_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(2000)]
LAUNCH_S = 900  # of all cases of a number of processes: seconds each, but not on a busy machine


@dataclass(frozen=True)
class Case:
    """Three steps of a model in `ranks` processes, from the end of another case or from the model's own weights."""

    model: str
    ranks: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    sp: bool = False
    routing: str = "own"
    count: int = 13
    objective: str = "plain"
    start: Case | None = None

    @property
    def name(self) -> str:
        own = (self.model, self.ranks, self.tp, self.pp, self.ep, self.sp, self.routing, self.count, self.objective)
        return "-".join(map(str, own)) + ("" if self.start is None else f"-after-{self.start.name}")


def alone(case: Case) -> Case:
    """The same steps in one process."""
    routing = "own" if case.routing == "own" else "replay"
    return replace(case, ranks=1, tp=1, pp=1, ep=1, sp=False, routing=routing)


DENSE = {
    "dp2": Case("dense", 2),
    "tp2": Case("dense", 2, tp=2),
    "tp2-sp": Case("dense", 2, tp=2, sp=True),
    "pp2": Case("dense", 2, pp=2),
}
EXPERT = {"dp2": Case("moe", 2), "ep2": Case("moe", 2, ep=2)}
REPLAYED = {
    "dp2": Case("moe", 2, routing="replay"),
    "ep2": Case("moe", 2, ep=2, routing="replay"),
    "tp2-sp": Case("moe", 2, tp=2, sp=True, routing="replay"),
    "pp2": Case("moe", 2, pp=2, routing="replay"),
    "pp2-recompute": Case("moe", 2, pp=2, routing="recompute"),
}
JUDGED = {
    "dp2": Case("dense", 2, objective="kl"),
    "tp2": Case("dense", 2, tp=2, objective="kl"),
    "pp2": Case("dense", 2, pp=2, objective="kl"),
    "reward-dp2": Case("dense", 2, objective="reward"),
    "reward-pp2": Case("dense", 2, pp=2, objective="reward"),
}
FEW = {"dense-1": Case("dense", 2, count=1), "moe-3": Case("moe", 2, count=3)}
WITH_CRITIC = {
    "dp2": Case("dense", 2, objective="critic"),
    "tp2": Case("dense", 2, tp=2, objective="critic"),
    "tp2-sp": Case("dense", 2, tp=2, sp=True, objective="critic"),
    "pp2": Case("dense", 2, pp=2, objective="critic"),
    "moe-ep2": Case("moe", 2, ep=2, objective="critic"),
    "moe-tp2-sp": Case("moe", 2, tp=2, sp=True, objective="critic"),
    "moe-pp2": Case("moe", 2, pp=2, objective="critic"),
}
MOVED, STAYED = Case("dense", start=DENSE["tp2"]), Case("dense", start=Case("dense"))
SPLIT = [case for table in (DENSE, EXPERT, REPLAYED, JUDGED, FEW, WITH_CRITIC) for case in table.values()]
CASES = list(dict.fromkeys([*SPLIT, *map(alone, SPLIT), MOVED, STAYED]))  # the last two follow what they start from
Trained = tuple[list[dict[str, float]], dict[str, Any]]  # what each step told and the tensors at the end
Run = Callable[[Case], Trained]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("layouts")
    write_model(made / "dense")
    write_model(made / "moe", experts=EXPERTS)
    write_model(made / "reference", seed=9)
    return made


def launch(folder: Path, ranks: int, cases: list[Case]) -> str:
    """The cases in turn in processes of one torchrun; "" or why it ended before the last."""
    told = [asdict(case) | {"name": case.name, "start": case.start and case.start.name} for case in cases]
    (folder / "cases.json").write_text(json.dumps(told))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_ports(1)[0])]
    command += ["-m", "tests.contract.training_ranks", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(REPO)}
    try:
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LAUNCH_S, cwd=REPO)
    except subprocess.TimeoutExpired as error:
        return str(error)
    said = found.stderr[found.stderr.find("Traceback") :]  # of the rank that failed first; torchrun's own comes last
    return "" if found.returncode == 0 else f"torchrun ended with {found.returncode}:\n{said[:4000]}"


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    """What a case gave. One that fails fails its own tests: those after it go on in processes of another torchrun."""
    failed: dict[str, str] = {}
    for ranks in (2, 1):
        ahead = [case for case in CASES if case.ranks == ranks]
        while ahead:
            error = launch(folder, ranks, ahead)
            left = [case for case in ahead if not (folder / f"{case.name}.json").exists()]
            assert bool(error) == bool(left), f"{len(left)} cases have not run; {error}"
            if left == ahead:  # not even the first has run: nor would the others
                failed |= {case.name: error for case in left}
                break
            ahead = left
            if ahead:
                failed[ahead.pop(0).name] = error

    def trained(case: Case) -> Trained:
        if case.name in failed:
            pytest.fail(f"{case.name}: {failed[case.name]}", pytrace=False)
        return json.loads((folder / f"{case.name}.json").read_text()), load_file(folder / f"{case.name}.safetensors")

    return trained


def each(table: dict[str, Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", table.values(), ids=table)


def assert_same(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert mine == pytest.approx(theirs, rel=2e-4, abs=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        # a weight moves by up to lr 1e-3 a step: a lost or doubled gradient shows as 1e-3, rounding as 1e-5
        np.testing.assert_allclose(found[1][name], tensor, atol=1e-4 if "weights/" in name else 2e-5)


@each(DENSE)
def test_dense_layouts_train_as_one_process(run: Run, case: Case) -> None:
    assert_same(run(case), run(alone(case)))


@each(EXPERT)
def test_expert_layouts_train_as_one_process(run: Run, case: Case) -> None:
    assert_same(run(case), run(alone(case)))


@each(REPLAYED)
def test_layouts_replay_routing_as_one_process(run: Run, case: Case) -> None:
    one, own = run(alone(case)), run(Case("moe"))
    assert_same(run(case), one)
    assert abs(one[0][0]["loss_weight_sum"] - own[0][0]["loss_weight_sum"]) < 1e-6
    assert abs(one[0][0]["mean_abs_dlogp"] - own[0][0]["mean_abs_dlogp"]) > 1e-2, "it is another forward"


@each(JUDGED)
def test_layouts_train_against_a_reference_and_kept_actors_as_one_process(run: Run, case: Case) -> None:
    one = run(alone(case))
    assert_same(run(case), one)
    assert one[0][0]["kl_mean"] != 0 and one[0][1]["mean_loss"] != run(Case("dense"))[0][1]["mean_loss"]


@each(FEW)
def test_ranks_without_a_sample_keep_step_and_count_for_nothing(run: Run, case: Case) -> None:
    """One sample on two ranks leaves one of them with padding alone, three leave it with less."""
    assert_same(run(case), run(alone(case)))


@each(WITH_CRITIC)
def test_layouts_train_policy_and_critic_as_one_process(run: Run, case: Case) -> None:
    one = run(alone(case))
    assert_same(run(case), one)
    assert sum(name.startswith("critic_weights/") for name in one[1]) > 20


def test_a_checkpoint_moves_between_layouts(run: Run) -> None:
    assert_same(run(MOVED), run(STAYED))


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_logprobs_equal_transformers(folder: Path, model: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from rl360.training.logprobs import megatron_logprobs

    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, VOCAB, n).astype(np.int32) for n in rng.integers(2, 120, 24)]
    theirs = AutoModelForCausalLM.from_pretrained(folder / model, dtype=torch.float32).eval()
    for tokens, found in zip(sequences, megatron_logprobs(folder / model, sequences), strict=True):
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        with torch.no_grad():
            expected = theirs(ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-4)
