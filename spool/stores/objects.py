"""Bytes at keys of a cold root: the protocol of its stores, and how one is opened.

Keys are relative to the root's URL, '/'-separated, and no part of them begins with a dot. An object appears under its
key complete or not at all. Credentials and endpoints come from where the client of the store looks for them (for
``s3://`` the standard AWS variables and files), never from the URL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol
from urllib.parse import unquote

from spool.errors import ConfigError, InputError

Verify = Literal["size", "always"]

Data = bytes | bytearray | memoryview
"""What can be put: contiguous bytes."""

Observer = Callable[[str, str, int, float], None]
"""Told of every request, failed tries included: kind (``get``, ``put``, ``head``, ``list``, ``delete``, ``multipart``),
key, bytes of payload that were moved, seconds; and with the kind ``retry`` before one is tried again. Called from the
store's threads, several at once; it must not raise."""

PIECE_BYTES = 16 << 20
"""Larger objects are put and read whole in pieces of this size, several at once."""

_KEY = re.compile(r"[^./\\\0][^/\\\0]*(/[^./\\\0][^/\\\0]*)*")
_PORT = re.compile(r":\d+(?=/|$)")


class ObjectInfo(NamedTuple):
    """What is known of an object without reading it.

    Attributes:
        key: relative to the root.
        size: bytes.
        modified: when it was put, seconds since the epoch by the server's clock.
    """

    key: str
    size: int
    modified: float


class Objects(Protocol):
    """A cold root's bytes. Safe from many threads, and after a fork: each process has clients of its own.

    Failures that another try may mend are retried inside one deadline a request; what cannot change is raised at once.
    Every method raises `StorageError` where the store cannot be reached or refuses, and `InputError` for a bad key.

    Attributes:
        url: the root, without a slash at its end; it holds no credentials.
        failing_since: when requests began to fail that are tried again, seconds since the epoch; None once one is
            answered.
    """

    @property
    def url(self) -> str: ...  # noqa: D102
    @property
    def failing_since(self) -> float | None: ...  # noqa: D102

    def get(self, key: str) -> bytes:
        """Return the whole object, one version of it.

        It is looked up afterwards to see that this is all: who knows its size calls `get_range`, which is one request.

        Raises:
            NotFoundError: there is none.
            IntegrityError: fewer bytes came than it has.
        """
        ...

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Return exactly ``stop - start`` bytes; an empty range makes no request.

        One request: ask for tens of MiB at most, as it has to end within the deadline.

        Raises:
            NotFoundError: there is no such object.
            IntegrityError: the object is too short, or the server answers with another number of bytes every time.
        """
        ...

    def get_ranges(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Return `get_range` of each ``(key, start, stop)``, in order, several at once; the first error is raised."""
        ...

    def put(self, key: str, data: Data) -> None:
        """Put ``data`` at ``key``, in place of what is there; it is durable on return.

        Memory for at most four pieces of `PIECE_BYTES` is taken beside ``data``; in a store that takes objects only
        whole, and only as bytes, a copy.

        Raises:
            CapacityError: no room.
            IntegrityError: what was stored is not ``data``; it has been removed.
        """
        ...

    def create(self, key: str, data: Data) -> bool:
        """Put a small object unless one is there; return whether it was put. Read it afterwards: it may be another's.

        A store without exclusive creation replaces what is there. Of a try whose answer was lost it may return False.
        """
        ...

    def creates_exclusively(self) -> bool:
        """Try out whether `create` leaves alone what is there."""
        ...

    def info(self, key: str) -> ObjectInfo | None:
        """Return what is known of the object, or None where there is none."""
        ...

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Return all objects whose keys start with ``prefix``, sorted by key, as they are now: nothing is cached.

        Where an object is put, with a later key, in the place of others that are deleted then, it or they are listed:
        what is deleted meanwhile may be.
        """
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete the objects; absent ones are fine. Where it raises some may be gone: call it again."""
        ...

    def abort_stale_uploads(self, older_than_s: float) -> int:
        """Remove what puts that never ended left behind; return how many there were.

        Args:
            older_than_s: leave those that began later: they may still be at work.
        """
        ...

    def close(self) -> None:
        """Close the connections of this process; a later call opens new ones."""
        ...


def open_objects(
    url: str,
    *,
    concurrency: int = 16,
    deadline_s: float = 60.0,
    verify: Verify = "size",
    observer: Observer | None = None,
) -> Objects:
    """Return the store of a cold root; nothing is connected to yet.

    Args:
        url: ``file:///folder`` on a shared file system, ``s3://bucket/prefix``, or another URL that fsspec knows.
        concurrency: requests at once of a call; for ``s3://`` also connections of a process.
        deadline_s: how long a single request is tried again.
        verify: ``size`` reads the size back after a put, ``always`` all bytes.
        observer: told of every request.

    Raises:
        ConfigError: the URL is malformed, carries credentials or options, or its client is not installed.
    """
    if concurrency < 1 or not deadline_s > 0 or verify not in ("size", "always"):
        raise ConfigError("a cold root takes concurrency >= 1, deadline_s > 0 and verify='size' or 'always'")
    scheme, rest = _split(url)
    if scheme == "file":
        from spool.stores.shared import SharedFolder

        return SharedFolder(_folder(rest), concurrency=concurrency, verify=verify, observer=observer)
    from spool.stores.remote import open_remote

    return open_remote(
        url.rstrip("/"), concurrency=concurrency, deadline_s=deadline_s, verify=verify, observer=observer
    )


def _split(url: str) -> tuple[str, str]:
    """Return scheme and the rest of a URL that may be shown."""
    scheme, mark, rest = url.partition("://")
    if not mark or not scheme:
        raise ConfigError("a cold root is a URL such as s3://bucket/prefix or file:///mnt/shared/spool")
    # up to the last '@', as the secret may hold slashes; a port is no password
    user = _PORT.sub("", rest.rpartition("@")[0])
    is_s3 = scheme.rpartition("::")[2] in ("s3", "s3a")
    if ":" in user or (is_s3 and (user or _colon_in_bucket(rest))):
        raise ConfigError(
            f"the {scheme}:// URL of the cold root carries credentials; leave them out, and give them as the store's "
            "client expects them (for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile)"
        )
    if "?" in rest or "#" in rest or "\0" in rest:
        raise ConfigError(f"the {scheme}:// URL of the cold root has a query or fragment; it takes none")
    return scheme, rest


def _colon_in_bucket(rest: str) -> bool:
    return ":" in rest.partition("/")[0] and not rest.startswith("arn:")


def _folder(rest: str) -> str:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash or not path.strip("/"):
        raise ConfigError(f"file://{rest} names no folder of this machine; write file:///path with three slashes")
    return "/" + unquote(path).strip("/")


def check_key(key: str) -> str:
    """Return ``key``.

    Raises:
        InputError: it is no relative path, or a part of it is empty or begins with a dot.
    """
    if _KEY.fullmatch(key) is None:
        raise InputError(f"{key!r} is no key of a cold root: write parts without a leading dot, one '/' between them")
    return key


def check_range(key: str, start: int, stop: int) -> None:
    """Check a half-open range of an object.

    Raises:
        InputError: it is backwards or begins before the object.
    """
    if not 0 <= start <= stop:
        raise InputError(f"[{start}, {stop}) is no range of {key}")
