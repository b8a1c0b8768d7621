"""Does a running engine take a family's ids the way a session relies on? A few turns through `/generate`.

Each row is one fact: held, broken, or not seen (an untrained model never ends a turn by itself; an engine may offer no
`/tokenize`). Nothing is changed on the engine. An engine that cannot be asked at all is a `ServiceError`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from rl360.engines.health import headers_for
from rl360.errors import BadInput, ServiceError
from rl360.sessions.families.base import ChatTemplate
from rl360.sessions.families.check import TOOLS
from rl360.sessions.messages import Message

_OPENING = (Message("system", "Use the tools."), Message("user", "List the files, then say done."))
_PLAIN = "Files: a.txt, naïve 漢字 🙂\r\n\tdone  (3 of 10)"
_FORCE = 100.0  # logit bias that leaves an engine no choice


@dataclass(frozen=True)
class Row:
    """One fact. `holds` None: it could not be seen, and `detail` says why."""

    name: str
    holds: bool | None
    detail: str


@dataclass(frozen=True)
class _Answer:
    """What `/generate` gave for `sent` ids: `problem` is the first thing that is not as asked."""

    sent: list[int]
    ids: list[int]
    reason: str
    cached_tokens: int
    text: str
    problem: str | None


class _Engine:
    def __init__(self, url: str, http: httpx.Client) -> None:
        self._url = url.rstrip("/")
        self._http = http

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """(status, decoded body or None)."""
        content = None if body is None else orjson.dumps(body)
        headers = {"content-type": "application/json"} | headers_for(self._url)
        try:
            reply = self._http.request(method, self._url + path, content=content, headers=headers)
        except (httpx.UnsupportedProtocol, httpx.InvalidURL):
            raise BadInput(f"engine {self._url!r} is not an address; use http://HOST:PORT") from None
        except httpx.HTTPError as error:
            raise ServiceError(f"engine {self._url}{path}: no answer ({type(error).__name__})") from None
        try:
            return reply.status_code, orjson.loads(reply.content)
        except orjson.JSONDecodeError:
            return reply.status_code, None

    def generate(self, ids: list[int], stop_ids: tuple[int, ...], **sampling: Any) -> _Answer:
        params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop_token_ids": list(stop_ids), **sampling}
        params |= {"ignore_eos": False, "skip_special_tokens": False, "no_stop_trim": True}
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "logprob_start_len": -1}
        status, reply = self.ask("POST", "/generate", {**body, "return_prompt_token_ids": True})
        if status != 200 or not isinstance(reply, dict) or not isinstance(reply.get("meta_info"), dict):
            raise ServiceError(f"engine {self._url}/generate: answered {status}: {str(reply)[:200]}")
        meta = reply["meta_info"]
        sampled = reply.get("output_ids") or []
        logprobs = [row[0] for row in meta.get("output_token_logprobs") or []]
        problem = None
        if reply.get("prompt_token_ids") != ids:
            problem = "the engine reports another prompt than the ids sent"
        elif len(logprobs) != len(sampled) or not all(isinstance(p, float) and math.isfinite(p) for p in logprobs):
            problem = f"{len(sampled)} ids sampled, {len(logprobs)} log-probabilities, or one is not finite"
        reason = str((meta.get("finish_reason") or {}).get("type"))
        return _Answer(ids, sampled, reason, int(meta.get("cached_tokens") or 0), str(reply.get("text")), problem)


def check_engine(template: ChatTemplate, url: str, deadline_s: float = 120.0, max_new_tokens: int = 64) -> list[Row]:
    """Ask the engine at `url`; every row that is false names what was seen."""
    timeout = httpx.Timeout(deadline_s, connect=5.0)
    with httpx.Client(timeout=timeout, verify=url.startswith("https"), trust_env=False) as http:
        engine = _Engine(url, http)
        status, info = engine.ask("GET", "/model_info")
        if status != 200 or not isinstance(info, dict):
            raise ServiceError(f"engine {url}/model_info: answered {status}; is this an SGLang engine?")
        about = f"{info.get('model_path')}, weights {info.get('weight_version')}"
        rows = [Row("engine answers", True, about), _tokenizer_row(engine, template)]
        rows += [_stop_row(engine, template, stop) for stop in template.stop_ids]
        status, server = engine.ask("GET", "/server_info")
        server = server if status == 200 and isinstance(server, dict) else {}
        for thinking in template.thinking_modes:
            rows += _conversation(engine, template, thinking, server, max_new_tokens)
        return rows


def _tokenizer_row(engine: _Engine, template: ChatTemplate) -> Row:
    name = "engine's tokenizer agrees"
    status, reply = engine.ask("POST", "/tokenize", {"prompt": _PLAIN, "add_special_tokens": False})
    if status in (404, 405):
        return Row(name, None, "the engine has no /tokenize")
    theirs = reply.get("tokens") if isinstance(reply, dict) else reply
    ours = template.encode(_PLAIN)
    return Row(name, theirs == ours, f"{len(ours)} ids" if theirs == ours else f"{str(theirs)[:80]}, here {ours[:12]}")


def _stop_row(engine: _Engine, template: ChatTemplate, stop: int) -> Row:
    """A stop id forced by a logit bias: the turn must end with it, reported with its log-probability."""
    name = f"stop id {stop} {template.decode([stop])}"
    prompt = template.render_prompt(_OPENING, TOOLS).tolist()
    bias = {str(stop): _FORCE}
    answer = engine.generate(prompt, template.stop_ids, max_new_tokens=4, logit_bias=bias)
    seen = answer.problem or f"sampled {answer.ids}, finish_reason {answer.reason}"
    return Row(name, answer.problem is None and answer.ids == [stop] and answer.reason == "stop", seen)


def _conversation(
    engine: _Engine, template: ChatTemplate, thinking: bool, server: dict[str, Any], max_new_tokens: int
) -> list[Row]:
    """Two turns in one thinking mode."""
    mode = ", thinking" if thinking else ""
    stops = template.stop_ids
    first = engine.generate(
        template.render_prompt(_OPENING, TOOLS, thinking).tolist(), stops, max_new_tokens=max_new_tokens
    )
    parsed = template.parse_assistant(first.ids, TOOLS, thinking)
    ended = first.ids[-1:] if first.reason == "stop" else []
    last_id = ended[0] if ended and ended[0] in stops else stops[0]
    held = first.sent + first.ids + ([] if ended else [last_id])  # a cut turn is ended here, for the check alone
    new = [Message("tool", "a.txt") for _ in parsed.tool_calls] or [Message("user", "Go on.")]
    delta = template.render_delta(last_id, new, thinking).tolist()
    second = engine.generate(held + delta, stops, max_new_tokens=max_new_tokens)
    rows = [_turn_row(f"turn {n}{mode}", template, turn, thinking) for n, turn in ((1, first), (2, second))]
    name = f"turn 2 continues a cached prefix{mode}"
    if server.get("disable_radix_cache"):
        return [*rows, Row(name, None, "the engine runs without a prefix cache")]
    page = max(1, int(server.get("page_size") or 1))
    expected = (len(first.sent) + len(first.ids) - 1) // page * page  # the last sampled id was never fed back
    detail = f"{second.cached_tokens} of {len(held)} held ids were cached, expected at least {expected}"
    return [*rows, Row(name, second.cached_tokens >= expected, detail)]


def _turn_row(name: str, template: ChatTemplate, turn: _Answer, thinking: bool) -> Row:
    """Echo, log-probabilities, where the stop id stands, the engine's text, and reading the turn."""
    stops = [i for i, token in enumerate(turn.ids) if token in template.stop_ids]
    expected = [len(turn.ids) - 1] if turn.reason == "stop" else []
    problem = turn.problem
    if problem is None and (turn.reason not in ("stop", "length") or stops != expected):
        problem = f"finish_reason {turn.reason}, {len(turn.ids)} ids, stop ids at {stops}"
    ours, textless = template.decode(turn.ids), template.textless(turn.ids)
    if problem is None and not textless and turn.text.rstrip("\ufffd") != ours.rstrip("\ufffd"):
        problem = f"the engine reads its ids as {turn.text[:60]!r}, here they are {ours[:60]!r}"
    if problem is not None:
        return Row(name, False, problem)
    parsed = template.parse_assistant(turn.ids, TOOLS, thinking)
    own = template.render_reply(parsed.message(), thinking).tolist()[:-1]
    same = own == turn.ids[: len(turn.ids) - len(stops)]
    calls = len(parsed.tool_calls)
    detail = f"{len(turn.ids)} ids, {turn.reason}, {calls} calls, {parsed.format_errors} format errors"
    detail += f", {textless} without text" if textless else ""
    return Row(name, True, f"{detail}, {'in' if same else 'not in'} the template's own spelling")
