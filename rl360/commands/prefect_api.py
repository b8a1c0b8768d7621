"""The few calls the command line makes to Prefect's HTTP API.

rl360 never imports prefect (flows and tasks do): triggering and watching a flow run needs five requests.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

import httpx

from rl360.config.run import RunConfig
from rl360.errors import Rl360Error, ServiceError

_TIMEOUT_S = 20.0
_BUSY = frozenset({429, 502, 503})  # a Prefect whose SQLite is locked answers 503
_BUSY_PATIENCE_S = 60.0
_PAGE, _PAGES = 200, 10  # flow runs; 200 is the most that Prefect gives at once
ACTIVE = ("SCHEDULED", "PENDING", "RUNNING", "CANCELLING", "PAUSED")
TERMINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@dataclass(frozen=True)
class FlowRun:
    """One flow run as the API describes it."""

    id: str
    name: str
    state: str
    state_name: str
    message: str
    parameters: dict[str, Any]

    @property
    def run(self) -> str:
        """The run of rl360 that it belongs to; empty for flows of others."""
        return str(self._config.get("run", ""))

    @property
    def steps(self) -> int:
        """The steps that it was asked to reach."""
        return int(self._config.get("steps") or RunConfig().steps)

    @property
    def _config(self) -> dict[str, Any]:
        config = self.parameters.get("config")
        return config if isinstance(config, dict) else {}


class PrefectApi:
    """A synchronous client of one Prefect server."""

    def __init__(self, api_url: str, ui_url: str) -> None:
        self.ui_url = ui_url
        self._http = httpx.Client(base_url=api_url.rstrip("/"), timeout=_TIMEOUT_S)

    def trigger(self, deployment: str, parameters: dict[str, Any]) -> FlowRun:
        """Create a flow run of `flow/deployment`; parameters the form would refuse are refused here too."""
        found = self._call("GET", f"/deployments/name/{deployment}")
        body = {"parameters": parameters, "idempotency_key": uuid.uuid4().hex}  # asked twice, it is still one flow run
        try:
            return _flow_run(self._call("POST", f"/deployments/{found['id']}/create_flow_run", body))
        except ServiceError as error:
            if "Validation failed" not in str(error):
                raise
            raise Rl360Error(
                f"deployment {deployment} was made by another version of rl360 and does not know this config: run "
                f"`rl360 down` and `rl360 up`, on a cluster `prefect deploy --all` ({error})"
            ) from None

    def flow_run(self, flow_run_id: str) -> FlowRun:
        return _flow_run(self._call("GET", f"/flow_runs/{flow_run_id}"))

    def active(self) -> list[FlowRun]:
        """Flow runs that have not ended, newest first, without subflows and without what a schedule plans for later."""
        return self._filter({"state": {"type": {"any_": list(ACTIVE)}}}, "START_TIME_DESC")

    def newest_by_run(self) -> dict[str, FlowRun]:
        """The newest flow run of each run of rl360 among the last `_PAGES` * `_PAGE` flow runs, newest first."""
        found: dict[str, FlowRun] = {}
        for item in self._filter({}, "EXPECTED_START_TIME_DESC"):
            if item.run:
                found.setdefault(item.run, item)
        return found

    def newest_of(self, run: str) -> FlowRun | None:
        """The flow run of `run` that is at work, else its newest one."""
        return next((item for item in self.active() if item.run == run), None) or self.newest_by_run().get(run)

    def _filter(self, which: dict[str, Any], sort: str) -> list[FlowRun]:
        """Without what a schedule plans for later, which stands first and may fill pages."""
        found: list[FlowRun] = []
        body = {"flow_runs": {**which, "parent_task_run_id": {"is_null_": True}}, "sort": sort, "limit": _PAGE}
        for page in range(_PAGES):
            asked = self._call("POST", "/flow_runs/filter", body | {"offset": page * _PAGE})
            planned = [item.get("auto_scheduled") and item["state_name"] == "Scheduled" for item in asked]
            found += [_flow_run(item) for item, later in zip(asked, planned, strict=True) if not later]
            if len(asked) < _PAGE:
                break
        return found

    def cancel(self, flow_run_id: str, message: str) -> None:
        """Ask for an end. Not forced: Prefect itself turns it into `Cancelled` where no process has begun."""
        body = {"state": {"type": "CANCELLING", "name": "Cancelling", "message": message}}
        self._call("POST", f"/flow_runs/{flow_run_id}/set_state", body)

    def run_url(self, flow_run_id: str) -> str:
        return f"{self.ui_url.rstrip('/')}/runs/flow-run/{flow_run_id}"

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """One request, again while Prefect says that it is busy: each of ours may be sent twice."""
        give_up_at, pause_s = time.monotonic() + _BUSY_PATIENCE_S, 0.5
        try:
            response = self._http.request(method, path, json=body)
            if response.status_code == 403 and "CSRF" in response.text and self._fetch_csrf_token():
                response = self._http.request(method, path, json=body)
            while response.status_code in _BUSY and time.monotonic() < give_up_at:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 5.0)
                response = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise ServiceError(
                f"Prefect at {self._http.base_url} did not answer {method} {path} ({type(error).__name__}); "
                "is it up? try `rl360 status`"
            ) from None
        if response.status_code == 404:
            raise Rl360Error(f"Prefect knows nothing at {path}; `rl360 up` makes the deployments")
        if response.status_code >= 300:
            raise ServiceError(f"Prefect answered {response.status_code} to {method} {path}: {response.text[:300]}")
        return response.json() if response.content else None

    def _fetch_csrf_token(self) -> bool:
        """What a server with protection against foreign web pages wants beside each change; it lasts an hour."""
        client = uuid.uuid4().hex
        response = self._http.get("/csrf-token", params={"client": client})
        if response.status_code != 200:
            return False
        self._http.headers.update({"Prefect-Csrf-Token": response.json()["token"], "Prefect-Csrf-Client": client})
        return True


def _flow_run(item: dict[str, Any]) -> FlowRun:
    state = item.get("state") or {}
    return FlowRun(
        id=item["id"],
        name=item.get("name") or "",
        state=item.get("state_type") or "",
        state_name=item.get("state_name") or "",
        message=state.get("message") or "",
        parameters=item.get("parameters") or {},
    )
