"""The API server of the Kubernetes cluster we run in: where it is, who we are. Engines and sandboxes are pods there."""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl360.errors import Rl360Error, ServiceError
from rl360.http_api import Api, Endpoint

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PAGE = 500  # pods of one answer of a list


@dataclass(frozen=True)
class Cluster:
    """Where the API server is and who we are there. The token is read from its file at each call, for it rotates."""

    url: str
    namespace: str
    token_path: Path
    ca_path: Path | None = None

    @classmethod
    def of_pod(cls, env: Mapping[str, str], account: Path = ACCOUNT) -> Cluster:
        """What Kubernetes gives every pod."""
        host, port = env.get("KUBERNETES_SERVICE_HOST"), env.get("KUBERNETES_SERVICE_PORT")
        if not host or not port:
            raise Rl360Error(
                "kubernetes: KUBERNETES_SERVICE_HOST and _PORT are not set; run this in a pod "
                "(infra/kubernetes/fleet.yaml, sandboxes.yaml)"
            )
        try:
            namespace = (account / "namespace").read_text().strip()
        except OSError as error:
            raise Rl360Error(f"kubernetes: no service account in {account} ({error.strerror})") from None
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port}", namespace, account / "token", account / "ca.crt")

    def headers(self) -> dict[str, str]:
        try:
            token = self.token_path.read_text().strip()
        except OSError as error:
            raise Rl360Error(f"kubernetes: no token in {self.token_path} ({error.strerror})") from None
        return {"authorization": f"Bearer {token}"}

    def ssl_context(self) -> ssl.SSLContext | None:
        return ssl.create_default_context(cafile=str(self.ca_path)) if self.ca_path else None

    def endpoint(self, hints: Mapping[int, str]) -> Endpoint:
        own = {401: f"the token in {self.token_path} is not taken"}
        ca_path = str(self.ca_path) if self.ca_path else None
        name = f"API server {self.url}"
        return Endpoint(name, self.url, self.headers, ca_path, hints={**own, **hints}, absent=_absent)


def _absent(body: Mapping[str, Any]) -> bool:
    return (body.get("kind"), body.get("reason")) == ("Status", "NotFound")


async def pods(api: Api, cluster: Cluster, selector: str, deadline_s: float) -> list[dict[str, Any]]:
    """All pods of the namespace with these labels, page by page."""
    until = time.monotonic() + deadline_s
    found: list[dict[str, Any]] = []
    params = {"labelSelector": selector, "limit": str(PAGE)}
    while True:
        left = max(0.1, until - time.monotonic())
        path = f"/api/v1/namespaces/{cluster.namespace}/pods"
        reply = await api.call("GET", path, left, params=params, also=(410,))
        if reply.status_code == 410 and params.pop("continue", "") and time.monotonic() < until:
            found = []  # the list is too old to go on with: from the start
            continue
        body = api.document(reply)
        items = body.get("items") if isinstance(body, dict) else None
        if not isinstance(items, list):
            raise ServiceError(f"API server {cluster.url}: the list of pods has no items (status {reply.status_code})")
        found += items
        more = (body.get("metadata") or {}).get("continue")
        if not more:
            return found
        params["continue"] = str(more)


def states(pod: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What the kubelet says of each container: one of waiting, running, terminated; none before it says."""
    told = (pod.get("status") or {}).get("containerStatuses") or []
    return {str(item.get("name")): item.get("state") or {} for item in told}
