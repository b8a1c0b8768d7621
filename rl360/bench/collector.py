"""One worker of the collection row: a session server whose sessions are finished when they are created.

`python -m rl360.bench.collector --port P` plays the synthetic trajectory once; every `POST /sessions` then makes a
session that holds its turns. Merging, encoding and writing to the store are the session server's own. Objects go to
the bucket that the first part of their key names, so that a bucket can be deleted when it is full.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass
from typing import Any

import uvicorn

from rl360.bench.processes import LOOPBACK
from rl360.bench.shape import FULL
from rl360.bench.trajectory import draw, model_dir, new_session, play, routing_shape
from rl360.config.services import Services, load_services, service_token
from rl360.sessions.core import Session, SessionSpec
from rl360.sessions.families.registry import load_template
from rl360.sessions.registry import Limits, Registry
from rl360.sessions.routes import Service, create_app
from rl360.sessions.upstream import Upstream
from rl360.store.object_store import ObjectStore


def bucket(services: Services, name: str) -> ObjectStore:
    """The store of the running services, another bucket of it."""
    secrets = services.secrets()
    return ObjectStore(services.s3_endpoint, name, secrets.s3_access_key, secrets.s3_secret_key, timeout_s=120.0)


class Buckets(ObjectStore):
    """An object store whose bucket is the run's name in the key."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._known: dict[str, ObjectStore] = {}
        self.endpoint_url, self.bucket = services.s3_endpoint, "bench-*"

    def _of(self, key: str) -> ObjectStore:
        name = key.partition("/")[0]
        if name not in self._known:
            self._known[name] = bucket(self._services, name)
        return self._known[name]

    def put_once(self, key: str, data: bytes) -> bool:
        return self._of(key).put_once(key, data)

    def get(self, key: str) -> bytes:
        return self._of(key).get(key)


@dataclass
class Finished(Registry):
    """Gives every new session the turns of `played`. Arrays are shared: they are never written again."""

    played: Any = None

    def create(self, spec: SessionSpec) -> Session:
        session = super().create(spec)
        own = ("session_id", "spec")
        state = {name: copy.copy(value) for name, value in vars(self.played).items() if name not in own}
        vars(session).update(state)
        return session


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rl360.bench.collector", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    with model_dir(FULL) as model:
        template = load_template(model)
    session = play(FULL, draw(FULL), new_session(FULL, template)).session
    limits = Limits(total_bytes=1 << 50)  # the arrays are there once, and counted once per session
    service = Service(
        template=template,
        registry=Finished(template, limits, routing=routing_shape(FULL), played=session),
        upstream=Upstream(f"http://{LOOPBACK}:9", template.vocab_size, template.stop_ids, 1.0),
        token=service_token(),
        store_in=Buckets(load_services()),
    )
    uvicorn.run(create_app(service), host=LOOPBACK, port=options.port, access_log=False, log_level="warning")


if __name__ == "__main__":
    main()
