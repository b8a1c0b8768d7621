"""Replies of the session server and bodies of agents, as the OpenAPI page shows them; nothing is validated by these at
work, but tests hold the server to them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rl360.sessions.bodies import Body


class CreateReply(Body):
    session_id: str
    base_url: str = Field(description="what an OpenAI client takes; without /v1 what an Anthropic client takes")


class SessionRow(Body):
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


class SessionRows(Body):
    sessions: list[SessionRow]


class LeafColumns(Body):
    """One list a count, one entry a sample (class `LeafCounts`)."""

    model_config = ConfigDict(extra="allow")

    tokens: list[int]
    trainable: list[int]
    sampled_tokens: list[int]
    dropped: list[dict[str, int]]
    versions: list[list[str]]


class StoreReply(Body):
    """What a coordinator keeps of a session: under 2 KB."""

    key: str
    sha256: str
    size_bytes: int
    leaves: LeafColumns


class StoreManyReply(Body):
    stored: list[StoreReply | None] = Field(description="one entry a session, in order")


class Health(Body):
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


class Drained(Body):
    status: Literal["draining"]
    unfinished: int = Field(description="sessions that are neither stored nor deleted")


class ErrorDetail(Body):
    message: str
    type: str
    code: str
    param: None = None
    sampled_tokens: int | None = Field(None, description="of cannot_merge: all that the session sampled")


class Error(Body):
    """Every refusal, in the OpenAI clients' shape. A refusal changes no session, but for what was sampled for it, which
    is counted."""

    error: ErrorDetail


class AnthropicErrorDetail(Body):
    type: str
    message: str
    code: str
    details: dict[str, Any] | None = Field(None, description="of thread_unsupported_request: what a client looks for")


class AnthropicError(Body):
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


class ChatMessage(Body):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(Body):
    index: Literal[0]
    message: ChatMessage
    finish_reason: Literal["stop", "tool_calls", "length"]
    logprobs: None


class ChatUsage(Body):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class ChatReply(Body):
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


class MessagesUsage(Body):
    input_tokens: int
    cache_read_input_tokens: int | None
    cache_creation_input_tokens: int
    output_tokens: int


class MessagesReply(Body):
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


class CountReply(Body):
    input_tokens: int


class ModelsReply(_Open):
    object: Literal["list"]
    data: list[dict[str, Any]]
