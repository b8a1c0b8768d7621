"""The engine launcher's flags and its stand-ins for GPU-only packages (the engine itself is a contract test)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rl360.engines.launch import doorkeeper, parse_options, sglang_argv
from rl360.engines.launchers.options import EngineOptions
from rl360.errors import BadInput


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def test_options_survive_their_own_command_line(model: str) -> None:
    options = EngineOptions(model_dir=model, port=13_000, seed=3, context_length=1024, routed_experts=True)
    assert parse_options(options.argv()) == (options, [])
    assert parse_options([*options.argv(), "--", "--log-level", "info"]) == (options, ["--log-level", "info"])


def test_a_directory_without_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse_options(["--model", str(tmp_path / "none"), "--port", "1"])
    assert exit_.value.code == 2
    assert "no config.json there" in capsys.readouterr().err


def test_cpu_and_gpu_differ_only_where_they_must(model: str) -> None:
    options = EngineOptions(model_dir=model, port=13_000, tp=4)
    cpu, gpu = sglang_argv(options, cpu=True), sglang_argv(options, cpu=False)
    assert "--sleep-on-idle" in cpu  # a scheduler that polls takes a core
    assert cpu[cpu.index("--tp-size") + 1] == "1"
    assert gpu[gpu.index("--tp-size") + 1] == "4"
    assert "--device" not in gpu
    for argv in (cpu, gpu):
        assert argv[argv.index("--host") + 1] == "127.0.0.1"
        assert "--enable-return-routed-experts" not in argv
    with_routing = sglang_argv(EngineOptions(model_dir=model, port=1, routed_experts=True), cpu=True)
    assert "--enable-return-routed-experts" in with_routing


def test_stand_ins_import_but_never_compute() -> None:
    """In a process of its own: they must not be there for the other tests."""
    code = """
import sys
from rl360.engines import cpu_shims
sys.meta_path.append(cpu_shims.StandInFinder(["sgl_kernel", "torchvision"]))
from sgl_kernel.scalar_type import scalar_types
from torchvision.transforms import InterpolationMode
import sgl_kernel.flash_attn
table = [scalar_types.uint4b8, InterpolationMode.BICUBIC]
class Sub(sgl_kernel.flash_attn.Anything): pass
for call in (sgl_kernel.rmsnorm, sgl_kernel.flash_attn.flash_attn_varlen_func, Sub):
    try:
        call(1, out=2)
    except cpu_shims.MissingKernel as error:
        print(error)
    else:
        raise SystemExit("computed something")
assert not hasattr(sgl_kernel, "__version__")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "sgl_kernel.rmsnorm needs a GPU build" in result.stdout


def test_a_real_package_wins_over_its_stand_in() -> None:
    from rl360.engines.cpu_shims import StandInFinder

    assert StandInFinder(["sgl_kernel"]).find_spec("json") is None
    assert StandInFinder(["sgl_kernel"]).find_spec("sgl_kernel.x") is not None


def test_an_engine_for_other_hosts_needs_a_token(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RL360_TOKEN_FILE", raising=False)
    monkeypatch.setenv("RL360_HOME", str(tmp_path))
    far = EngineOptions(model_dir=model, port=1, host="0.0.0.0", strict=True, hold_requests=7, hold_s=0.5)
    with pytest.raises(BadInput, match=r"--host 0\.0\.0\.0 without a token: .*RL360_TOKEN_FILE"):
        doorkeeper(far)
    assert doorkeeper(EngineOptions(model_dir=model, port=1)).bearer is None
    (tmp_path / "token").write_text("t" * 20)
    (tmp_path / "token").chmod(0o600)
    keeper = doorkeeper(far)
    assert keeper.bearer == b"Bearer " + b"t" * 20
    assert (keeper.strict, keeper.hold_requests, keeper.hold_s) == (True, 7, 0.5)


@pytest.mark.parametrize("flags", [["--hold-requests", "-1"], ["--hold-s", "-0.1"], ["--hold-s", "nan"]])
def test_limits_of_what_waits_are_checked(model: str, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--model", model, "--port", "1", *flags])
    assert "neither may be negative" in capsys.readouterr().err
