"""The API server of the Kubernetes cluster we run in: where it is, who we are. Engines and sandboxes are pods there."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl360.errors import Rl360Error
from rl360.http_api import Endpoint

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


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
