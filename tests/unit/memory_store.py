"""An object store in memory with S3's meaning, for what is pure but for it. The real one is used in tests/contract."""

from __future__ import annotations

from rl360.errors import CorruptObject, StoreUnavailable


class MemoryStore:
    """Conditional puts, prefixes and folders; `down` makes every call fail as an endpoint that is away does; `read`
    names every object that was read, in order."""

    bucket = "test"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.read: list[str] = []
        self.down = False

    def _up(self, key: str) -> None:
        if self.down:
            raise StoreUnavailable(f"object store did not answer while asked for {key}")

    def get(self, key: str) -> bytes:
        self._up(key)
        self.read.append(key)
        return self.objects[key]

    def get_required(self, key: str) -> bytes:
        try:
            return self.get(key)
        except KeyError:
            raise CorruptObject(key, "is missing though a committed object refers to it") from None

    def put(self, key: str, data: bytes) -> None:
        self._up(key)
        self.objects[key] = data

    def put_once(self, key: str, data: bytes) -> bool:
        self._up(key)
        if key in self.objects:
            return False
        self.objects[key] = data
        return True

    def exists(self, key: str) -> bool:
        self._up(key)
        return key in self.objects

    def delete(self, key: str) -> None:
        self._up(key)
        self.objects.pop(key, None)

    def list(self, prefix: str) -> list[str]:
        self._up(prefix)
        return sorted(key for key in self.objects if key.startswith(prefix))

    def list_folders(self, prefix: str) -> list[str]:
        below = [key[len(prefix) :] for key in self.list(prefix)]
        return sorted({name.partition("/")[0] for name in below if "/" in name})
