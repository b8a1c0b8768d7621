"""Plain data that services send and the store keeps as JSON: models that are closed (unknown fields are refused) and
never change, and how such an object is read from a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from rl360.errors import CorruptObject

M = TypeVar("M", bound=BaseModel)


class Data(BaseModel):
    """The base of such models."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Readable(Protocol):
    """The part of an object store that reading needs: `KeyError` when there is no such object."""

    def get(self, key: str) -> bytes: ...


class Writable(Protocol):
    """The part that a commit needs: False when there is such an object already."""

    def put_once(self, key: str, data: bytes) -> bool: ...


def commit(store: Writable, key: str, made: M, data: bytes, committed: Callable[[], M | None]) -> M:
    """Write `made` as `data`, once: of two writers the first wins, and both get what it `committed`."""
    if store.put_once(key, data):
        return made
    found = committed()
    if found is None:
        raise CorruptObject(key, "was refused as existing and then was not there")
    return found


def parse(data: bytes, key: str, model: type[M], problem: str) -> M:
    """`data` of the object `key` as a `model`; `CorruptObject` says `problem` and the first field at fault."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise CorruptObject(key, f"{problem} ({where}: {first['msg']})") from None


def read(store: Readable, key: str, model: type[M], problem: str) -> M | None:
    """The object `key` as a `model`, None when there is none."""
    try:
        data = store.get(key)
    except KeyError:
        return None
    return parse(data, key, model, problem)
