"""The bodies of the session server's HTTP surface, as pydantic models.

Those of the operator's path are what the server itself reads. Those of the agent's path (`Chat...`, `Message...`) are
for the OpenAPI page and its tests: there, speed matters and `wire.py` and `anthropic.py` read the JSON.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rl360.sessions.merge import Pick
from rl360.sessions.turns import MAX_VERSION, Sampling, SamplingPolicy, SessionMode, SessionSpec

_Id = Field(min_length=1, max_length=200)
_ATTEMPT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class SamplingBody(_Body):
    """Sampling parameters of a session; all must be stated."""

    model_config = ConfigDict(strict=True)

    temperature: float = Field(ge=0.0, le=2.0)
    top_p: float = Field(gt=0.0, le=1.0)
    top_k: int = Field(ge=-1, le=1 << 30, description="-1 is off")
    max_new_tokens: int = Field(ge=1, le=1 << 20, description="sampled tokens per turn")

    @field_validator("top_k")
    @classmethod
    def _not_zero(cls, value: int) -> int:
        if value == 0:
            raise ValueError("top_k 0 samples nothing; use -1 for off, or at least 1")
        return value


class CreateBody(_Body):
    """One attempt's session. The same body finds the same session while it lives, if it names a weight version."""

    model_config = ConfigDict(strict=True)

    attempt_id: str = Field(
        min_length=1,
        max_length=200,
        description="names the object that its samples are stored in",
        json_schema_extra={"pattern": f"^{_ATTEMPT_ID.pattern}$"},
    )
    group_id: str = _Id
    task_id: str = _Id
    sampling: SamplingBody
    max_seq_len: int = Field(ge=2, le=1 << 24, description="tokens on one path, prompt included")
    expected_weight_version: str | None = Field(
        None, max_length=MAX_VERSION, description="null: any version is taken and recorded"
    )
    mode: Literal["linear", "tree"] = "linear"
    matcher: str = Field("strict", max_length=200, description="strict, loose_tool_calls, role_content or module:name")
    sampling_policy: Literal["pin", "record", "refuse"] = Field(
        "pin", description="sampling parameters a request names: ignored and counted, used and recorded, refused"
    )
    thinking: bool = Field(False, description="ask for a reasoning part, where the template has one")

    @field_validator("attempt_id")
    @classmethod
    def _names_an_object(cls, value: str) -> str:
        if not _ATTEMPT_ID.fullmatch(value):
            raise ValueError("use letters, digits, dot, underscore and hyphen, and begin with a letter or a digit")
        return value

    def to_spec(self) -> SessionSpec:
        return SessionSpec(
            attempt_id=self.attempt_id,
            group_id=self.group_id,
            task_id=self.task_id,
            sampling=Sampling(**self.sampling.model_dump()),
            max_seq_len=self.max_seq_len,
            expected_weight_version=self.expected_weight_version,
            mode=SessionMode(self.mode),
            matcher=self.matcher,
            sampling_policy=SamplingPolicy(self.sampling_policy),
            thinking=self.thinking,
        )


class CreateReply(_Body):
    session_id: str
    base_url: str = Field(description="what an OpenAI client takes; without /v1 what an Anthropic client takes")


class SessionRow(_Body):
    """One session in the list."""

    session_id: str
    attempt_id: str
    mode: str
    turns: int
    tokens: int
    sampled_tokens: int
    held_bytes: int
    in_flight: int
    idle_s: float
    sealed: bool
    stored: str | None = Field(description="the object its samples are in")


class SessionRows(_Body):
    sessions: list[SessionRow]


class StoreBody(_Body):
    """Where to write the samples: `{run}/steps/{step}/merged/{wave}/{attempt}.msgpack`."""

    key: str = Field(max_length=1024)
    pick: Pick = Field(Pick.LAST, description="branches that become samples")


class StoreOne(StoreBody):
    session_id: str = Field(max_length=200)


class StoreManyBody(_Body):
    """Sessions that ended within a moment of each other."""

    sessions: list[StoreOne] = Field(min_length=1, max_length=64)


class LeafColumns(_Body):
    """One list a count, one entry a sample (class `LeafCounts`)."""

    model_config = ConfigDict(extra="allow")

    tokens: list[int]
    trainable: list[int]
    sampled_tokens: list[int]
    dropped: list[dict[str, int]]
    versions: list[list[str]]


class StoreReply(_Body):
    """What a coordinator keeps of a session: under 2 KB."""

    key: str
    sha256: str
    size_bytes: int
    leaves: LeafColumns


class StoreManyReply(_Body):
    stored: list[StoreReply | None] = Field(description="one entry a session, in order")


class Health(_Body):
    status: Literal["ok", "draining"]
    service: Literal["sessions"]
    incarnation: str
    pid: int
    family: str
    upstream: str
    store: str | None = Field(description="where samples go; null: POST /store is refused")
    routing: list[int] | None = Field(description="layers, experts per token, experts; null: not asked for")
    matchers: list[str] = Field(description="that sessions may name")
    sessions: int
    created: int
    evicted_idle: int
    evicted_for_room: int
    in_flight: int
    held_bytes: int
    turns: int
    stored: int
    disconnects: int
    refused: dict[str, int] = Field(description="refusals by code since the process started")


class Drained(_Body):
    status: Literal["draining"]
    unfinished: int = Field(description="sessions that are neither stored nor deleted")


class ErrorDetail(_Body):
    message: str
    type: str
    code: str
    param: None = None
    sampled_tokens: int | None = Field(None, description="of cannot_merge: all that the session sampled")


class Error(_Body):
    """Every refusal, in the OpenAI clients' shape. A refusal changes no session, but for what was sampled for it, which
    is counted."""

    error: ErrorDetail


class AnthropicErrorDetail(_Body):
    type: str
    message: str
    code: str
    details: dict[str, Any] | None = Field(None, description="of thread_unsupported_request: what a client looks for")


class AnthropicError(_Body):
    """Every refusal on the Anthropic path, in that API's shape."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class _Open(BaseModel):
    """A body of a public protocol: fields that are not named here are counted in `ignored_params`."""

    model_config = ConfigDict(extra="allow")


class ChatBody(_Open):
    """OpenAI chat completion. The whole history, every time."""

    messages: list[dict[str, Any]] = Field(description="text and tool calls only; the last is user or tool")
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = Field(None, description="include_usage")
    model: str | None = Field(None, description="any name; the reply repeats it")
    n: Literal[1] | None = None
    tool_choice: Literal["auto"] | None = None
    temperature: float | None = Field(None, description="see sampling_policy of the session; top_p, top_k alike")
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


class ChatMessage(_Body):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(_Body):
    index: Literal[0]
    message: ChatMessage
    finish_reason: Literal["stop", "tool_calls", "length"]
    logprobs: None


class ChatUsage(_Body):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class ChatReply(_Body):
    """With `stream: true` the same as chunks, after the turn was generated and recorded as a whole, and comments until
    then. A refusal after the first comment is an `error` event."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage


class MessagesBody(_Open):
    """Anthropic message. The whole history, every time."""

    messages: list[dict[str, Any]] = Field(description="blocks: text, tool_use, tool_result, thinking")
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = None
    model: str | None = Field(None, description="any name; the reply repeats it")
    max_tokens: int | None = Field(None, description="see sampling_policy of the session; temperature, ... alike")
    tool_choice: dict[str, Any] | None = Field(None, description='{"type": "auto"} only')


class MessagesUsage(_Body):
    input_tokens: int
    cache_read_input_tokens: int | None
    cache_creation_input_tokens: int
    output_tokens: int


class MessagesReply(_Body):
    """With `stream: true` the same as events, after the turn was generated and recorded as a whole, and pings until
    then. A refusal after the first ping is an `error` event."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "tool_use", "max_tokens"]
    stop_sequence: None
    usage: MessagesUsage


class CountReply(_Body):
    input_tokens: int


class ModelsReply(_Open):
    object: Literal["list"]
    data: list[dict[str, Any]]
