"""`rl360 sessions`: run a session server, and look into those that run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rl360.errors import BadInput, ServiceError

TokenFileOption = Annotated[
    Path | None,
    typer.Option(help="0600 file with the bearer token (default: $RL360_TOKEN_FILE, else `token` in $RL360_HOME)."),
]


def register(app: typer.Typer) -> None:
    """Add `rl360 sessions serve|list|show` to the command line."""
    group = typer.Typer(
        no_args_is_help=True, help="Session servers: run one, list and show the sessions of those that run."
    )
    group.command("serve")(serve)
    group.command("list")(list_sessions)
    group.command("show")(show)
    app.add_typer(group, name="sessions")


def serve(
    upstream: Annotated[str, typer.Option(help="URL of the gateway, or of one engine.")],
    model: Annotated[Path, typer.Option(help="Directory with tokenizer.json, config.json and the chat template.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Port to listen on.")] = 13_200,
    token_file: TokenFileOption = None,
    family: Annotated[
        str | None, typer.Option(help="Chat template family (default: recognised by the directory).")
    ] = None,
    store: Annotated[
        bool, typer.Option("--store", help="Take POST /sessions/ID/store: write samples to the S3 of $RL360_HOME.")
    ] = False,
    matcher: Annotated[
        list[str] | None, typer.Option(help="MODULE:FUNCTION that sessions may name as their matcher; repeatable.")
    ] = None,
    return_routed_experts: Annotated[
        bool, typer.Option("--return-routed-experts", help="Ask the engine for routed experts (R3; MoE only).")
    ] = False,
    deadline_s: Annotated[float, typer.Option(min=0.1, help="Seconds one generation may take.")] = 600.0,
    idle_ttl_s: Annotated[float, typer.Option(min=1.0, help="Forget sessions unused for this long.")] = 7200.0,
    dead_s: Annotated[
        float, typer.Option(min=0.0, help="Over --max-bytes, give up sessions unused for this long first.")
    ] = 600.0,
    max_bytes: Annotated[int, typer.Option(min=1, help="Memory of all sessions together.")] = 4 << 30,
    session_bytes: Annotated[int, typer.Option(min=1, help="Memory of one session.")] = 256 << 20,
    drain_s: Annotated[float, typer.Option(min=0.0, help="Seconds SIGTERM waits for unfinished sessions.")] = 600.0,
) -> None:
    """Run a session server: agents speak OpenAI or Anthropic to it, engines get and give token ids.

    SIGTERM or POST /drain: no new sessions, the process ends once the others are stored or deleted. The HTTP surface
    is described at /docs and /openapi.json.

    Example: rl360 sessions serve --upstream http://127.0.0.1:13100 --model DIR --port 13250
    """
    from rl360.sessions.registry import Limits
    from rl360.sessions.server import ServeOptions
    from rl360.sessions.server import serve as serve_sessions

    limits = Limits(idle_ttl_s=idle_ttl_s, dead_s=dead_s, session_bytes=session_bytes, total_bytes=max_bytes)
    serve_sessions(
        ServeOptions(
            upstream=upstream,
            model_dir=model,
            host=host,
            port=port,
            family=family,
            token_file=token_file,
            store=store,
            matchers=tuple(matcher or ()),
            return_routed_experts=return_routed_experts,
            deadline_s=deadline_s,
            drain_s=drain_s,
            limits=limits,
        )
    )


UrlOption = Annotated[
    str | None, typer.Option("--url", help="One session server (default: all that `rl360 up` started).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable.")]


def list_sessions(url: UrlOption = None, token_file: TokenFileOption = None, as_json: JsonOption = False) -> None:
    """Every session of the running session servers, the longest unused first. Exit 1 when a server does not answer.

    Example: rl360 sessions list
    """
    rows, answered, problems = _rows(url, token_file)
    if answered:
        typer.echo(json.dumps(rows)) if as_json else _table(rows)
    if problems:
        raise ServiceError("; ".join(problems))


def _table(rows: list[dict[str, Any]]) -> None:
    typer.echo(f"{'SESSION':<34}{'ATTEMPT':<28}{'MODE':<8}{'TURNS':>6}{'TOKENS':>9}{'KIB':>9}{'IDLE':>8}  STATE")
    for row in rows:
        state = "stored" if row["stored"] else "sealed" if row["sealed"] else "open"
        state += f", {row['in_flight']} in flight" if row["in_flight"] else ""
        typer.echo(
            f"{row['session_id']:<34}{row['attempt_id']:<28}{row['mode']:<8}{row['turns']:>6}{row['tokens']:>9}"
            f"{row['held_bytes'] >> 10:>9}{row['idle_s']:>7.0f}s  {state}"
        )
    typer.echo(f"{len(rows)} sessions")


def show(
    session_id: Annotated[str, typer.Argument(metavar="ID", help="A session's id, or the start of it.")],
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """One session: its counts, and a row a turn. No ids of tokens, no text.

    Example: rl360 sessions show 7Jq2
    """
    rows, _answered, problems = _rows(url, token_file)
    found = [row for row in rows if row["session_id"].startswith(session_id)]
    if not found and problems:
        raise ServiceError("; ".join(problems))
    if len(found) != 1:
        raise BadInput(f"{len(found)} sessions start with {session_id!r}; `rl360 sessions list` shows all")
    server = found[0]["server"]
    told = {**_get(server, f"/sessions/{found[0]['session_id']}", _headers(url, token_file)), "server": server}
    if as_json:
        typer.echo(json.dumps(told))
        return
    turns = told.pop("turns")
    for name, value in told.items():
        typer.echo(f"{name:<24} {json.dumps(value) if isinstance(value, dict) else value}")
    typer.echo(f"\n{'TURN':>4}{'AFTER':>6}{'PROMPT':>8}{'CACHED':>8}{'SAMPLED':>8}  FINISH  CALLS  SPELLING     WORKER")
    for number, turn in enumerate(turns, start=1):
        after = "-" if turn["parent"] is None else turn["parent"] + 1
        cached = "-" if turn["cached_tokens"] is None else turn["cached_tokens"]
        typer.echo(
            f"{number:>4}{after:>6}{turn['prompt_tokens']:>8}{cached:>8}{turn['sampled_tokens']:>8}  "
            f"{turn['finish_reason']:<8}{turn['tool_calls']:>5}  {turn['canonical']:<12} {turn['worker']}"
        )


def _rows(url: str | None, token_file: Path | None) -> tuple[list[dict[str, Any]], int, list[str]]:
    """(sessions with their `server`, the longest unused first; servers that answered; what is wrong with others)."""
    from rl360.config.services import load_services

    rows: list[dict[str, Any]] = []
    servers = [url] if url else load_services().session_urls
    headers, problems = _headers(url, token_file), []
    for at in servers:
        try:
            rows += [{**row, "server": at} for row in _get(at, "/sessions", headers)["sessions"]]
        except ServiceError as error:
            problems.append(str(error))
    return sorted(rows, key=lambda row: -row["idle_s"]), len(servers) - len(problems), problems


def _headers(url: str | None, token_file: Path | None) -> dict[str, str]:
    """The token of this home's services, unless another server or another file is named."""
    from rl360.config.services import load_services, service_token

    if url is None and token_file is None:
        return load_services().auth_headers()
    return {"Authorization": f"Bearer {service_token(token_file)}"}


def _get(at: str, path: str, headers: dict[str, str]) -> Any:
    """The reply of a session server; `ServiceError` with what to do when there is none."""
    import httpx

    try:
        reply = httpx.get(at.rstrip("/") + path, headers=headers, timeout=20.0, trust_env=False)
    except (httpx.UnsupportedProtocol, httpx.InvalidURL):
        raise BadInput(f"--url {at!r} is not an address; use http://HOST:PORT of a session server") from None
    except httpx.HTTPError as error:
        why = str(error) or type(error).__name__
        raise ServiceError(f"no answer from {at} ({why}); see `rl360 status` and `rl360 logs sessions-0`") from None
    if reply.status_code == 401:
        raise ServiceError(f"{at} answered 401: it has another token; name its file with --token-file")
    try:
        told = reply.json()
        if reply.status_code == 200 and ("sessions" in told or "session_id" in told):
            return told
        problem = told["error"]["message"] if told["error"]["code"] == "not_found" and path != "/sessions" else None
    except (ValueError, LookupError, TypeError):
        problem = None
    if problem is not None:
        raise ServiceError(f"{at}: {problem}")
    raise ServiceError(f"{at} is not a session server: it answered {reply.status_code} to GET {path}")
