"""Specs, checks and process bookkeeping, without starting a service."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from infra.local import checks, cleanup, deploy, proc
from infra.local.plan import DEFAULT_PORTS, LOOPBACK, Spec, UpOptions, addresses, build_specs, port_table
from infra.local.state import ServiceState, Status, SupervisorState, read_state, write_state
from infra.local.supervisor import BACKOFF_MAX_S, backoff_s, last_line
from rl360.config.services import Secrets
from rl360.errors import BadInput, Rl360Error
from rl360.harbor.server import parse_args
from rl360.sandboxes import cgroups

SECRETS = Secrets(token="t" * 32, s3_access_key="access-key-of-test", s3_secret_key="secret-key-of-test")


def specs_of(**changes: object) -> list[Spec]:
    options = UpOptions.model_validate({"home": "/srv/rl360", "model_dir": "/srv/model"} | changes)
    return build_specs(options, SECRETS, "instance-of-test")


def test_the_default_table_is_the_documented_one() -> None:
    specs = {spec.name: spec for spec in specs_of()}
    assert set(specs) == {
        "s3", "prefect", "worker", "deployments", "engine-0", "engine-1", "gateway", "fleet", "sessions-0",
        "sandbox-0", "trainer",
    }  # fmt: skip
    assert {name: specs[name].port for name in specs if specs[name].port} == {
        "s3": 18333, "prefect": 14200, "engine-0": 13000, "engine-1": 13001, "gateway": 13100,
        "sessions-0": 13200, "sandbox-0": 13300, "trainer": 13400,
    }  # fmt: skip
    ports = [port for spec in specs.values() for port in spec.ports]
    assert len(ports) == len(set(ports))


def test_secrets_are_never_arguments_and_reach_only_the_store() -> None:
    for spec in specs_of():
        assert not any(value in " ".join(spec.argv) for value in SECRETS.model_dump().values())
        assert (SECRETS.s3_secret_key in spec.env.values()) == (spec.name == "s3")
        assert SECRETS.token not in spec.env.values()
        assert "secret-key" not in repr(spec)


def test_the_judges_key_reaches_only_the_sandbox_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL360_JUDGE_KEY", "sk-of-the-judge")  # a name that services are given otherwise
    chosen = {"judge_url": "https://judge.example/v1", "judge_key_env": "RL360_JUDGE_KEY"}
    for spec in specs_of(**chosen):
        assert ("sk-of-the-judge" in spec.env.values()) == (spec.name == "sandbox-0"), spec.name
        assert "sk-of-the-judge" not in " ".join(spec.argv) + repr(spec)
    sandbox = next(spec for spec in specs_of(**chosen) if spec.name == "sandbox-0")
    args = parse_args(list(sandbox.argv[3:]))
    assert (args.judge_url, args.judge_key_env) == ("https://judge.example/v1", "RL360_JUDGE_KEY")
    monkeypatch.delenv("RL360_JUDGE_KEY")
    with pytest.raises(BadInput, match="--judge-key-env RL360_JUDGE_KEY: not set"):
        specs_of(**chosen)


def test_a_web_page_of_another_origin_is_no_client_of_prefect() -> None:
    prefect = next(spec for spec in specs_of() if spec.name == "prefect")
    origins = prefect.env["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"]
    assert origins == "http://127.0.0.1:14200,http://localhost:14200"
    assert prefect.env["PREFECT_SERVER_CSRF_PROTECTION_ENABLED"] == "true"  # a text/plain POST needs no preflight


def test_every_service_is_marked_on_loopback_and_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the person")
    monkeypatch.setenv("PREFECT_API_URL", "http://elsewhere/api")
    for spec in specs_of():
        assert spec.env[proc.INSTANCE_ENV] == "instance-of-test"
        assert spec.env[proc.SERVICE_ENV] == spec.name
        assert spec.env["DO_NOT_TRACK"] == "1"
        assert spec.env["OMP_NUM_THREADS"] == "1"
        assert spec.env["PREFECT_API_URL"] == f"http://{LOOPBACK}:14200/api"
        assert "of the person" not in spec.env.values()
        assert "0.0.0.0" not in " ".join(spec.argv)
        assert ("--door strict" in " ".join(spec.argv)) == spec.name.startswith("engine-")


def test_only_keeps_what_is_named_and_drops_waits_for_the_rest() -> None:
    specs = {spec.name: spec for spec in specs_of(only=("sessions-0", "gateway", "trainer"))}
    assert set(specs) == {"sessions-0", "gateway", "trainer"}
    assert specs["sessions-0"].after == ("gateway",)
    assert specs["trainer"].after == ()
    with pytest.raises(BadInput, match="engine-9: no such service"):
        specs_of(only=("engine-9",))


def test_routed_experts_are_asked_for_everywhere_or_nowhere() -> None:
    flags = {"engine-0": "--routed-experts", "engine-1": "--routed-experts", "sessions-0": "--return-routed-experts"}
    for wanted in (True, False):
        specs = {spec.name: spec for spec in specs_of(routed_experts=wanted)}
        assert {name: flag in specs[name].argv for name, flag in flags.items()} == dict.fromkeys(flags, wanted)


def test_ports_by_block_and_by_name() -> None:
    table = port_table(21_000, {"prefect": 4_200})
    assert table["engine"] == 21_000
    assert table["s3"] == 21_600
    assert table["prefect"] == 4_200
    assert port_table(None, {}) == DEFAULT_PORTS
    with pytest.raises(BadInput, match="outside 1024"):
        port_table(None, {"s3": 60_000})


def test_addresses_name_every_engine() -> None:
    services = addresses(UpOptions(home="/srv/rl360", model_dir="/srv/model", engines=3))
    assert services.engine_urls == [f"http://{LOOPBACK}:{port}" for port in (13_000, 13_001, 13_002)]
    assert services.prefect_api_url == f"{services.prefect_ui_url}/api"


def test_a_missing_program_is_named_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "binary", lambda name: None)
    with pytest.raises(Rl360Error, match=r"sandbox-0 needs the program bwrap, .*apt-get install -y bubblewrap"):
        checks.check_binaries(specs_of(only=("sandbox-0",)))
    with pytest.raises(Rl360Error, match=r"s3 needs the program weed, .*make setup"):
        checks.check_binaries(specs_of(only=("s3",)))


def test_too_little_memory_is_said_with_both_numbers() -> None:
    with pytest.raises(Rl360Error, match=r"3\.0 GiB of memory are available and these services need about \d\.\d GiB"):
        checks.check_memory(specs_of(), 3 << 30)
    checks.check_memory(specs_of(), 16 << 30)


def test_two_services_on_one_port_are_refused() -> None:
    with pytest.raises(BadInput, match="port 13000 is wanted by both engine-0 and gateway"):
        checks.check_ports(specs_of(only=("engine-0", "gateway"), ports=DEFAULT_PORTS | {"gateway": 13_000}))


def test_a_process_is_known_by_pid_and_start_time() -> None:
    with subprocess.Popen(["sleep", "30"], start_new_session=True) as child:
        row = proc.read(child.pid)
        assert row is not None
        assert proc.is_alive(child.pid, row.start_ticks)
        assert not proc.is_alive(child.pid, row.start_ticks + 1)
        assert proc.group_members(child.pid, row.start_ticks, proc.table()) == {child.pid}
        assert proc.group_members(child.pid, row.start_ticks + 1, proc.table()) == set()
        child.kill()


def test_a_dead_incarnation_leaves_neither_group_nor_strays() -> None:
    """The leader starts a child in a session of its own (as torchrun does) and dies; the marker finds the child."""
    code = "import subprocess; p = subprocess.Popen(['sleep', '60'], start_new_session=True); print(p.pid, flush=True)"
    env = os.environ | {"RL360_INCARNATION": "incarnation-of-test"}
    leader = subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout is not None
    ticks = proc.read(leader.pid)
    stray = int(leader.stdout.readline())
    leader.wait(10)
    leader.stdout.close()
    row = ServiceState(pid=leader.pid, start_ticks=ticks.start_ticks if ticks else 0, incarnation="incarnation-of-test")
    cleanup.end_incarnation(row, whole=True)
    assert stray not in proc.table()


def test_ending_escalates_to_kill() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()

    def find() -> set[int]:
        child.poll()
        return {child.pid} & set(proc.table())

    started_s = time.monotonic()
    ended, left = proc.end(find, grace_s=0.3)
    assert (ended, left) == (1, set())
    assert time.monotonic() - started_s >= 0.3
    assert child.wait(5) == -signal.SIGKILL
    child.stdout.close()


def test_the_state_file_is_read_back_and_a_foreign_one_is_refused(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    state = SupervisorState(instance="i", home=str(tmp_path), pid=1, start_ticks=-1, started_at=0.0)
    state.services["s3"] = ServiceState(status=Status.READY)
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state
    assert not state.good  # that supervisor does not live
    (tmp_path / "state.json").write_text('{"version": 0}')
    with pytest.raises(Rl360Error, match="not a state file of this version"):
        read_state(tmp_path)


def test_cgroup_records_never_reach_outside_the_cgroup_tree(tmp_path: Path) -> None:
    live = tmp_path / "sandboxes" / "13300" / "live" / "a"
    live.mkdir(parents=True)
    victim = tmp_path / "rl360-victim"
    victim.mkdir()
    (live / "rl360-a.json").write_text(f'{{"cgroups": ["{victim}", "/sys/fs/cgroup/../../{victim}"]}}')
    (live / "rl360-b.json").write_text("[")
    os.mkfifo(live / "rl360-c.json")
    assert cleanup.check(tmp_path, None).clean
    cleanup.sweep(tmp_path, None)
    assert victim.is_dir()


def test_only_groups_of_this_homes_servers_are_counted_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copied home has records of the groups of the one it was copied from."""
    monkeypatch.setattr(cleanup, "CGROUP_ROOT", tmp_path / "cgroup")
    home = tmp_path / "home"
    root = home / "sandboxes" / "13300"
    (root / "live" / "a").mkdir(parents=True)
    names = [cgroups.prefix(root) + "a", cgroups.prefix(tmp_path / "copy" / "sandboxes" / "13300") + "a", "rl360-a"]
    groups = [tmp_path / "cgroup" / name for name in names]
    for group in groups:
        group.mkdir(parents=True)
    record = {"cgroups": [str(group) for group in groups]}
    (root / "live" / "a" / f"{names[0]}.json").write_text(json.dumps(record))
    assert cleanup.check(home, None).cgroups == 1
    cleanup.sweep(home, None)
    assert [group.exists() for group in groups] == [False, True, True]


def test_backoff_grows_and_is_bounded() -> None:
    assert [backoff_s(n) for n in (0, 1, 2, 3)] == [0.5, 0.5, 1.0, 2.0]
    assert backoff_s(50) == BACKOFF_MAX_S


def test_the_last_line_of_a_log_is_what_the_service_said(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("--- start\nbad flag --x\n\n--- start again\n")
    assert last_line(log) == "bad flag --x"


def test_a_deployment_depends_on_declaration_flows_and_config(tmp_path: Path) -> None:
    for folder in ("flows", "rl360/config", "tasks"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "prefect.yaml").write_text("deployments: [{name: a}, {name: b}]")
    assert deploy.declared(tmp_path) == 2
    digests = {deploy.content_digest(tmp_path)}
    for path in ("flows/a.py", "rl360/config/a.py"):
        (tmp_path / path).write_text("x = 1")
        digests.add(deploy.content_digest(tmp_path))
    assert len(digests) == 3
    (tmp_path / "tasks/a.py").write_text("x = 1")
    assert deploy.content_digest(tmp_path) in digests


def test_sandboxes_of_this_home_only_are_ended(tmp_path: Path) -> None:
    """They start with an environment of their own, so their workspace's path is the marker."""
    ours, other = (
        subprocess.Popen(["sleep", "60"], env={proc.SANDBOX_ENV: f"{home}/sandboxes/1/live/a"}, start_new_session=True)
        for home in (tmp_path, f"{tmp_path}-other")
    )
    assert cleanup.check(tmp_path, None).sandboxes == 1
    waiter = threading.Thread(target=ours.wait)
    waiter.start()
    assert cleanup.sweep(tmp_path, None) == 1
    waiter.join(5)
    assert ours.returncode == -signal.SIGKILL
    assert cleanup.check(tmp_path, None).clean
    assert other.poll() is None
    other.kill()
    other.wait(5)
