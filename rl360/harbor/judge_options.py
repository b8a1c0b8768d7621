"""The judge that a command line names: `--judge-url` and `--judge-key-env`, checked before anything starts."""

from __future__ import annotations

import asyncio
import os
from urllib.parse import SplitResult, urlsplit

import httpx

from rl360.errors import BadInput
from rl360.harbor.judge import Judge


def judge_address(url: str) -> SplitResult:
    """The parts of an address a judge may have. Raises `BadInput`, which repeats nothing that may be a secret."""
    with_secret = BadInput("--judge-url: no user, password or query; name the key's variable with --judge-key-env")
    try:
        parts = urlsplit(url)
        parts.port, httpx.URL(url).host  # raise for what no call could be sent to
    except (ValueError, httpx.InvalidURL) as error:
        raise with_secret if set("@?#") & set(url) else BadInput(f"--judge-url {url!r}: {error}") from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise with_secret
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInput(f"--judge-url {url.rpartition('@')[2]!r}: need http(s)://HOST[:PORT]/v1")
    return parts


def judge_at(url: str, key_env: str, concurrency: int) -> Judge:
    """The judge at `url` (as OpenAI clients write their base_url), its key in the environment variable `key_env`
    (empty: none is sent), which is taken out of this process's environment. Raises `BadInput`."""
    parts = judge_address(url)
    key = os.environ.pop(key_env, "").strip() if key_env else ""
    if key_env and not (key.isascii() and key.isprintable() and key):
        raise BadInput(f"--judge-key-env {key_env}: unset or not a key; export it before the server starts")
    return Judge(f"{url.rstrip('/')}/chat/completions", parts.netloc, key, asyncio.Semaphore(concurrency))
