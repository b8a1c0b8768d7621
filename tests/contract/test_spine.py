"""A run through everything that is real: triggered as the UI triggers it, its books, its artifact, its report."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

import duckdb
import httpx
import psutil
import pytest

from rl360.agents.records import read_table
from rl360.config.services import Services
from rl360.ledger.outcomes import SAMPLED
from rl360.sessions.sample import LeafCounts, decode_samples
from rl360.store.layout import run_config_key, step_key
from rl360.store.manifest import ObjectRef, get_object, read_manifest
from rl360.store.object_store import ObjectStore
from tests.conftest import ROOT, Cli

pytestmark = [pytest.mark.contract, pytest.mark.timeout(900)]

STEPS, GROUPS, SIZE = 2, 8, 4
SMALL = ("-s", f"taskset.groups_per_step={GROUPS}", "-s", f"taskset.attempts_per_group={SIZE}")
SMALL += ("-s", "rollout.wave_size=12", "-s", "trainer.checkpoint_every=1")


@pytest.fixture(scope="module")
def run(cli: Cli) -> str:
    """A finished run of two small steps."""
    name = f"spine-{uuid.uuid4().hex[:8]}"
    done = cli("run", "start", "--name", name, "--steps", str(STEPS), *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    return name


@pytest.fixture(scope="module")
def ledger(cli: Cli, run: str) -> dict[str, Any]:
    printed = cli("ledger", run, "--json")
    assert printed.returncode == 0, printed.stderr
    return json.loads(printed.stdout)


def test_run_list_and_ledger_have_the_fixed_formats(cli: Cli, run: str, ledger: dict[str, Any]) -> None:
    rows = {row["run"]: row for row in json.loads(cli("run", "list", "--json").stdout)}
    assert rows[run]["steps"] == STEPS
    assert rows[run]["state"] == "done"
    assert ledger["run"] == run
    wanted = {"step", "attempts", "outcomes", "groups", "sampled_tokens", "tokens", "trained_samples"}
    wanted |= {"loss_weight_sum", "loss", "reward", "push", "phases_s"}
    for step in ledger["steps"]:
        assert wanted <= set(step)
        assert set(step["reward"]) >= {"unfiltered_mean_valid", "kept_mean", "infra_rate", "by_domain"}
        assert set(step["push"]) >= {"path", "calls_per_engine", "bytes", "paused_s", "engines"}
    assert "holds" in cli("ledger", run, "--step", "1").stdout


def test_every_attempt_and_token_is_accounted_for(store: ObjectStore, run: str, ledger: dict[str, Any]) -> None:
    for entry in ledger["steps"]:
        step = entry["step"]
        collected = read_manifest(store, run, step, "collect")
        assert collected is not None
        records = read_table(store, collected.objects[0])
        assert entry["attempts"] == len(records) >= GROUPS * SIZE
        assert sum(entry["outcomes"].values()) == len(records)
        assert sum(entry["tokens"].values()) == entry["sampled_tokens"] == sum(r.sampled_tokens for r in records)
        assert set(entry["tokens"]) <= {bucket.value for bucket in SAMPLED}
        stored = [r.stored for r in records if r.stored is not None]
        assert len({version for ref in stored for leaf in ref.leaves for version in leaf.versions}) == 1
        for ref in stored:  # the session servers wrote what they said they did
            data = get_object(store, ObjectRef(key=ref.key, sha256=ref.sha256, size_bytes=ref.size_bytes))
            assert tuple(LeafCounts.of(sample) for sample in decode_samples(data, ref.key)) == ref.leaves
        assert sorted(ref.key for ref in stored) == store.list(step_key(run, step, "merged/"))
        assert all(r.cleanup_confirmed for r in records)
        rewards = [r.verdict.reward for r in records if r.verdict is not None]
        assert entry["reward"]["unfiltered_mean_valid"] == pytest.approx(sum(rewards) / len(rewards))


def test_every_question_to_the_ledger_of_a_real_run(
    cli: Cli, run: str, ledger: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*args: str) -> dict[str, Any]:
        printed = cli("ledger", run, *args, "--json")
        assert printed.returncode == 0, printed.stderr
        return json.loads(printed.stdout)

    books = ask("--waste", "--price-gpu-hour", "2", "--price-sandbox-hour", "0.1")
    assert books["sampled_tokens"] == sum(step["sampled_tokens"] for step in ledger["steps"])
    for split in ("by_class", "by_bucket", "by_outcome"):
        assert sum(entry["tokens"] for entry in books[split].values()) == books["sampled_tokens"]
        assert sum(entry["seconds"] for entry in books[split].values()) == pytest.approx(books["seconds"])
    assert sum(books["money"]["by_class"].values()) == pytest.approx(books["money"]["total"])
    kept = ask("--why", "kept")
    assert kept["tokens"] == books["trained_tokens"] and kept["attempts"] == books["by_class"]["kept"]["attempts"]
    assert [step["version_before"] for step in ledger["steps"]] == [0, ledger["steps"][0]["version_after"]]
    for step in ledger["steps"]:
        assert step["staleness"]["max"] in (0, None)
        assert set(step["pass_at_k"]) == {"1", "2", "4"}
    if kept["rows"]:
        life = ask("--attempt", kept["rows"][0]["attempt_id"])
        (tried,) = life["tries"]
        assert tried["verdict"]["verifies"] is True and tried["sandbox"]["cleanup_evidence"]
        trained = life["trained"]
        assert tried["versions"] == [f"{run}:{trained['version_before']}"]
        assert trained["push"]["version"] == trained["version_after"] == trained["version_before"] + 1
        shown = cli("ledger", run, "--attempt", life["attempt"]).stdout
        assert "signature verifies" in shown and tried["session"]["sample"]["sha256"] in shown
    rows = ask("--export", str(tmp_path / "tables"))["rows"]
    monkeypatch.chdir(tmp_path / "tables")
    tables = duckdb.connect()
    tables.execute(Path("views.sql").read_text())
    assert tables.execute("SELECT count(*), sum(sampled_tokens) FROM attempts").fetchone() == (
        rows["attempts"],
        books["sampled_tokens"],
    )


def test_engines_end_on_the_trained_version(services: Services, store: ObjectStore, run: str) -> None:
    trained = read_manifest(store, run, STEPS - 1, "train")
    assert trained is not None
    record = json.loads(store.get(step_key(run, STEPS - 1, "push.json")))
    assert record["version"] == f"{run}:{trained.info['version_after']}"
    for url in services.engine_urls:
        info = httpx.get(f"{url}/model_info", timeout=10).json()
        assert info["weight_version"] == record["version"]


def change(services: Services, path: str, body: dict[str, object]) -> httpx.Response:
    """A POST to Prefect as its own pages send it."""
    api = services.prefect_api_url
    token = httpx.get(f"{api}/csrf-token?client=test", timeout=20).json()["token"]
    headers = {"Prefect-Csrf-Token": token, "Prefect-Csrf-Client": "test"}
    for _ in range(20):
        answer = httpx.post(f"{api}/{path}", json=body, headers=headers, timeout=20)
        if answer.status_code != 503:  # busy: its SQLite is locked
            break
        time.sleep(1)
    return answer


def test_each_step_left_an_artifact_and_a_flow(services: Services, run: str) -> None:
    for step in range(STEPS):
        key = f"{run}-step-{step:06}"
        found = httpx.get(f"{services.prefect_api_url}/artifacts/{key}/latest", timeout=20).json()
        text = found["data"]
        for part in ("## Reward", "## Attempts", "## Sampled tokens", "## Phases", "data:image/png;base64,"):
            assert part in text, f"artifact of step {step} lacks {part}"
    body = {"flow_runs": {"name": {"any_": [f"{run} step {step}" for step in range(STEPS)]}}}
    flows = change(services, "flow_runs/filter", body).json()
    assert {flow["state_type"] for flow in flows} == {"COMPLETED"}
    assert len(flows) == STEPS


def test_report_is_one_page_that_needs_nothing(cli: Cli, run: str, tmp_path: Path) -> None:
    written = cli("report", run, "--out", str(tmp_path), "--json")
    assert written.returncode == 0, written.stderr
    paths = json.loads(written.stdout)
    page = Path(paths["html"]).read_text()
    assert "data:image/png;base64," in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    for png in paths["pngs"].values():
        assert Path(png).read_bytes().startswith(b"\x89PNG")


def test_export_is_a_policy_others_load(
    cli: Cli, services: Services, store: ObjectStore, run: str, tmp_path: Path
) -> None:
    done = cli("run", "export", run, str(tmp_path / "policy"))
    assert done.returncode == 0, done.stderr
    local = (tmp_path / "policy" / "model.safetensors").read_bytes()
    assert (tmp_path / "policy" / "chat_template.jinja").is_file()
    done = cli("run", "export", run, f"s3://{services.s3_bucket}/exports/{run}")
    assert done.returncode == 0, done.stderr
    assert store.get(f"exports/{run}/model.safetensors") == local
    again = cli("run", "export", run, f"s3://{services.s3_bucket}/exports/{run}")
    assert (again.returncode, "new prefix" in again.stderr) == (2, True), again.stderr


def test_the_demo_command(cli: Cli, services: Services) -> None:
    name = f"demo-{uuid.uuid4().hex[:8]}"
    done = cli("demo", "--steps", "1", "--seed", "0", "--name", name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"report: {services.home}/reports/{name}/report.html" in done.stdout
    assert services.prefect_ui_url in done.stdout
    (step,) = json.loads(cli("ledger", name, "--json").stdout)["steps"]
    assert step["attempts"] >= 256
    assert 0.2 < step["reward"]["unfiltered_mean_valid"] < 0.6
    assert step["groups"]["trained"] > step["groups"]["total"] / 2, "the warm start must disagree with itself"


def test_a_directory_of_ones_own_tasks(cli: Cli, tmp_path: Path) -> None:
    for folder in ("append-1", "count-1"):
        shutil.copytree(ROOT / "rl360" / "tasksets" / "chores_tasks" / folder, tmp_path / folder)
    checked = cli("tasks", "check", str(tmp_path))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    name = f"own-{uuid.uuid4().hex[:8]}"
    fields = ("-s", f"taskset.path={tmp_path}", "-s", "taskset.groups_per_step=2", "-s", "taskset.attempts_per_group=2")
    done = cli("run", "start", "--name", name, "--steps", "1", *fields)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(cli("ledger", name, "--json").stdout)["steps"][0]["attempts"] >= 4


def test_everything_listens_on_loopback_only(cli: Cli) -> None:
    supervisor = psutil.Process(json.loads(cli("status", "--json").stdout)["supervisor_pid"])
    listening: set[tuple[str, str, int]] = set()
    for process in supervisor.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # health probes and flow runs come and go in between
            listening.update(
                (process.name(), connection.laddr.ip, connection.laddr.port)
                for connection in process.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            )
    assert len(listening) >= 10
    assert {(name, ip, port) for name, ip, port in listening if ip not in ("127.0.0.1", "::1")} == set()


def test_prefect_serves_no_web_page_of_another_origin(services: Services) -> None:
    """A page may send a text/plain POST anywhere without asking; it must change nothing, and read nothing."""
    asked = {"Origin": "https://elsewhere.example", "Content-Type": "text/plain"}
    answer = httpx.post(f"{services.prefect_api_url}/flow_runs/filter", content=b"{}", headers=asked, timeout=20)
    assert answer.status_code == 403, answer.text
    token = httpx.get(f"{services.prefect_api_url}/csrf-token?client=x", headers=asked, timeout=20)
    assert "access-control-allow-origin" not in token.headers


def test_the_form_refuses_what_the_config_refuses(services: Services, cli: Cli) -> None:
    api = services.prefect_api_url
    deployment = httpx.get(f"{api}/deployments/name/rl_run/local", timeout=20).json()
    assert "RunConfig" in json.dumps(deployment["parameter_openapi_schema"])
    assert [schedule["active"] for schedule in deployment["schedules"]] == [False]
    for config in ({"run": "demo", "seeed": 1}, {"run": "demo", "rollout": {"wave_size": 0}}):
        body = {"parameters": {"config": config}}
        answer = change(services, f"deployments/{deployment['id']}/create_flow_run", body)
        assert answer.status_code == 409, answer.text
    refused = cli("run", "start", "--name", "bad", "-s", "seeed=1")
    assert refused.returncode == 2
    assert refused.stderr.strip() == "error: config: unknown key seeed"


def test_a_started_run_refuses_another_config(cli: Cli, store: ObjectStore, run: str) -> None:
    before = store.get(run_config_key(run))
    done = cli("run", "start", "--name", run, "--steps", str(STEPS), *SMALL, "-s", "trainer.lr=0.5")
    assert done.returncode == 2
    assert "trainer.lr: 0.0003 -> 0.5" in done.stderr
    assert store.get(run_config_key(run)) == before


def test_resuming_a_finished_run_changes_nothing(cli: Cli, store: ObjectStore, run: str) -> None:
    before = store.list(f"{run}/")
    done = cli("run", "resume", run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert store.list(f"{run}/") == before
