"""Which services a laptop runs, in which order, with which command, port, environment and health probe.

Pure: options and paths in, specs out. Secrets go to processes through files and environment, never through arguments,
which every user of the machine can read.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from infra.local.proc import INSTANCE_ENV, SERVICE_ENV
from rl360.config.services import Secrets, Services
from rl360.engines.launchers.options import EngineOptions
from rl360.errors import BadInput
from rl360.plugins import FOLDER as PLUGINS
from rl360.sandboxes.admission import BOUNDLESS
from rl360.sandboxes.host import promised

REPO_ROOT = Path(__file__).resolve().parents[2]
BUCKET = "rl360"
WORK_POOL = "rl360"
LOOPBACK = "127.0.0.1"
MIB = 1 << 20
PORT_NAMES = ("engine", "gateway", "sessions", "sandbox", "trainer", "prefect", "s3")
# s3 opens ten ports in a row: the S3 API, and what its parts use to talk to each other
S3_PORTS = 10
ADMIN_GRPC_OFFSET = 10_000
DEFAULT_PORTS = {
    "engine": 13_000,
    "gateway": 13_100,
    "sessions": 13_200,
    "sandbox": 13_300,
    "trainer": 13_400,
    "prefect": 14_200,
    "s3": 18_333,
}
KEPT_ENV = frozenset({"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TERM"})
KEPT_ENV |= {"LD_LIBRARY_PATH", "VIRTUAL_ENV"}
KEPT_ENV_PREFIXES = ("LC_", "XDG_", "SSL_CERT", "PYTHON", "OPENBLAS", "MKL_", "CUDA", "NVIDIA", "NCCL", "RL360_")


class UpOptions(BaseModel):
    """What a person may choose at `rl360 up`; written to a file for the supervisor (no secrets in it)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    home: str
    model_dir: str = ""
    engines: int = Field(2, ge=1, le=64)
    sessions: int = Field(1, ge=1, le=64)
    matchers: tuple[str, ...] = ()
    routed_experts: bool = False
    judge_url: str = ""
    agents: tuple[str, ...] = ()
    harnesses: tuple[str, ...] = ()
    harbor: str = ""
    judge_key_env: str = ""
    promise: str = ""
    trainer_ranks: int = Field(1, ge=1, le=64)
    ports: dict[str, int] = Field(default_factory=lambda: dict(DEFAULT_PORTS))
    only: tuple[str, ...] = ()
    seed: int = 0
    start_s: float = Field(300.0, gt=0)


@dataclass(frozen=True)
class Probe:
    """How to tell that a service works: a GET that answers 200 (with our incarnation where it names one), a file
    that is written again and again, or `kind`."""

    kind: str
    url: str = ""


@dataclass(frozen=True)
class Spec:
    """One service. `after`: names that must be ready first; `heavy` starts take a slot, for they want a core each."""

    name: str
    argv: tuple[str, ...]
    probe: Probe
    env: dict[str, str] = field(default_factory=dict, repr=False)
    port: int | None = None
    ports: tuple[int, ...] = ()
    after: tuple[str, ...] = ()
    start_deadline_s: float = 120.0
    stop_grace_s: float = 10.0
    memory_bytes: int = 100 * MIB
    heavy: bool = False
    one_shot: bool = False
    # a dead worker's flow runs and a dead keeper's engines go on by themselves; whatever else a dead service leaves is
    # ended before it starts again
    sweep: bool = True


def port_table(base: int | None, chosen: dict[str, int]) -> dict[str, int]:
    """Ports by name: the defaults, or a block from `base` (about 700 wide), with single ones replaced."""
    offsets = dict(zip(PORT_NAMES, (0, 100, 200, 300, 400, 500, 600), strict=True))
    ports = dict(DEFAULT_PORTS) if base is None else {name: base + offset for name, offset in offsets.items()}
    unknown = sorted(set(chosen) - set(PORT_NAMES))
    if unknown:
        raise BadInput(f"--ports {unknown[0]}=...: no such port; choose among {', '.join(PORT_NAMES)}")
    ports.update(chosen)
    for name, port in ports.items():
        limit = 65_535 - (ADMIN_GRPC_OFFSET + S3_PORTS if name == "s3" else S3_PORTS)
        if not 1024 <= port <= limit:
            raise BadInput(f"port {port} of {name} is outside 1024..{limit}; change it with --port-base or --ports")
    return ports


def addresses(options: UpOptions) -> Services:
    """What `services.json` says."""
    ports = options.ports
    prefect = f"http://{LOOPBACK}:{ports['prefect']}"
    return Services(
        home=options.home,
        prefect_api_url=f"{prefect}/api",
        prefect_ui_url=prefect,
        s3_endpoint=f"http://{LOOPBACK}:{ports['s3']}",
        s3_bucket=BUCKET,
        gateway_url=f"http://{LOOPBACK}:{ports['gateway']}",
        engine_urls=[f"http://{LOOPBACK}:{ports['engine'] + i}" for i in range(options.engines)],
        session_urls=[f"http://{LOOPBACK}:{ports['sessions'] + i}" for i in range(options.sessions)],
        sandbox_urls=[f"http://{LOOPBACK}:{ports['sandbox']}"],
        trainer_url=f"http://{LOOPBACK}:{ports['trainer']}",
        model_dir=options.model_dir,
    )


def binary(name: str) -> str | None:
    """A program of this environment, else of the machine."""
    beside = Path(sys.executable).parent / name
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(name)


def base_env(options: UpOptions, instance: str) -> dict[str, str]:
    """What every service starts with: a few names of the caller's, threads that fit two cores, no telemetry."""
    kept = {name: value for name, value in os.environ.items() if name in KEPT_ENV or name.startswith(KEPT_ENV_PREFIXES)}
    kept.pop(options.judge_key_env, None)  # for the sandbox server alone
    home = Path(options.home)
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
    return (
        {PLUGINS: os.getcwd()}
        | kept
        | {
            "PATH": path,
            "RL360_HOME": str(home),
            "RL360_TOKEN_FILE": str(home / "token"),
            INSTANCE_ENV: instance,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "DO_NOT_TRACK": "1",
            "PYTHONUNBUFFERED": "1",
            "PREFECT_HOME": str(home / "prefect"),
            "PREFECT_API_URL": f"http://{LOOPBACK}:{options.ports['prefect']}/api",
            "PREFECT_UI_API_URL": f"http://{LOOPBACK}:{options.ports['prefect']}/api",
            "PREFECT_SERVER_UI_API_URL": f"http://{LOOPBACK}:{options.ports['prefect']}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
            "PREFECT_CLI_PROMPT": "false",
        }
    )


def build_specs(options: UpOptions, secrets: Secrets, instance: str) -> list[Spec]:
    """All services in start order, or those named by `only` (with what they need among those)."""
    env = base_env(options, instance)
    specs = [_prefect(options), _s3(options, secrets), *_engines(options)[:1], _worker(options), _deploy()]
    specs += [*_engines(options)[1:], _gateway(options), _fleet(options), *_sessions(options), _sandbox(options)]
    specs += [_trainer(options)]
    chosen = [spec for spec in specs if not options.only or spec.name in options.only]
    unknown = sorted(set(options.only) - {spec.name for spec in specs})
    if unknown:
        raise BadInput(f"--only {unknown[0]}: no such service; choose among {', '.join(s.name for s in specs)}")
    names = {spec.name for spec in chosen}
    return [
        replace(
            spec,
            env=env | {SERVICE_ENV: spec.name} | spec.env,
            after=tuple(name for name in spec.after if name in names),
        )
        for spec in chosen
    ]


def _program(name: str) -> str:
    return binary(name) or name


def _http(port: int) -> tuple[str, ...]:
    return ("--host", LOOPBACK, "--port", str(port))


def _s3(options: UpOptions, secrets: Secrets) -> Spec:
    port = options.ports["s3"]
    names = ["s3.port", "s3.port.grpc", "filer.port", "filer.port.grpc", "volume.port", "volume.port.grpc"]
    names += ["master.port", "master.port.grpc", "admin.port"]
    inner = tuple(f"-{name}={port + offset}" for offset, name in enumerate(names))
    # its worker part dials admin.port + 10000 whatever admin.port.grpc says
    admin_grpc = port + len(names) - 1 + ADMIN_GRPC_OFFSET
    argv = (
        _program("weed"),
        "mini",
        f"-dir={options.home}/s3",
        f"-ip={LOOPBACK}",
        f"-ip.bind={LOOPBACK}",
        f"-bucket={BUCKET}",
        *inner,
        f"-admin.port.grpc={admin_grpc}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-webdav=false",
        "-admin.ui=false",
        "-master.telemetry=false",
        "-disableHttp=true",  # of filer and master: they would serve and delete objects without asking for the keys
    )
    signing = hashlib.sha256(f"volume {secrets.s3_secret_key}".encode()).hexdigest()  # the volume's HTTP needs it
    return Spec(
        name="s3",
        argv=argv,
        env={
            "AWS_ACCESS_KEY_ID": secrets.s3_access_key,
            "AWS_SECRET_ACCESS_KEY": secrets.s3_secret_key,
            "WEED_JWT_SIGNING_KEY": signing,
            "WEED_JWT_SIGNING_READ_KEY": signing,
        },
        port=port,
        ports=(*range(port, port + len(names)), admin_grpc),
        probe=Probe("s3", f"http://{LOOPBACK}:{port}"),
        start_deadline_s=60.0,
        memory_bytes=250 * MIB,
    )


def _prefect(options: UpOptions) -> Spec:
    port = options.ports["prefect"]
    return Spec(
        name="prefect",
        argv=(_program("prefect"), "server", "start", *_http(port)),
        # by default every web page that a browser on this machine shows could start flow runs and read all of them
        env={
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://{LOOPBACK}:{port},http://localhost:{port}",
            "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
        },
        port=port,
        ports=(port,),
        probe=Probe("http", f"http://{LOOPBACK}:{port}/api/health"),
        start_deadline_s=240.0,
        memory_bytes=350 * MIB,
        heavy=True,
    )


def _worker(options: UpOptions) -> Spec:
    url = f"http://{LOOPBACK}:{options.ports['prefect']}/api/work_pools/{WORK_POOL}"
    argv = (_program("prefect"), "worker", "start", "--pool", WORK_POOL, "--type", "process", "--name", "rl360-local")
    return Spec(
        name="worker",
        argv=argv,
        probe=Probe("worker", url),
        after=("prefect",),
        start_deadline_s=180.0,
        memory_bytes=650 * MIB,  # and one flow run of it
        sweep=False,
    )


def _deploy() -> Spec:
    """Waits for the pool that the worker makes, and applies `prefect.yaml` when it or the flows changed."""
    return Spec(
        name="deployments",
        argv=(sys.executable, "-m", "infra.local.deploy"),
        probe=Probe("exit"),
        after=("worker",),
        start_deadline_s=180.0,
        memory_bytes=0,
        one_shot=True,
    )


def _engines(options: UpOptions) -> list[Spec]:
    specs = []
    for index in range(options.engines):
        port = options.ports["engine"] + index
        engine = EngineOptions(
            model_dir=options.model_dir,
            port=port,
            seed=options.seed + index,
            routed_experts=options.routed_experts,
            strict=True,
        )
        specs.append(
            Spec(
                name=f"engine-{index}",
                argv=(sys.executable, "-m", "rl360.engines.launch", *engine.argv()),
                port=port,
                ports=(port,),
                probe=Probe("http", f"http://{LOOPBACK}:{port}/ping"),
                start_deadline_s=options.start_s,
                memory_bytes=1100 * MIB,
                heavy=True,
            )
        )
    return specs


def _gateway(options: UpOptions) -> Spec:
    port = options.ports["gateway"]
    argv: tuple[str, ...]
    argv = (_program("smg"), "launch", *_http(port), "--policy", "manual", "--assignment-mode", "min_load")
    argv += ("--prometheus-host", LOOPBACK, "--prometheus-port", str(port + 1), "--disable-tokenizer-autoload")
    argv += ("--enable-rl", "--health-check-endpoint", "/ping", "--health-check-interval-secs", "2")
    argv += ("--health-failure-threshold", "2", "--health-success-threshold", "1", "--cb-timeout-duration-secs", "5")
    argv += ("--shutdown-grace-period-secs", "3", "--request-timeout-secs", "1800", "--log-level", "warn")
    return Spec(
        name="gateway",
        argv=argv,
        port=port,
        ports=(port, port + 1),
        probe=Probe("http", f"http://{LOOPBACK}:{port}/liveness"),
        start_deadline_s=60.0,
        stop_grace_s=5.0,
    )


def _fleet(options: UpOptions) -> Spec:
    """The engines' keeper. What it starts outlives it, and ends with the instance."""
    return Spec(
        name="fleet",
        argv=(sys.executable, "-m", "rl360.cli", "fleet", "keep", "--start-s", f"{options.start_s:g}"),
        probe=Probe("fresh", f"{options.home}/fleet.json"),
        after=("s3", "gateway"),
        start_deadline_s=60.0,
        memory_bytes=110 * MIB,
        sweep=False,
    )


def _sessions(options: UpOptions) -> list[Spec]:
    upstream = f"http://{LOOPBACK}:{options.ports['gateway']}"
    specs = []
    for index in range(options.sessions):
        port = options.ports["sessions"] + index
        argv = (sys.executable, "-m", "rl360.cli", "sessions", "serve", *_http(port), "--upstream", upstream)
        # no draining: on a laptop engines and tasks go down with it
        argv += ("--store", "--drain-s", "0", *(part for name in options.matchers for part in ("--matcher", name)))
        argv += ("--return-routed-experts",) if options.routed_experts else ()
        specs.append(
            Spec(
                name=f"sessions-{index}",
                argv=(*argv, "--model", options.model_dir),
                port=port,
                ports=(port,),
                probe=Probe("http", f"http://{LOOPBACK}:{port}/health"),
                after=("gateway",),
                memory_bytes=250 * MIB,
            )
        )
    return specs


def judge_key(options: UpOptions) -> dict[str, str]:
    """The variable with the judge's key, as it is set here: for the sandbox server and who starts it again."""
    name = options.judge_key_env
    if name and not os.environ.get(name):
        raise BadInput(f"--judge-key-env {name}: not set; export it first, or leave the option out")
    return {name: os.environ[name]} if name else {}


def _sandbox(options: UpOptions) -> Spec:
    port = options.ports["sandbox"]
    promised(options.promise, BOUNDLESS)
    single = {"--judge-url": options.judge_url, "--judge-key-env": options.judge_key_env, "--promise": options.promise}
    given = [part for flag, value in single.items() if value for part in (flag, value)]
    for flag, values in (
        ("--agent", options.agents),
        ("--harness", options.harnesses),
        ("--harbor", [options.harbor] if options.harbor else []),
    ):
        given += [part for value in values for part in (flag, value)]
    return Spec(
        name="sandbox-0",
        argv=(sys.executable, "-m", "rl360.harbor.server", *_http(port), "--store", *given),
        env=judge_key(options),
        port=port,
        ports=(port,),
        probe=Probe("http", f"http://{LOOPBACK}:{port}/health"),
        memory_bytes=600 * MIB,  # and the sandboxes it runs
    )


def _trainer(options: UpOptions) -> Spec:
    port = options.ports["trainer"]
    argv: tuple[str, ...]
    argv = (sys.executable, "-m", "rl360.training.torchrun", "--nnodes", "1")
    argv += ("--nproc-per-node", str(options.trainer_ranks), "--max-restarts", "0")
    argv += ("--master-addr", LOOPBACK, "--master-port", str(port + 1), "-m", "rl360.training.service", *_http(port))
    return Spec(
        name="trainer",
        argv=argv,
        port=port,
        ports=(port, port + 1),
        probe=Probe("http", f"http://{LOOPBACK}:{port}/health"),
        after=("s3",),
        start_deadline_s=240.0,
        memory_bytes=(500 + 1000 * options.trainer_ranks) * MIB,
        heavy=True,
    )
