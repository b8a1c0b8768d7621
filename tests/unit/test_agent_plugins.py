"""The three layers of plug-ins: the examples of docs/agents.md run as they stand, and what cannot work is refused."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jinja2
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # helpers shared by the parts of the suite
from scripted_session import Fail, Say, ScriptedSessions

from infra.local.plan import UpOptions, _sandbox, base_env
from rl360.agents import bash_agent
from rl360.agents.base import AgentContext, AgentFailure, AgentMetrics
from rl360.agents.registry import agents_of
from rl360.agents.rollout import AttemptSpec, all_at_once, run_as_asked
from rl360.commands.services import _absolute
from rl360.config.run import RunConfig
from rl360.errors import BadInput
from rl360.harbor.protocol import RunRequest
from rl360.harbor.server import parse_args
from rl360.plugins import FOLDER, load_function
from rl360.policy.template import prompt_text
from rl360.sandboxes.provider import ExecResult

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "agents.md"


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The page's Python blocks as modules that can be imported; their names."""
    folder = tmp_path_factory.mktemp("examples")
    names = []
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        name = re.match(r"# (\w+)\.py\n", block)
        assert name is not None, "a block of the page names its file in its first line"
        (folder / f"{name[1]}.py").write_text(block)
        names.append(name[1])
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield names
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def sessions() -> Iterator[ScriptedSessions]:
    server = ScriptedSessions()
    server.start()
    yield server
    server.stop()


def act(path: str, url: str) -> tuple[Any, AgentMetrics, list[str]]:
    """Run the agent function at `path`: its end or failure, what it counted, the commands it ran."""
    ran: list[str] = []
    metrics = AgentMetrics()

    async def execute(command: str, timeout_s: float) -> ExecResult:
        ran.append(command)
        return ExecResult(0, b"", 0, 0.0)

    async def go() -> Any:
        agent = agents_of([f"mine={path}"])["mine"]
        async with httpx.AsyncClient() as http:
            deadline = asyncio.get_running_loop().time() + 10
            return await agent(AgentContext("Do it.", url, "openai/policy", {}, 4, deadline, execute, http, metrics))

    try:
        return asyncio.run(go()), metrics, ran
    except AgentFailure as failure:
        return failure, metrics, ran


def specs(groups: int, attempts: int) -> list[AttemptSpec]:
    return [AttemptSpec(f"g{g}-a{a}", f"g{g}", f"t{g}", "/t", "chores") for g in range(groups) for a in range(attempts)]


def test_the_page_has_an_example_of_each_layer(examples: list[str]) -> None:
    assert examples == ["one_script", "by_domain", "leaders_first"]


def test_what_the_demos_policy_is_to_be_asked_is_what_it_was_trained_on() -> None:
    (block,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    asked = json.loads(block)
    system, user = asked["messages"]
    assert system == {"role": "system", "content": bash_agent.SYSTEM_PROMPT} and asked["tools"] == [bash_agent.TOOL]
    template = jinja2.Environment().from_string((ROOT / "rl360/sessions/families/rl360_chat.jinja").read_text())
    assert template.render(**asked, add_generation_prompt=True) == prompt_text(user["content"])


def test_the_agent_function(examples: list[str], sessions: ScriptedSessions) -> None:
    end, metrics, ran = act("one_script:run", sessions.add("a", Say("echo hi > x")))
    assert (end.exit_status, metrics.turns, ran) == ("Submitted", 1, ["echo hi > x"])
    end, _, ran = act("one_script:run", sessions.add("b", Say("echo", "length")))
    assert (end.exit_status, ran) == ("SequenceLengthLimitExceeded", [])
    failure, _, _ = act("one_script:run", sessions.add("c", Fail(502, "bad_upstream")))
    assert isinstance(failure, AgentFailure) and failure.retryable


def test_the_generate_function(examples: list[str]) -> None:
    generate = load_function("by_domain:generate", "rollout.generate")
    request = RunRequest(instance_id="t", attempt_id="a", base_url="http://h")

    def asked(function: Any, domain: str) -> RunRequest:
        seen: list[RunRequest] = []

        async def run(order: RunRequest) -> Any:
            seen.append(order)
            return "the reply"

        assert asyncio.run(function(request, AttemptSpec("a", "g", "t", "/t", domain), run)) == "the reply"
        (order,) = seen
        return order

    assert asked(generate, "chores") == asked(run_as_asked, "chores") == request
    assert asked(generate, "human-eval") == request.model_copy(update={"agent_name": "bash_edit", "max_turns": 12})


@pytest.mark.parametrize("path", ["leaders_first:rollout", "rl360.agents.rollout:all_at_once"])
def test_rollout_functions_play_each_attempt_once(examples: list[str], path: str) -> None:
    function = load_function(path, "rollout.function")
    begun: list[str] = []
    ended: list[str] = []

    async def play(spec: AttemptSpec) -> None:
        begun.append(spec.slot_id)
        if path.startswith("leaders") and not spec.slot_id.endswith("a0"):
            assert f"{spec.group_id}-a0" in ended
        await asyncio.sleep(0)
        ended.append(spec.slot_id)

    planned = specs(3, 4)
    asyncio.run(function(planned, play))
    assert sorted(ended) == sorted(spec.slot_id for spec in planned) == sorted(begun)


def test_an_error_of_a_play_is_not_lost() -> None:
    async def play(spec: AttemptSpec) -> None:
        raise BadInput(spec.slot_id)

    with pytest.raises(ExceptionGroup):
        asyncio.run(all_at_once(specs(1, 2), play))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere:x", "agent 'nowhere:x' cannot be imported: No module named 'nowhere'; give module:function"),
        ("rl360.plugins:nothing", "has no attribute 'nothing'"),
        ("rl360.agents.bash_agent:TOOL", "is dict, not a function; give module:function"),
        ("rl360.plugins", "cannot be imported"),
        ("", "give NAME=WHAT"),
    ],
)
def test_paths_that_lead_nowhere(path: str, words: str) -> None:
    with pytest.raises(BadInput) as refused:
        agents_of([f"mine={path}" if path else "mine"])
    assert words in str(refused.value)


def asked_in(folder: Path, code: str, **env: str) -> str:
    """What a program says that is started in this folder, as the `rl360` of an environment is."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", FOLDER)}
    start = f"import sys; sys.path[0] = {str(ROOT)!r}; {code}"
    done = subprocess.run([sys.executable, "-c", start], cwd=folder, env=clean | env, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_a_module_of_the_folder_one_types_in_is_found_and_hides_no_other(tmp_path: Path) -> None:
    here, away = tmp_path / "here", tmp_path / "away"
    here.mkdir(), away.mkdir()
    (here / "mine.py").write_text("import json, orjson\ndef run(): ...\n")
    for name in ("json", "orjson", "httpx"):
        (here / f"{name}.py").write_text("raise SystemExit('hidden')")
    code = "from rl360.plugins import load_function; import rl360.errors as e\ntry:\n print(load_function('mine:run', 'agent').__module__)\nexcept e.BadInput as said:\n print(said)"  # noqa: E501
    assert asked_in(here, code) == "mine\n"
    assert asked_in(away, code, **{FOLDER: str(here)}) == "mine\n", "a service, which runs in another folder"
    told = asked_in(away, code)
    assert "agent 'mine:run' cannot be imported: No module named 'mine'; give module:function, installed " in told
    assert "beside rl360, on PYTHONPATH, or in the folder where `rl360 up` and `rl360 run` are typed\n" in told


def test_up_tells_its_services_the_folder_it_was_typed_in_and_they_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.chdir(tmp_path)
    env = base_env(UpOptions(home=str(tmp_path)), "i")
    assert env[FOLDER] == str(tmp_path)
    monkeypatch.setenv(FOLDER, env[FOLDER])
    monkeypatch.chdir(ROOT)
    assert base_env(UpOptions(home=str(tmp_path)), "i")[FOLDER] == str(tmp_path), "the supervisor's folder is another"


def test_a_harness_file_is_where_this_directory_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # services run in another
    assert _absolute("mine=h.toml") == f"mine={tmp_path}/h.toml" and _absolute("mine=/h.toml") == "mine=/h.toml"
    assert _absolute("mine") == "mine", "refused by its own words, which say what is missing"


def test_names_are_given_once() -> None:
    assert sorted(agents_of()) == ["bash", "bash_edit"]
    for pairs in (["bash=rl360.agents.bash_agent:run"], ["=x:y"], ["a=rl360.agents.bash_agent:run"] * 2):
        with pytest.raises(BadInput, match="give NAME=WHAT with a name that is new"):
            agents_of(pairs)


@pytest.mark.parametrize(
    "rollout", [{"agent": "a b"}, {"agent": ""}, {"generate": "x"}, {"function": "x y:z"}, {"generate": "1:f"}]
)
def test_a_config_that_names_no_function_is_refused(rollout: dict[str, str]) -> None:
    ((name, value),) = rollout.items()
    with pytest.raises(BadInput, match=rf"rollout.{name}: .*{re.escape(value)}"):
        RunConfig.parse({"rollout": rollout})


def test_what_up_is_given_reaches_the_sandbox_server(tmp_path: Path) -> None:
    given = {
        "agents": ("one=one_script:run",),
        "harnesses": ("two=/h/two.toml", "three=/h/3.toml"),
        "harbor": "/harbor",
        "promise": "50%",
    }
    argv = _sandbox(UpOptions(home=str(tmp_path), **given)).argv
    args = parse_args(list(argv[argv.index("rl360.harbor.server") + 1 :]))
    assert (args.agent, args.harness) == (list(given["agents"]), list(given["harnesses"]))
    assert (args.harbor, args.promise) == (Path("/harbor"), "50%")
    with pytest.raises(BadInput, match="'half': give cpus, memory_mb"):
        _sandbox(UpOptions(home=str(tmp_path), promise="half"))
