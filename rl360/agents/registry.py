"""Which agents a sandbox server has: here alone one is chosen, by the name a request gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rl360.agents import bash_agent
from rl360.agents.base import Agent
from rl360.agents.harness import load_harness
from rl360.errors import BadInput
from rl360.plugins import load_function


def agents_of(
    functions: Sequence[str] = (), harnesses: Sequence[str] = (), harbor: Path | None = None
) -> dict[str, Agent]:
    """Ours, and those of the command line: NAME=MODULE:FUNCTION, programs as NAME=FILE.toml, and real Harbor's from its
    environment, whose process is then started. `BadInput` for a name that is none or is there twice."""
    agents: dict[str, Agent] = {"bash": bash_agent.run, "bash_edit": bash_agent.run_with_edit}
    if harbor is not None:
        from rl360.harbor.real.agent import harbor_agents

        agents |= harbor_agents(harbor)
    load: Callable[[str], Agent]
    for pairs, what, load in (
        (functions, "--agent", lambda path: load_function(path, "agent")),
        (harnesses, "--harness", load_harness),
    ):
        for pair in pairs:
            name, equals, path = pair.partition("=")
            if not name or not equals or name in agents:
                raise BadInput(f"{what} {pair!r}: give NAME=WHAT with a name that is new ({', '.join(agents)} are not)")
            agents[name] = load(path)
    return agents
