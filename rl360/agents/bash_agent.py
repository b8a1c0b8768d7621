"""The bash agent: a tool `bash(command)`, a host-side loop over one session, messages appended verbatim. `bash_edit`
has `edit(path, old, new)` besides, which runs in the sandbox too (with its python3).

It ends when a turn has no tool call, when a turn was cut by length, or after `max_turns`. An observation is stdout and
stderr together, cut at the sandbox's output limit, then `(exit N)` when N is not 0; `ok` when there is nothing to show.
"""

from __future__ import annotations

import asyncio
import base64
import shlex
import time
from typing import Any

import httpx
import orjson

from rl360.agents.base import AgentContext, AgentEnd, AgentFailure
from rl360.harbor.outcome import ExitStatus
from rl360.sandboxes.provider import ExecResult

SYSTEM_PROMPT = "Use bash."
EDIT_PROMPT = "Use bash and edit."
EXEC_TIMEOUT_S = 30.0
MAX_REPLY_BYTES = 64 << 20  # above what any turn can be: no policy may say so much that it counts as malformed
RETRY_PAUSES_S = (0.25, 0.5, 1.0, 2.0)
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
EDIT_TOOL = {
    "type": "function",
    "function": {
        "name": "edit",
        "description": "Replace old, which must be in the file exactly once, by new. Without old: a new file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "old": {"type": "string"}, "new": {"type": "string"}},
            "required": ["path", "old", "new"],
        },
    },
}
# in the sandbox, where what a path leads to is the sandbox's own
EDIT_SCRIPT = """
import base64, json, os, sys
path, old, new = json.loads(base64.b64decode(sys.argv[1]))
try:
    if old:
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read()
        if text.count(old) != 1:
            sys.exit(f"old is in {path} {text.count(old)} times; it must be there once")
        new = text.replace(old, new)
    elif os.path.lexists(path):
        sys.exit(f"{path} exists; give old, the text to replace")
    else:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(new)
except (OSError, ValueError) as error:
    sys.exit(f"{path}: {error}")
"""
LENGTH_CODES = frozenset({"length", "cut_turn", "over_budget"})


async def run(context: AgentContext) -> AgentEnd:
    """Carry one attempt to its end."""
    return await _play(context, SYSTEM_PROMPT, [TOOL])


async def run_with_edit(context: AgentContext) -> AgentEnd:
    """The same with two tools."""
    return await _play(context, EDIT_PROMPT, [TOOL, EDIT_TOOL])


async def _play(context: AgentContext, prompt: str, tools: list[dict[str, Any]]) -> AgentEnd:
    messages = context.transcript
    messages += [{"role": "system", "content": prompt}, {"role": "user", "content": context.instruction}]
    while True:
        choice = await _sample(context, messages, tools)
        if choice is None:
            if context.metrics.turns == 0:  # no token was sampled: there is nothing to judge and nothing to train
                message = "the first prompt leaves no room for a reply; raise rollout.max_seq_len"
                raise AgentFailure(ExitStatus.GENERATION_ERROR, message, retryable=False)
            return AgentEnd(ExitStatus.LENGTH_LIMIT, "no room for another turn")
        context.metrics.turns += 1
        message = choice["message"]
        messages.append(message)
        if choice.get("finish_reason") == "length":
            return AgentEnd(ExitStatus.LENGTH_LIMIT, "a turn was cut by length")
        calls = message.get("tool_calls") or []
        if not calls:
            if "<tool_call>" in (message.get("content") or ""):
                context.metrics.format_errors += 1
            return AgentEnd(ExitStatus.SUBMITTED)
        for call in calls:
            content = await _act(context, call, tools)
            messages.append({"role": "tool", "tool_call_id": call.get("id", ""), "content": content})
        if context.metrics.turns >= context.max_turns:  # the last turn's calls still count as work done
            return AgentEnd(ExitStatus.TURN_LIMIT, f"{context.max_turns} turns")


async def _act(context: AgentContext, call: dict[str, Any], tools: list[dict[str, Any]]) -> str:
    """Run one tool call; what is no call of a tool with its strings is answered with an error, not repaired."""
    context.metrics.tool_calls += 1
    command = bash_command(call)
    if command is None and EDIT_TOOL in tools:
        command = edit_command(call)
    if command is None:
        context.metrics.format_errors += 1
        other = ", or edit with three: path, old, new" if EDIT_TOOL in tools else ""
        return f"error: call bash with one string, command{other}"
    started = time.monotonic()
    try:
        left = context.deadline - asyncio.get_running_loop().time()
        result = await context.exec(command, max(0.1, min(EXEC_TIMEOUT_S, left)))
    finally:
        context.metrics.env_execution_time_sum += time.monotonic() - started
    return observation(result)


def bash_command(call: dict[str, Any]) -> str | None:
    """The command of a well-formed bash call, else None."""
    given = _strings(call, "bash", ("command",))
    return given[0] if given is not None else None


def edit_command(call: dict[str, Any]) -> str | None:
    """The command that does a well-formed edit call, else None."""
    given = _strings(call, "edit", ("path", "old", "new"))
    if given is None or not given[0] or "\0" in given[0]:
        return None
    return shlex.join(["python3", "-c", EDIT_SCRIPT, base64.b64encode(orjson.dumps(given)).decode()])


def _strings(call: dict[str, Any], tool: str, names: tuple[str, ...]) -> list[str] | None:
    """The arguments `names` of a call of `tool` that has exactly these, all strings."""
    function = call.get("function") or {}
    if function.get("name") != tool:
        return None
    try:
        arguments = orjson.loads(function.get("arguments") or "")
    except orjson.JSONDecodeError:
        return None
    if not isinstance(arguments, dict) or arguments.keys() != set(names):
        return None
    values = [arguments[name] for name in names]
    return values if all(isinstance(value, str) for value in values) else None


def observation(result: ExecResult) -> str:
    """What the policy sees of a command."""
    text = result.output.decode("utf-8", "replace").replace("\x00", "\ufffd").rstrip("\n")
    if result.output_bytes > len(result.output):
        text += f"\n({result.output_bytes - len(result.output)} bytes cut)"
    if result.exit_code != 0:
        text += f"{chr(10) if text else ''}(exit {result.exit_code})"
    return text or "ok"


async def _sample(
    context: AgentContext, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> dict[str, Any] | None:
    """One turn from the session; None when the sequence is full. The same body again is safe: a failed call recorded
    nothing, and a turn whose reply was lost is sampled anew, its old tokens counted as `prefix_break`."""
    asked = {**context.sampling_params, "model": context.model, "messages": messages, "tools": tools}
    body = orjson.dumps(asked)
    started = time.monotonic()
    try:
        for pause_s in (*RETRY_PAUSES_S, None):
            asked_at = context.calls.asked()
            failure = await _post(context, body)
            if not isinstance(failure, AgentFailure):
                context.calls.answered(asked_at)
                return failure
            if failure.exit_status != ExitStatus.AGENT_TIMEOUT:
                context.calls.refused(asked_at, failure)
            if pause_s is None or not failure.retryable:
                raise failure
            context.metrics.retries += 1
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable: the last pause is None")
    finally:
        context.metrics.model_query_time_sum += time.monotonic() - started


async def _post(context: AgentContext, body: bytes) -> dict[str, Any] | AgentFailure | None:
    left = max(0.1, context.deadline - asyncio.get_running_loop().time())
    try:
        reply = await context.http.post(
            f"{context.base_url}/chat/completions",
            content=body,
            headers={"content-type": "application/json"},
            timeout=httpx.Timeout(left, connect=min(left, 10.0)),
        )
    except httpx.ConnectError as error:
        return AgentFailure(ExitStatus.SESSION_LOST, f"session not reachable: {error}", retryable=True)
    except httpx.ReadTimeout:  # of all the time that was left
        return AgentFailure(ExitStatus.AGENT_TIMEOUT, "the session had not answered at the deadline", retryable=False)
    except httpx.HTTPError as error:
        # the turn may have been recorded without us seeing it, so it is not asked for again
        return AgentFailure(ExitStatus.SESSION_LOST, f"session connection: {error!r}"[:300], retryable=False)
    if reply.status_code == 200:
        choice, tokens = _choice(reply.content)
        context.metrics.completion_tokens += tokens
        return choice
    return refusal(reply)


def _choice(content: bytes) -> tuple[dict[str, Any], int]:
    """The reply's one choice, and how many tokens were sampled for it."""
    try:
        if len(content) > MAX_REPLY_BYTES:
            raise ValueError(f"{len(content)} bytes, limit {MAX_REPLY_BYTES}")
        body = orjson.loads(content)
        choice = body["choices"][0]
        if choice["message"]["role"] != "assistant":
            raise ValueError("not an assistant message")
        return choice, int((body.get("usage") or {}).get("completion_tokens") or 0)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise AgentFailure(ExitStatus.GENERATION_ERROR, f"malformed completion: {error!r}", retryable=False) from None


def refusal(reply: httpx.Response) -> AgentFailure | None:
    """What a refused turn means: full (None), or infrastructure."""
    code, message = "", reply.text[:200]
    try:
        error = orjson.loads(reply.content)["error"]
        code, message = str(error.get("code") or ""), str(error.get("message") or "")[:300]
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        code = ""
    status = reply.status_code
    if code in LENGTH_CODES or status == 413:
        return None
    said = f"HTTP {status} {code}: {' '.join(message.split())}"
    if code == "no_engine":
        return AgentFailure(ExitStatus.NO_ENGINE, said, retryable=True)
    if status in (404, 409, 503):  # 503: the session server is full or leaving, and engines have no part in it
        return AgentFailure(ExitStatus.SESSION_LOST, said, retryable=status == 503)
    retryable = status >= 500 and code != "wrong_version" and reply.headers.get("x-should-retry") != "false"
    return AgentFailure(ExitStatus.GENERATION_ERROR, said, retryable=retryable)
