"""Apply `prefect.yaml` once per content: `python -m infra.local.deploy`, run by the supervisor after the worker.

It also ends, as Crashed, the flow runs that this server still believes to be at work from before this `up`: `up` starts
only when nothing of an earlier one is left, so their processes are gone, and left as Running they would hold their
deployment's one slot for ever.

Contract: exits 0 when the work pool exists and every deployment of prefect.yaml is registered with this server. The
deploy itself costs a Prefect start-up, so it is skipped when this home's stamp names the same content and the server
still holds as many deployments.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import psutil
import yaml

from infra.local.plan import REPO_ROOT, WORK_POOL, binary
from infra.local.state import write_atomic

STAMP_FILE = "deployments.stamp"
DEADLINE_S = 150.0
# whatever can change a deployment: its declaration, the flows' signatures, the parameters' schema
SOURCES = ("prefect.yaml", "flows/*.py", "rl360/config/*.py")


def content_digest(root: Path) -> str:
    """Digest of every file that shapes a deployment."""
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(root.glob(pattern)):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def declared(root: Path) -> int:
    """How many deployments prefect.yaml declares."""
    return len(yaml.safe_load((root / "prefect.yaml").read_text())["deployments"])


def _call(api_url: str, path: str, body: dict[str, object] | None = None, method: str | None = None) -> object:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **(_csrf_headers(api_url) if data is not None else {})}
    request = urllib.request.Request(api_url + path, data=data, headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=10.0) as reply:
        text = reply.read()
    return json.loads(text) if text else None


@functools.cache
def _csrf_headers(api_url: str) -> dict[str, str]:
    """What the server wants beside a change; nothing where it does not ask (422)."""
    client = uuid.uuid4().hex
    try:
        with urllib.request.urlopen(f"{api_url}/csrf-token?client={client}", timeout=10.0) as reply:
            return {"Prefect-Csrf-Token": json.loads(reply.read())["token"], "Prefect-Csrf-Client": client}
    except urllib.error.HTTPError as error:
        if error.code != 422:
            raise
        return {}


def wait_for_pool(api_url: str, deadline_s: float) -> None:
    """The worker makes the pool when it starts."""
    give_up_s = time.monotonic() + deadline_s
    while True:
        try:
            _call(api_url, f"/work_pools/{WORK_POOL}")
            return
        except (urllib.error.URLError, TimeoutError) as error:
            if time.monotonic() > give_up_s:
                raise SystemExit(f"work pool {WORK_POOL} did not appear within {deadline_s:.0f} s: {error}") from None
        time.sleep(0.5)


def one_at_a_time(api_url: str) -> None:
    """The pool runs one flow run at a time: two runs on one trainer and one set of engines would push over each other.
    A deployment's own limit counts only that deployment."""
    _call(api_url, f"/work_pools/{WORK_POOL}", {"concurrency_limit": 1}, method="PATCH")


def settle_orphans(api_url: str, before: datetime) -> int:
    """Set every active flow run whose last state is older than `before` to Crashed; returns how many."""
    body: dict[str, object] = {"flow_runs": {"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}}}
    settled = 0
    for run in cast(list[dict[str, Any]], _call(api_url, "/flow_runs/filter", body)):
        if datetime.fromisoformat(run["state"]["timestamp"].replace("Z", "+00:00")) >= before:
            continue
        state = {"type": "CRASHED", "name": "Crashed", "message": "its process ended with an earlier `rl360 up`"}
        _call(api_url, f"/flow_runs/{run['id']}/set_state", {"state": state, "force": True})
        print(f"flow run {run['name']} was left as {run['state']['name']}; set to Crashed")
        settled += 1
    return settled


def main() -> int:
    home, api_url = Path(os.environ["RL360_HOME"]), os.environ["PREFECT_API_URL"]
    if not (REPO_ROOT / "prefect.yaml").is_file():
        print(f"no prefect.yaml in {REPO_ROOT}: flows run from a checkout of the project", file=sys.stderr)
        return 1
    wait_for_pool(api_url, deadline_s=60.0)
    one_at_a_time(api_url)
    settle_orphans(api_url, datetime.fromtimestamp(psutil.Process(os.getppid()).create_time(), UTC))
    stamp, digest, want = home / STAMP_FILE, content_digest(REPO_ROOT), declared(REPO_ROOT)
    if stamp.is_file() and stamp.read_text().strip() == digest and _call(api_url, "/deployments/count", {}) == want:
        print(f"{want} deployments are up to date")
        return 0
    command = [binary("prefect") or "prefect", "--no-prompt", "deploy", "--all"]
    result = subprocess.run(command, cwd=REPO_ROOT, stdin=subprocess.DEVNULL, timeout=DEADLINE_S, check=False)
    have = _call(api_url, "/deployments/count", {})
    if result.returncode != 0 or not isinstance(have, int) or have < want:
        print(f"prefect deploy: exit {result.returncode}, {have} of {want} deployments", file=sys.stderr)
        return 1
    write_atomic(stamp, f"{digest}\n".encode())
    print(f"{want} deployments applied")
    return 0


if __name__ == "__main__":
    sys.exit(main())
