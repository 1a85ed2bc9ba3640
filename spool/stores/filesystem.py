"""Any store that fsspec has a client for, one try at a time."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from spool.errors import NotFoundError, SpoolError, StorageError
from spool.stores.objects import ObjectInfo
from spool.stores.retry import TransientError
from spool.stores.threads import PerProcess
from spool.stores.wire import CHECK_RIGHTS, CHECK_SERVER, Version, Whole

# a put appears as a whole there; elsewhere it is written under another name first
_WHOLE_PUTS = frozenset({"memory", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "tos", "obs", "hf"})
_ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


class FsspecWire:
    """Requests through an fsspec file system, with its own time limits; how it checks uploads is its own affair too.

    Args:
        url: the root.
    """

    has_parts = False

    def __init__(self, url: str) -> None:
        self._url = url
        self._whole_puts = url.partition("://")[0] in _WHOLE_PUTS
        self._systems = PerProcess(self._connect)

    def _connect(self) -> tuple[Any, str]:
        import fsspec

        fs, root = fsspec.core.url_to_fs(self._url, skip_instance_cache=True, use_listings_cache=False)
        return fs, root.rstrip("/")

    def _at(self, key: str) -> tuple[Any, str]:
        fs, root = self._systems.get()
        return fs, f"{root}/{key}"

    def read(self, key: str, start: int, stop: int, tag: str | None, timeout_s: float) -> bytes:  # noqa: ARG002
        """Return a range of whatever version is there."""
        fs, path = self._at(key)
        data: bytes = fs.cat_file(path, start=start, end=stop)
        return data

    def read_whole(self, key: str, most_bytes: int, timeout_s: float) -> Whole:  # noqa: ARG002
        """Return an object of any size."""
        fs, path = self._at(key)
        version = self.stat(key, timeout_s)
        if version is None:
            raise FileNotFoundError(key)
        return Whole(fs.cat_file(path), version.info.size, version.tag)

    def write(self, key: str, data: memoryview, timeout_s: float) -> None:  # noqa: ARG002
        """Put a whole object, where the store does not do so under its name only when it is complete."""
        fs, path = self._at(key)
        whole = bytes(data)
        if self._whole_puts:
            fs.pipe_file(path, whole)
            return
        folder, _, name = path.rpartition("/")
        temp = f"{folder}/.{name}.{secrets.token_hex(8)}.tmp"
        fs.makedirs(folder, exist_ok=True)
        try:
            fs.pipe_file(temp, whole)
            fs.mv(temp, path)
        except BaseException:
            with contextlib.suppress(Exception):
                fs.rm_file(temp)
            raise

    def create(self, key: str, data: memoryview, timeout_s: float) -> bool:
        """Put an object, in place of what is there: fsspec promises no exclusive creation."""
        self.write(key, data, timeout_s)
        return True

    def stat(self, key: str, timeout_s: float) -> Version | None:  # noqa: ARG002
        """Return an object's version; its tag is what the file system says of it."""
        fs, path = self._at(key)
        try:
            found = fs.info(path)
        except _ABSENT:
            return None
        if found.get("type") != "file":
            return None
        tag = next((str(found[name]) for name in ("ETag", "etag", "md5Hash", "generation") if found.get(name)), "")
        info = ObjectInfo(key, int(found["size"]), _modified(found))
        return Version(info, tag or f"{info.size} {info.modified}")

    def _files(self, prefix: str) -> dict[str, dict[str, Any]]:
        """Return what is known of every file whose key starts with ``prefix``, temporary ones included."""
        fs, path = self._at(prefix)
        root = self._systems.get()[1]
        folder = path.rpartition("/")[0]
        fs.invalidate_cache()
        found = fs.find(folder, detail=True) if fs.exists(folder) else {}
        keys = {str(name).removeprefix(f"{root}/"): facts for name, facts in found.items()}
        return {key: facts for key, facts in keys.items() if key.startswith(prefix)}

    def page(self, prefix: str, token: str | None, timeout_s: float) -> tuple[Sequence[ObjectInfo], str | None]:  # noqa: ARG002
        """Return a whole listing."""
        return [
            ObjectInfo(key, int(facts["size"]), _modified(facts))
            for key, facts in self._files(prefix).items()
            if not key.rpartition("/")[2].startswith(".")
        ], None

    def delete(self, keys: Sequence[str], timeout_s: float) -> None:  # noqa: ARG002
        """Delete objects one by one."""
        for key in keys:
            fs, path = self._at(key)
            with contextlib.suppress(*_ABSENT):
                fs.rm_file(path)

    def begin(self, key: str, timeout_s: float) -> str:
        """There are no uploads in parts."""
        raise NotImplementedError

    def put_part(self, key: str, upload: str, number: int, data: memoryview, timeout_s: float) -> str:
        """There are no uploads in parts."""
        raise NotImplementedError

    def complete(self, key: str, upload: str, tags: Sequence[str], timeout_s: float) -> None:
        """There are no uploads in parts."""
        raise NotImplementedError

    def uploads(self, before: float, timeout_s: float) -> Sequence[tuple[str, str]]:  # noqa: ARG002
        """Return the temporary files of puts that died."""
        names = {key: (key.rpartition("/")[2], _modified(facts)) for key, facts in self._files("").items()}
        return [
            (key, "")
            for key, (name, at) in names.items()
            if name.startswith(".") and name.endswith(".tmp") and at <= before
        ]

    def abort(self, key: str, upload: str, timeout_s: float) -> None:  # noqa: ARG002
        """Remove a temporary file."""
        self.delete([key], timeout_s)

    def explain(self, error: Exception, what: str, key: str) -> SpoolError | TransientError:
        """Sort an error of the file system by its class and, where it has one, its HTTP status."""
        name = type(error).__name__
        status = _http_status(error)
        if isinstance(error, _ABSENT) or status == 404:
            return NotFoundError(f"cannot {what}: there is no such object", key=key)
        if isinstance(error, PermissionError) or status in (401, 403):
            return StorageError(f"cannot {what}: it is not allowed ({name}); {CHECK_RIGHTS}", key=key)
        lasting = isinstance(error, FileExistsError) or (400 <= status < 500 and status not in (408, 429))
        if lasting or not (status or isinstance(error, OSError | EOFError | TimeoutError)):
            return StorageError(f"cannot {what}: the client failed ({name}); check the URL and its options", key=key)
        return TransientError(f"the request failed ({name})", kind=StorageError, advice=CHECK_SERVER, key=key)

    def close(self) -> None:
        """Forget this process's client, which closes what it holds when it goes."""
        self._systems.take()


def _http_status(error: Exception) -> int:
    """Return the HTTP status that a client's error carries, or 0."""
    found = (getattr(error, name, None) for name in ("status", "code"))
    return next((value for value in found if isinstance(value, int) and 400 <= value < 600), 0)


def _modified(facts: dict[str, Any]) -> float:
    """Return when a file was put, by whichever name its file system gives that; 0 where it does not say."""
    for name in ("LastModified", "last_modified", "mtime", "modified", "updated", "created"):
        value = facts.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return datetime.fromisoformat(value).timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0
