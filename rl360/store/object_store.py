"""The object store: S3, written once, with a deadline on every call.

Objects are immutable: `put_once` uses a conditional put, so of two writers exactly one wins and the other is told.
`put` overwrites and is only for objects that describe the present (state files), never for payloads.
Synchronous; call it from a thread (`asyncio.to_thread`) on an event loop.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import boto3
import botocore.config
import botocore.exceptions

from rl360.errors import CorruptObject, StoreUnavailable

if TYPE_CHECKING:
    from rl360.config.services import Services

_MISSING = {"NoSuchKey", "404", "NotFound"}
_EXISTS = {"PreconditionFailed", "412"}  # not 409: another conditional put is under way and may yet fail, so ask again


class ObjectStore:
    """One bucket of one S3 endpoint."""

    def __init__(
        self,
        endpoint_url: str,
        bucket: str,
        access_key: str,
        secret_key: str,
        *,
        timeout_s: float = 20.0,
        pool: int = 64,
    ) -> None:
        self.endpoint_url = endpoint_url
        self.bucket = bucket
        self._s3: Any = boto3.client(
            "s3",
            endpoint_url=endpoint_url,
            aws_access_key_id=access_key,
            aws_secret_access_key=secret_key,
            region_name="us-east-1",
            config=botocore.config.Config(
                connect_timeout=min(5.0, timeout_s),
                read_timeout=timeout_s,
                retries={"max_attempts": 3, "mode": "standard"},
                max_pool_connections=pool,
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    @classmethod
    def from_services(cls, services: Services, timeout_s: float = 20.0) -> ObjectStore:
        """The store of the running services; credentials come from the 0600 secrets file."""
        secrets = services.secrets()
        keys = secrets.s3_access_key, secrets.s3_secret_key
        return cls(services.s3_endpoint, services.s3_bucket, *keys, timeout_s=timeout_s)

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except botocore.exceptions.ClientError as error:
            code = _code(error)
            if code in _MISSING:
                raise KeyError(key) from None
            raise StoreUnavailable(
                f"object store {self.endpoint_url} refused to {verb} {self.bucket}/{key}: {code}; "
                "check credentials and bucket"
            ) from None
        except botocore.exceptions.BotoCoreError as error:
            raise StoreUnavailable(
                f"object store {self.endpoint_url} did not answer while asked to {verb} {self.bucket}/{key} "
                f"({type(error).__name__}); is it up? try `rl360 status`"
            ) from None

    def get(self, key: str) -> bytes:
        """The object's bytes; `KeyError` when there is none."""
        with self._errors("read", key):
            return self._s3.get_object(Bucket=self.bucket, Key=key)["Body"].read()

    def get_required(self, key: str) -> bytes:
        """Like `get`, for an object that something committed refers to: its absence is corruption."""
        try:
            return self.get(key)
        except KeyError:
            raise CorruptObject(key, "is missing though a committed object refers to it") from None

    def put(self, key: str, data: bytes) -> None:
        """Write or overwrite."""
        with self._errors("write", key):
            self._s3.put_object(Bucket=self.bucket, Key=key, Body=data)

    def put_once(self, key: str, data: bytes) -> bool:
        """Write unless it exists. True when this call wrote it, False when an object is already there."""
        with self._errors("write", key):
            try:
                self._s3.put_object(Bucket=self.bucket, Key=key, Body=data, IfNoneMatch="*")
            except botocore.exceptions.ClientError as error:
                if _code(error) in _EXISTS:
                    return False
                raise
        return True

    def exists(self, key: str) -> bool:
        """Whether there is an object under exactly this key."""
        try:
            with self._errors("look up", key):
                self._s3.head_object(Bucket=self.bucket, Key=key)
        except KeyError:
            return False
        return True

    def list(self, prefix: str) -> builtins.list[str]:
        """All keys under the prefix, sorted."""
        return sorted(entry["Key"] for page in self._pages(prefix) for entry in page.get("Contents", []))

    def list_folders(self, prefix: str) -> builtins.list[str]:
        """The names directly under the prefix that have objects below them, sorted, without slashes."""
        found = [each for page in self._pages(prefix, Delimiter="/") for each in page.get("CommonPrefixes", [])]
        return sorted(each["Prefix"][len(prefix) :].rstrip("/") for each in found)

    def _pages(self, prefix: str, **more: str) -> Iterator[dict[str, Any]]:
        with self._errors("list", prefix):
            yield from self._s3.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix, **more)

    def delete(self, key: str) -> None:
        """Remove the object; fine when there is none."""
        with self._errors("delete", key):
            self._s3.delete_object(Bucket=self.bucket, Key=key)


def _code(error: botocore.exceptions.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", "?"))
