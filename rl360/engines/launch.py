"""Start one SGLang engine: the only launcher, on a laptop's CPU and on a GPU.

Contract: `python -m rl360.engines.launch --model DIR --port P` serves until it is signalled and takes its children with
it. Without a CUDA device the CPU stand-ins are installed first. A process that SGLang spawns re-runs this module under
the name `__mp_main__`, so they are installed at top level under both names. The GPU path is the plain SGLang server
with its own defaults; it has not been run on a GPU here. Around SGLang's app stands a door (`rl360.engines.door`): an
SGLang that it does not fit is not started.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rl360.engines.launchers.options import HOLD_REQUESTS, HOLD_S, MAX_RUNNING_REQUESTS, MAX_TOTAL_TOKENS, EngineOptions

if TYPE_CHECKING:
    from rl360.engines.door import Doorkeeper


def parse_options(argv: list[str]) -> tuple[EngineOptions, list[str]]:
    """Our own flags, and the rest (after `--`) for SGLang as they are."""
    parser = argparse.ArgumentParser(
        prog="rl360.engines.launch", description="Start one SGLang engine.", allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="directory of the model: config, safetensors, tokenizer")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampler")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (GPU only)")
    parser.add_argument("--context-length", type=int, default=0, help="longest sequence (0: the model's own limit)")
    parser.add_argument("--max-total-tokens", type=int, default=MAX_TOTAL_TOKENS, help="size of the KV pool on a CPU")
    parser.add_argument("--max-running-requests", type=int, default=MAX_RUNNING_REQUESTS)
    parser.add_argument("--routed-experts", action="store_true", help="return the experts each token was routed to")
    parser.add_argument(
        "--door",
        choices=("open", "strict"),
        default="open",
        help="strict: no generation until a push admits this engine, no control call without a push's epoch",
    )
    parser.add_argument(
        "--hold-requests", type=int, default=HOLD_REQUESTS, help="requests that may wait while a push has the engine"
    )
    parser.add_argument("--hold-s", type=float, default=HOLD_S, help="how long each of them may wait")
    parser.add_argument("--weights-dir", default="", help="where pulled weights are kept (default: in $RL360_HOME)")
    parser.add_argument("extra", nargs="*", help="flags for SGLang itself, after `--`")
    args = parser.parse_args(argv)
    if args.hold_requests < 0 or not args.hold_s >= 0:
        parser.error(f"--hold-requests {args.hold_requests} --hold-s {args.hold_s:g}: neither may be negative")
    if not (Path(args.model) / "config.json").is_file():
        parser.error(
            f"--model {args.model}: no config.json there; name a directory with a model in Hugging Face format"
        )
    options = EngineOptions(
        model_dir=args.model,
        port=args.port,
        host=args.host,
        seed=args.seed,
        tp=args.tp,
        context_length=args.context_length,
        max_total_tokens=args.max_total_tokens,
        max_running_requests=args.max_running_requests,
        routed_experts=args.routed_experts,
        strict=args.door == "strict",
        hold_requests=args.hold_requests,
        hold_s=args.hold_s,
        weights_dir=args.weights_dir,
    )
    return options, list(args.extra)


def sglang_argv(options: EngineOptions, cpu: bool) -> list[str]:
    """SGLang's own flags. No warm-up request: it costs seconds, and the first push confirms the engine anyway."""
    argv = ["--model-path", options.model_dir, "--host", options.host, "--port", str(options.port)]
    argv += ["--random-seed", str(options.seed), "--dtype", "bfloat16"]
    if options.context_length:
        argv += ["--context-length", str(options.context_length)]
    argv += [
        "--max-running-requests",
        str(options.max_running_requests),
        "--skip-server-warmup",
        "--log-level",
        "warning",
    ]
    if options.routed_experts:
        argv.append("--enable-return-routed-experts")
    if not cpu:
        return [*argv, "--tp-size", str(options.tp)]
    argv += [
        "--device",
        "cpu",
        "--tp-size",
        "1",
        "--attention-backend",
        "torch_native",
        "--sampling-backend",
        "pytorch",
    ]
    argv += [
        "--mem-fraction-static",
        "0.5",
        "--max-total-tokens",
        str(options.max_total_tokens),
        "--disable-overlap-schedule",
    ]
    # an idle scheduler polls in a busy loop otherwise: one whole core each
    return [*argv, "--sleep-on-idle"]


def prepare_cpu() -> None:
    """Environment and stand-ins of an engine process without a GPU; safe to run again in each child."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from rl360.engines import cpu_shims

    cpu_shims.install()
    if "--routed-experts" in sys.argv:
        cpu_shims.use_plain_host_memory()
    cpu_shims.start_children_by_fork()


def has_gpu() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def doorkeeper(options: EngineOptions) -> Doorkeeper:
    """Who stands at this engine's door."""
    from rl360.config.services import home_dir
    from rl360.engines.client import deployment_token
    from rl360.engines.door import Doorkeeper
    from rl360.engines.pull import Puller
    from rl360.errors import BadInput

    folder = Path(options.weights_dir) if options.weights_dir else home_dir() / "engines" / str(options.port)
    puller = Puller(folder.absolute(), Path(options.model_dir))
    token = deployment_token()
    if token is None and options.host not in ("127.0.0.1", "localhost", "::1"):
        raise BadInput(
            f"--host {options.host} without a token: its door would refuse every other host; name this deployment's "
            "token file in RL360_TOKEN_FILE"
        )
    hold = options.hold_requests
    return Doorkeeper(puller, strict=options.strict, token=token, hold_requests=hold, hold_s=options.hold_s)


def serve(argv: list[str], cpu: bool) -> None:
    """Run the engine in this process until a signal ends it."""
    options, extra = parse_options(argv)
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from rl360.engines.door import install
    from rl360.errors import Rl360Error

    os.environ.setdefault("SGLANG_TIMEOUT_KEEP_ALIVE", "75")  # a turn sent on a connection just closed is lost
    # SGLang's own /health generates: a second at least, and 20 while paused. The gateway asks it of each new worker
    os.environ.setdefault("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "false")
    server_args = prepare_server_args([*sglang_argv(options, cpu), *extra])
    try:
        install(server_args, doorkeeper(options))
    except Rl360Error as error:
        raise SystemExit(f"rl360 engine: {error}") from None
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ in ("__main__", "__mp_main__"):
    if __name__ == "__main__":
        parse_options(sys.argv[1:])  # refuse bad flags before the slow imports
    from rl360.training.loopback import keep_stores_on_their_host

    keep_stores_on_their_host()
    ON_CPU = not has_gpu()
    if ON_CPU:
        prepare_cpu()
    if __name__ == "__main__":
        serve(sys.argv[1:], ON_CPU)
