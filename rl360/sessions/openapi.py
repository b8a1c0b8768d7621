"""The endpoints of a session server, stated once: its routes and its OpenAPI document are both made from `ENDPOINTS`.

`/docs` is that document as one page without scripts or anything from elsewhere: it is read where there is no network.
"""

from __future__ import annotations

import functools
import html
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import orjson
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from rl360.sessions import bodies, described
from rl360.sessions.refusals import HTTP_STATUS, Refusal

_TURN = (
    *(Refusal.BAD_BODY, Refusal.PARAMS, Refusal.BAD_HISTORY, Refusal.TOOLS_CHANGED, Refusal.NOT_FOUND),
    *(Refusal.CUT_TURN, Refusal.LOST_RACE, Refusal.SEALED, Refusal.LENGTH, Refusal.OVER_BUDGET, Refusal.SLOW_BODY),
    *(Refusal.TOO_MANY, Refusal.BAD_MATCHER, Refusal.INTERNAL),
    *(Refusal.BAD_UPSTREAM, Refusal.NO_ENGINE, Refusal.WRONG_VERSION, Refusal.BAD_ROUTING, Refusal.NONFINITE),
    Refusal.SERVER_FULL,
)
_BODY = (Refusal.BAD_BODY, Refusal.OVER_BUDGET, Refusal.SLOW_BODY)
_KNOWN = (Refusal.UNAUTHORIZED, Refusal.NOT_FOUND)
_AGENT = "/sessions/{session_id}/v1"


@dataclass(frozen=True)
class Endpoint:
    """One route. `name` is the method of `Service` that answers; `bearer` asks for the deployment's token, other
    routes under a session are open to whoever has its id."""

    name: str
    method: str
    path: str
    summary: str
    bearer: bool = True
    body: type[BaseModel] | None = None
    reply: type[BaseModel] | str | None = None
    status: int = 200
    refusals: tuple[Refusal, ...] = ()
    query: tuple[tuple[str, str], ...] = ()
    error: type[BaseModel] = described.Error


ENDPOINTS = (
    Endpoint(
        "create",
        "POST",
        "/sessions",
        "Open a session; the same body finds it again while it lives.",
        body=bodies.CreateBody,
        reply=described.CreateReply,
        refusals=(*_BODY, Refusal.UNAUTHORIZED, Refusal.DRAINING, Refusal.SERVER_FULL),
    ),
    Endpoint(
        "chat",
        "POST",
        f"{_AGENT}/chat/completions",
        "One turn, OpenAI format. `stream: true` gets server-sent events.",
        bearer=False,
        body=described.ChatBody,
        reply=described.ChatReply,
        refusals=_TURN,
    ),
    Endpoint(
        "messages",
        "POST",
        f"{_AGENT}/messages",
        "One turn, Anthropic format. `stream: true` gets server-sent events. x-api-key is not looked at.",
        bearer=False,
        body=described.MessagesBody,
        reply=described.MessagesReply,
        refusals=(*_TURN, Refusal.THREADS),
        error=described.AnthropicError,
    ),
    Endpoint(
        "count_tokens",
        "POST",
        f"{_AGENT}/messages/count_tokens",
        "Prompt tokens this Messages body would have; changes nothing and asks no engine.",
        bearer=False,
        body=described.MessagesBody,
        reply=described.CountReply,
        refusals=(*_BODY, Refusal.NOT_FOUND, Refusal.TOO_MANY, Refusal.LENGTH, Refusal.SERVER_FULL),
        error=described.AnthropicError,
    ),
    Endpoint(
        "models",
        "GET",
        f"{_AGENT}/models",
        "The one model of a session, as an OpenAI and an Anthropic list.",
        bearer=False,
        reply=described.ModelsReply,
        refusals=(Refusal.NOT_FOUND,),
    ),
    Endpoint(
        "rows",
        "GET",
        "/sessions",
        "Every session here, the longest unused first.",
        reply=described.SessionRows,
        refusals=(Refusal.UNAUTHORIZED,),
    ),
    Endpoint(
        "describe",
        "GET",
        "/sessions/{session_id}",
        "Counts of a session and one row a turn: no ids, no text.",
        reply="application/json",
        refusals=_KNOWN,
    ),
    Endpoint(
        "merged",
        "GET",
        "/sessions/{session_id}/merged",
        "The samples of a session: msgpack, or JSON with `Accept: application/json`.",
        reply="application/msgpack",
        refusals=(*_KNOWN, Refusal.BAD_BODY, Refusal.CANNOT_MERGE),
        query=(("pick", "last (default), roots or all"),),
    ),
    Endpoint(
        "store",
        "POST",
        "/sessions/{session_id}/store",
        "Seal the session, merge it and write its samples to the store. Asked again, it answers the same.",
        body=bodies.StoreBody,
        reply=described.StoreReply,
        refusals=(
            *(*_BODY, *_KNOWN, Refusal.CONFLICT, Refusal.CANNOT_MERGE),
            *(Refusal.NO_STORE, Refusal.STORE_UNAVAILABLE),
        ),
    ),
    Endpoint(
        "store_many",
        "POST",
        "/sessions/store",
        "The same for up to 64 sessions, side by side. Null for what is not stored: asked for alone, it says why.",
        body=bodies.StoreManyBody,
        reply=described.StoreManyReply,
        refusals=(Refusal.UNAUTHORIZED, *_BODY),
    ),
    Endpoint(
        "delete",
        "DELETE",
        "/sessions/{session_id}",
        "Forget a session; what is in flight is not recorded.",
        status=204,
        refusals=_KNOWN,
    ),
    Endpoint(
        "drain",
        "POST",
        "/drain",
        "No new sessions; the process ends once every session is stored or deleted, or at its drain deadline.",
        reply=described.Drained,
        refusals=(Refusal.UNAUTHORIZED,),
    ),
    Endpoint("health", "GET", "/health", "Liveness and counters.", bearer=False, reply=described.Health),
    Endpoint("document", "GET", "/openapi.json", "This document.", bearer=False, reply="application/json"),
    Endpoint("page", "GET", "/docs", "This document as a page.", bearer=False, reply="text/html"),
)


@functools.cache
def document_json() -> bytes:
    """The OpenAPI 3.1 document. Anyone may ask for it, so it is made once."""
    return orjson.dumps(_document())


@functools.cache
def page() -> bytes:
    """The document as HTML: endpoints with their bodies and refusals, then every schema."""
    return _page(_document()).encode()


def _document() -> dict[str, Any]:
    models = {model for e in ENDPOINTS for model in (e.body, e.reply, e.error) if isinstance(model, type)}
    ordered = sorted(models, key=lambda model: model.__name__)
    _, schemas = models_json_schema(
        [(model, "validation") for model in ordered], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rl360 session server",
            "version": version("rl360"),
            "description": "An agent's conversation held as token ids: agents speak OpenAI or Anthropic, the trainer "
            "gets exactly the ids the engine saw and sampled.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _content(model: type[BaseModel] | str) -> dict[str, Any]:
    if isinstance(model, str):
        return {model: {}}
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    replies: dict[str, Any] = {str(endpoint.status): {"description": "done"}}
    if endpoint.reply is not None:
        replies[str(endpoint.status)]["content"] = _content(endpoint.reply)
    for code in endpoint.refusals:
        status = str(HTTP_STATUS[code])
        refusal = replies.setdefault(status, {"description": "", "content": _content(endpoint.error)})
        refusal["description"] = ", ".join(filter(None, [refusal["description"], str(code)]))
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "responses": replies,
        "security": [{"bearer": []}] if endpoint.bearer else [],
    }
    parameters = [{"name": "session_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    parameters = parameters if "{session_id}" in endpoint.path else []
    parameters += [
        {"name": name, "in": "query", "required": False, "description": text, "schema": {"type": "string"}}
        for name, text in endpoint.query
    ]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(endpoint.body)}
    return operation


def _page(told: dict[str, Any]) -> str:
    schemas = told["components"]["schemas"]
    rows = []
    for path, operations in told["paths"].items():
        for method, operation in operations.items():
            rows.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            who = "bearer token" if operation["security"] else "no token"
            rows.append(f"<p>{html.escape(operation['summary'])} <i>({who})</i></p><ul>")
            rows += [
                f"<li>?{parameter['name']}= {html.escape(parameter['description'])}</li>"
                for parameter in operation.get("parameters", [])
                if parameter["in"] == "query"
            ]
            if "requestBody" in operation:
                rows.append(f"<li>body {_links(operation['requestBody'])}</li>")
            for status, reply in operation["responses"].items():
                rows.append(f"<li>{status} {html.escape(reply['description'])} {_links(reply)}</li>")
            rows.append("</ul>")
    for name, schema in schemas.items():
        text = html.escape(orjson.dumps(schema, option=orjson.OPT_INDENT_2).decode())
        rows.append(f"<h3 id='{name}'>{name}</h3><pre>{text}</pre>")
    info = told["info"]
    style = "body{font:15px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}pre{overflow:auto}"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{info['title']}</title><style>{style}</style>"
        f"<h1>{info['title']} {info['version']}</h1><p>{html.escape(info['description'])}</p>{''.join(rows)}</html>"
    )


def _links(reply: dict[str, Any]) -> str:
    parts = []
    for media, content in reply.get("content", {}).items():
        name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
        parts.append(f"<a href='#{name}'>{name}</a>" if name else media)
    return " ".join(parts)
