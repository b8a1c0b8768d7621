"""Agents of the real Harbor, in its own Python 3.12 process, behind the same `/run` (docs/agents.md).

`place` makes its environment, `agent` is our side of it. `worker` and `sandbox` run in Harbor's process: they import
Harbor and the standard library, and nothing of ours but each other.
"""
