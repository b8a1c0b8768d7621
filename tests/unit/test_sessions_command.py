"""`rl360 sessions` as a person meets it: serving with the local home's token, and looking into servers that run."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest
from fastapi import FastAPI

from rl360.cli import main
from rl360.errors import BadInput
from rl360.sessions.server import listen
from tests.unit.sessions_data import BASH_SCHEMA, write_model_dir
from tests.unit.sessions_server import CREATE, TOKEN, Bench, serving, session_bench

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "Create hello.txt"}], "tools": [BASH_SCHEMA]}
ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with session_bench() as bench:
        yield bench


def write_token(path: Path, text: str = TOKEN) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o600)
    return path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A command line of `rl360 sessions` in a home with a token and nothing else: (exit code, stdout, stderr)."""
    monkeypatch.delenv("RL360_TOKEN_FILE", raising=False)
    monkeypatch.setenv("RL360_HOME", str(tmp_path))
    write_token(tmp_path / "token")

    def run_(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["sessions", *argv])
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out, told.err

    return run_


def test_list_and_show(bench: Bench, run: Run) -> None:
    session_id, _ = bench.create()
    message = bench.chat(session_id, CHAT).json()["choices"][0]["message"]
    bench.chat(session_id, {**CHAT, "messages": [*CHAT["messages"], message, {"role": "user", "content": "more"}]})
    code, out, _ = run("list", "--url", bench.url)
    assert code == 0 and session_id in out and CREATE["attempt_id"] in out and "1 sessions" in out
    code, out, _ = run("list", "--url", bench.url, "--json")
    (row,) = orjson.loads(out)
    assert (row["session_id"], row["server"], row["stored"]) == (session_id, bench.url, None)
    code, out, _ = run("show", session_id[:8], "--url", bench.url)
    assert code == 0 and "sampled_tokens" in out and "stop" in out
    assert [line.split()[:2] for line in out.splitlines()[-2:]] == [["1", "-"], ["2", "1"]]  # turn 2 after turn 1
    code, out, _ = run("show", session_id, "--url", bench.url, "--json")
    assert orjson.loads(out)["turns"][0]["sampled_tokens"] == 3
    code, _, err = run("show", "zzz", "--url", bench.url)
    assert (code, err.count("\n")) == (2, 1) and "0 sessions start with 'zzz'" in err


def test_the_first_session_of_the_docs(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "sessions.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    write_token(tmp_path / ".rl360" / "token")
    monkeypatch.chdir(tmp_path)
    with session_bench() as fresh:
        exec(code.replace("http://127.0.0.1:13200", fresh.url), {})
        code_, out, _ = run("list", "--url", fresh.url, "--json")
    (row,) = orjson.loads(out[out.index('[{"session_id"') :])
    assert (code_, row["attempt_id"], row["turns"], row["mode"]) == (0, "try-1", 2, "tree")


def test_a_server_that_cannot_be_asked_is_one_line_and_no_table(bench: Bench, run: Run, tmp_path: Path) -> None:
    other = str(write_token(tmp_path / "other", "another-token-of-16"))
    with serving(FastAPI(openapi_url=None)) as elsewhere:
        for argv, exit_code, said in (
            (("--url", "http://127.0.0.1:9"), 1, "no answer from http://127.0.0.1:9"),
            (("--url", bench.url, "--token-file", other), 1, "answered 401: it has another token; name its file with"),
            (("--url", elsewhere), 1, f"{elsewhere} is not a session server: it answered 404 to GET /sessions"),
            (("--url", "127.0.0.1"), 2, "--url '127.0.0.1' is not an address"),
            (("--url", bench.url, "--token-file", "/nothing"), 1, "cannot read the token in /nothing"),
        ):
            for command in (("list",), ("list", "--json"), ("show", "x")):
                code, out, err = run(*command, *argv)
                assert (code, out, err.count("\n")) == (exit_code, "", 1), (command, argv, out, err)
                assert said in err
    code, out, err = run("list")
    assert (code, out, err.count("\n")) == (1, "", 1) and "rl360 up" in err


def test_one_of_two_servers_that_is_away_hides_no_session_of_the_other(bench: Bench, run: Run, tmp_path: Path) -> None:
    services = dict.fromkeys(
        ("prefect_api_url", "prefect_ui_url", "s3_endpoint", "gateway_url", "trainer_url"), "http://x"
    )
    services |= dict.fromkeys(("s3_bucket", "model_dir"), "m") | {"home": str(tmp_path)}
    services |= {"engine_urls": ["http://x"], "sandbox_urls": ["http://x"]}
    services |= {"session_urls": ["http://127.0.0.1:9", bench.url]}
    (tmp_path / "services.json").write_bytes(orjson.dumps(services))
    secrets = orjson.dumps({"token": TOKEN, "s3_access_key": "a", "s3_secret_key": "b"})
    write_token(tmp_path / "secrets.json", secrets.decode())
    code, out, err = run("list")
    assert (code, err.count("\n")) == (1, 1) and "no answer from http://127.0.0.1:9" in err
    assert "SESSION" in out and out.endswith("sessions\n")


def test_serving_is_refused_in_one_line(run: Run, tmp_path: Path) -> None:
    model = str(write_model_dir(tmp_path / "model"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for argv, said in (
            (("--port", port), f"cannot listen on 127.0.0.1 port {port}: Address already in use; choose"),
            (("--host", "no.such.host.invalid"), "cannot listen on no.such.host.invalid port 13200: "),
            (("--host", "203.0.113.7"), "cannot listen on 203.0.113.7 port 13200: Cannot assign requested address"),
            (("--host", "a" * 70), "not a host's name"),
        ):
            code, out, err = run("serve", "--upstream", "http://127.0.0.1:9", "--model", model, *argv)
            assert (code, out, err.count("\n")) == (2, "", 1), err
            assert said in err and "--host and --port" in err
    (tmp_path / "token").unlink()
    code, out, err = run("serve", "--upstream", "http://127.0.0.1:9", "--model", model)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert f"no token: {tmp_path}/token" in err and "--token-file" in err


def test_it_listens_on_every_address_of_a_host() -> None:
    port = _free_port()
    listeners = listen("localhost", port)
    try:
        assert listeners and all(one.getsockname()[1] == port for one in listeners)
        with pytest.raises(BadInput, match="Address already in use"):
            listen("localhost", port)
    finally:
        for one in listeners:
            one.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
