"""A cold root behind a network: retries, checks and concurrency around one kind of wire."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from spool.errors import ConfigError, IntegrityError, SpoolError
from spool.stores.objects import PIECE_BYTES, Data, ObjectInfo, Observer, Verify, check_key, check_range
from spool.stores.retry import TransientError, persist
from spool.stores.threads import Threads
from spool.stores.wire import ChangedError, OutOfRangeError, Version, Wire, WrongLengthError

T = TypeVar("T")

log = logging.getLogger("spool.stores")

_LENGTH_TRIES = 5
_UPLOAD_WIDTH = 4
_PUT_TRIES = 2
_PART_BYTES = 16 << 20
_MOST_PARTS = 10_000
_MOST_KEYS = 1_000
_OUTAGE_S = 5.0
"""The end of shorter ones is not worth a line."""
_PROBE = "probe-"


def open_remote(
    url: str, *, concurrency: int, deadline_s: float, verify: Verify, observer: Observer | None
) -> RemoteStore:
    """Return the store at any URL that fsspec knows; see `spool.stores.objects.open_objects`.

    Raises:
        ConfigError: the client for it is not installed, or there is none.
    """
    import fsspec

    try:
        fsspec.get_filesystem_class(url.partition("://")[0].partition("::")[0])
    except ImportError:
        raise ConfigError(
            f"the client for {url} is not installed; for s3:// install spool-store[s3], for others what fsspec needs"
        ) from None
    except ValueError:
        raise ConfigError(f"fsspec knows no store for {url}; write for example s3://bucket/prefix") from None
    # a stall has to be noticed often enough for another try, within the deadline
    stall_s = min(15.0, deadline_s / 4)
    wire: Wire
    if url.startswith(("s3://", "s3a://")):
        from spool.stores.s3 import S3Wire

        wire = S3Wire(url, concurrency=concurrency, stall_s=stall_s)
    else:
        from spool.stores.filesystem import FsspecWire

        wire = FsspecWire(url)
    return RemoteStore(wire, url=url, concurrency=concurrency, deadline_s=deadline_s, verify=verify, observer=observer)


class RemoteStore:
    """Objects behind a `Wire`.

    Args:
        wire: does the requests.
        url: the root, without credentials.
        concurrency, deadline_s, verify, observer: as `spool.stores.objects.open_objects` has them.
    """

    def __init__(
        self,
        wire: Wire,
        *,
        url: str,
        concurrency: int = 16,
        deadline_s: float = 60.0,
        verify: Verify = "size",
        observer: Observer | None = None,
    ) -> None:
        self._wire = wire
        self._url = url
        self._threads = Threads(concurrency)
        self._deadline_s = deadline_s
        self._verify = verify
        self._observer = observer or (lambda _kind, _key, _n_bytes, _seconds: None)
        self._failing_since: float | None = None

    def __repr__(self) -> str:
        return f"RemoteStore({self._url!r})"

    @property
    def url(self) -> str:
        """The root's URL."""
        return self._url

    @property
    def failing_since(self) -> float | None:
        """When requests began to fail, if they do."""
        return self._failing_since

    # ------------------------------------------------------------------------------------------------- reading

    def get(self, key: str) -> bytes:
        """Return the whole object; see `Objects.get`."""
        check_key(key)
        return persist(
            lambda _timeout_s: self._one_version(key), what=self._what("read", key), deadline_s=self._deadline_s
        )

    def _one_version(self, key: str) -> bytes:
        """Read an object, then look whether that is what it is: bodies may be cut, and replacing one may take time."""
        data, size, tag = self._request(
            "get", "read", key, lambda timeout_s: self._wire.read_whole(key, PIECE_BYTES, timeout_s),
            lambda whole: len(whole.data or b""),
        )  # fmt: skip
        facts: dict[str, Any] = {"key": key}
        try:
            if data is None:
                pieces = self._threads.map(lambda piece: self._read(key, *piece, tag), _pieces(size, PIECE_BYTES))
                data = b"".join(pieces)
            now = self._stat(key)
            if now is not None and (now.info.size, now.tag) == (len(data), tag):
                return data
            expected = None if now is None else now.info.size
            facts |= {"range": [0, expected], "got": len(data), "expected": expected}
            reason = f"{len(data)} bytes came and it holds {expected}: it was replaced meanwhile, or cut"
        except ChangedError:
            reason = "it was replaced while it was read"
        raise TransientError(
            reason, kind=IntegrityError, advice="try again; if that recurs the server cuts bodies: call its operator",
            tries=_LENGTH_TRIES, **facts,
        )  # fmt: skip

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Return a range of an object; see `Objects.get_range`."""
        check_key(key)
        check_range(key, start, stop)
        return self._read(key, start, stop, None) if stop > start else b""

    def get_ranges(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Return ranges of objects, several at once; see `Objects.get_ranges`."""
        return self._threads.map(lambda one: self.get_range(*one), wanted)

    def _read(self, key: str, start: int, stop: int, tag: str | None) -> bytes:
        def attempt(timeout_s: float) -> bytes:
            try:
                data = self._wire.read(key, start, stop, tag, timeout_s)
                if len(data) == stop - start:
                    return data
                got = len(data)
            except WrongLengthError as wrong:
                got = wrong.got
            except OutOfRangeError:
                got = 0
            raise self._wrong_length(key, start, stop, got)

        return self._request("get", "read", key, attempt, len)

    def _wrong_length(self, key: str, start: int, stop: int, got: int) -> IntegrityError | TransientError:
        """Return the error for a body of ``got`` bytes: final where the object ends before ``stop``."""
        facts: dict[str, Any] = {"key": key, "range": [start, stop], "got": got, "expected": stop - start}
        text = f"bytes [{start}, {stop}) came as {got} instead of {stop - start}"
        version = self._stat(key)
        if version is not None and version.info.size < stop:
            where = f"the object holds {version.info.size} bytes: it was cut or is another, restore it from elsewhere"
            return IntegrityError(f"cannot {self._what('read', key)}: {text}; {where}", **facts)
        return TransientError(
            text, kind=IntegrityError, advice="the server cuts bodies: call its operator", tries=_LENGTH_TRIES, **facts
        )

    def info(self, key: str) -> ObjectInfo | None:
        """Return what is known of an object; see `Objects.info`."""
        version = self._stat(check_key(key))
        return None if version is None else version.info

    def _stat(self, key: str) -> Version | None:
        return self._request("head", "look at", key, lambda timeout_s: self._wire.stat(key, timeout_s))

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Return the objects whose keys start with ``prefix``; see `Objects.list`."""
        if top := prefix.rpartition("/")[0]:
            check_key(top)
        found: list[ObjectInfo] = []
        token: str | None = None
        while True:
            page, token = self._page(prefix, token)
            found += page
            if token is None:
                return sorted(found)

    def _page(self, prefix: str, token: str | None) -> tuple[Sequence[ObjectInfo], str | None]:
        return self._request("list", "list", prefix, lambda timeout_s: self._wire.page(prefix, token, timeout_s))

    # ------------------------------------------------------------------------------------------------- writing

    def put(self, key: str, data: Data) -> None:
        """Put an object; see `Objects.put`."""
        check_key(key)
        view = memoryview(data).cast("B")
        for _ in range(_PUT_TRIES):  # what differs may be what somebody else has just put there
            self._put(key, view)
            got = self._read_back(key, view)
            if got == len(view):
                return
        with contextlib.suppress(SpoolError):
            self.delete([key])
        raise IntegrityError(
            f"{self._url}/{key}: what was written did not read back equal ({got} bytes, expected {len(view)}); it "
            "was removed. Put it again; call the store's operator if that recurs",
            key=key, got=got, expected=len(view),
        )  # fmt: skip

    def _put(self, key: str, view: memoryview) -> None:
        if len(view) > PIECE_BYTES and self._wire.has_parts:
            self._put_parts(key, view)
        else:
            self._request(
                "put", "write", key, lambda timeout_s: self._wire.write(key, view, timeout_s), lambda _: len(view)
            )

    def create(self, key: str, data: Data) -> bool:
        """Put an object unless one is there; see `Objects.create`."""
        check_key(key)
        view = memoryview(data).cast("B")
        return self._request("put", "write", key, lambda timeout_s: self._wire.create(key, view, timeout_s))

    def creates_exclusively(self) -> bool:
        """Try to create an object twice; see `Objects.creates_exclusively`."""
        key = f"{_PROBE}{secrets.token_hex(8)}"
        self.create(key, b"")
        again = self.create(key, b"")
        self.delete([key])
        return not again

    def _put_parts(self, key: str, view: memoryview) -> None:
        part_bytes = max(_PART_BYTES, math.ceil(len(view) / _MOST_PARTS))
        upload = self._request("multipart", "write", key, lambda timeout_s: self._wire.begin(key, timeout_s))

        def put_part(part: tuple[int, tuple[int, int]]) -> str:
            number, (start, stop) = part
            data = view[start:stop]
            return self._request(
                "put", "write", key, lambda timeout_s: self._wire.put_part(key, upload, number, data, timeout_s),
                lambda _: len(data),
            )  # fmt: skip

        try:
            parts = enumerate(_pieces(len(view), part_bytes), 1)
            tags = self._threads.map(put_part, parts, width=_UPLOAD_WIDTH)
            self._request(
                "multipart", "write", key, lambda timeout_s: self._complete(key, upload, tags, len(view), timeout_s)
            )
        except BaseException:
            with contextlib.suppress(SpoolError):
                self._abort(key, upload)
            raise

    def _complete(self, key: str, upload: str, tags: Sequence[str], size: int, timeout_s: float) -> None:
        try:
            self._wire.complete(key, upload, tags, timeout_s)
        except FileNotFoundError:
            # an earlier try did it and its answer was lost
            version = self._stat(key)
            if version is None or version.info.size != size:
                raise

    def _read_back(self, key: str, view: memoryview) -> int | None:
        """Return how many bytes an object has of what was put there; None where there is none, or they differ."""
        info = self.info(key)
        if info is None or info.size != len(view) or self._verify != "always":
            return None if info is None else info.size
        compared = self._threads.map(
            lambda piece: self._read(key, *piece, None) == bytes(view[slice(*piece)]),
            _pieces(len(view), PIECE_BYTES), width=_UPLOAD_WIDTH,
        )  # fmt: skip
        return len(view) if all(compared) else None

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; see `Objects.delete`."""
        todo = iter([check_key(key) for key in keys])
        while batch := list(itertools.islice(todo, _MOST_KEYS)):
            self._delete(batch)

    def _delete(self, batch: Sequence[str]) -> None:
        self._request("delete", "delete", batch[0], lambda timeout_s: self._wire.delete(batch, timeout_s))

    def abort_stale_uploads(self, older_than_s: float) -> int:
        """Drop uploads that never ended; see `Objects.abort_stale_uploads`."""
        before = time.time() - older_than_s
        stale = self._request("list", "list", "", lambda timeout_s: self._wire.uploads(before, timeout_s))
        for key, upload in stale:
            self._abort(key, upload)
        return len(stale)

    def _abort(self, key: str, upload: str) -> None:
        self._request("multipart", "abort", key, lambda timeout_s: self._wire.abort(key, upload, timeout_s))

    def close(self) -> None:
        """Close this process's connections and threads."""
        self._threads.close()
        self._wire.close()

    # ------------------------------------------------------------------------------------------------- requests

    def _request(
        self, kind: str, what: str, key: str, call: Callable[[float], T], n_bytes: Callable[[T], int] | None = None
    ) -> T:
        """Return what ``call`` does in the end; every try is observed, with ``n_bytes`` of its result."""
        tries = itertools.count()

        def attempt(timeout_s: float) -> T:
            if next(tries):
                self._observer("retry", key, 0, 0.0)
            began, moved = time.monotonic(), 0
            try:
                result = call(timeout_s)
                moved = n_bytes(result) if n_bytes else 0
            except (SpoolError, TransientError, ChangedError):
                raise
            except Exception as error:  # noqa: BLE001 - a client may raise anything
                # the client's own text may hold an endpoint's password or a signature: it is not passed on
                explained = self._wire.explain(error, self._what(what, key), key)
                if isinstance(explained, TransientError) and self._failing_since is None:
                    self._failing_since = time.time()
            else:
                self._succeeded()
                return result
            finally:
                self._observer(kind, key, moved, time.monotonic() - began)
            raise explained

        return persist(attempt, what=self._what(what, key), deadline_s=self._deadline_s)

    def _succeeded(self) -> None:
        since, self._failing_since = self._failing_since, None
        if since is not None and time.time() - since >= _OUTAGE_S:
            log.warning("%s answers again, after %.1f s", self._url, time.time() - since)

    def _what(self, verb: str, key: str) -> str:
        return f"{verb} {self._url}/{key}"


def _pieces(size: int, piece_bytes: int) -> Iterable[tuple[int, int]]:
    return ((start, min(start + piece_bytes, size)) for start in range(0, size, piece_bytes))
