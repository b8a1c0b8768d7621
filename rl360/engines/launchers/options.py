"""What a launcher may say about an engine that it starts: the arguments of `python -m rl360.engines.launch`."""

from __future__ import annotations

from dataclasses import dataclass

# 32 concurrent requests of 512 tokens fill 16,384; twice that leaves room for the prefixes kept between turns.
MAX_TOTAL_TOKENS = 32_768
MAX_RUNNING_REQUESTS = 48
# At the door while a push has the engine. A session has one request: 8,192 on four engines. A push pauses no longer
# than push.deadline_s, by default this.
HOLD_REQUESTS, HOLD_S = 2048, 1200.0


@dataclass(frozen=True)
class EngineOptions:
    """What a caller may choose about an engine; everything else follows from the device."""

    model_dir: str
    port: int
    host: str = "127.0.0.1"
    seed: int = 0
    tp: int = 1
    context_length: int = 0  # 0: what the model's config says
    max_total_tokens: int = MAX_TOTAL_TOKENS
    max_running_requests: int = MAX_RUNNING_REQUESTS
    routed_experts: bool = False
    strict: bool = False  # the door admits by pushes alone
    hold_requests: int = HOLD_REQUESTS
    hold_s: float = HOLD_S
    weights_dir: str = ""  # empty: `engines/{port}` in the local home

    def argv(self) -> list[str]:
        """The command line that makes this engine."""
        argv = ["--model", self.model_dir, "--port", str(self.port), "--host", self.host, "--seed", str(self.seed)]
        argv += ["--tp", str(self.tp), "--context-length", str(self.context_length)]
        argv += [
            "--max-total-tokens",
            str(self.max_total_tokens),
            "--max-running-requests",
            str(self.max_running_requests),
        ]
        argv += ["--routed-experts"] if self.routed_experts else []
        argv += ["--door", "strict"] if self.strict else []
        argv += ["--hold-requests", str(self.hold_requests), "--hold-s", str(self.hold_s)]
        return argv + (["--weights-dir", self.weights_dir] if self.weights_dir else [])
