"""A cold root in a folder of a shared file system."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar
from urllib.parse import quote

from spool.errors import IntegrityError, NotFoundError, SpoolError, StorageError
from spool.locks import file_identity
from spool.stores.local import create_atomic, map_os_error, read_file, sync_dir, write_atomic
from spool.stores.objects import Data, ObjectInfo, Observer, Verify, check_key, check_range
from spool.stores.threads import Threads

_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_MAKE_TRIES = 5

T = TypeVar("T")
Identity = tuple[int, int]
"""Device and inode."""


class SharedFolder:
    """Objects as files: a put writes a file of another name, syncs it, renames it, and syncs the folder.

    A mount comes and goes, and what is written while it is away lies hidden below it. So from the first read or making
    of an object at its top, such as a root's identity, the folder is to be the same after each write: else the write
    failed. Reading that object again takes the folder that is there then.

    Names that begin with a dot are no objects: files that a put which died left behind, and those a network file
    system keeps for its own reasons. There are no retries here: the file system's client has its own.

    Args:
        folder: absolute path; made by the first `create` of an object at its top. Whatever else is written finds it
            there, or the file system is not mounted.
        concurrency: reads at once of `get_ranges`.
        verify: ``always`` reads back what was put.
        observer: told of every operation.
    """

    def __init__(
        self, folder: str, *, concurrency: int = 16, verify: Verify = "size", observer: Observer | None = None
    ) -> None:
        self._folder = folder
        self._threads = Threads(concurrency)
        self._verify = verify
        self._observer = observer or (lambda _kind, _key, _n_bytes, _seconds: None)
        self._place: Identity | None = None

    def __repr__(self) -> str:
        return f"SharedFolder({self.url!r})"

    @property
    def url(self) -> str:
        """The folder as a URL."""
        return f"file://{quote(self._folder)}"

    @property
    def failing_since(self) -> float | None:
        """None: nothing is tried again here."""
        return None

    def get(self, key: str) -> bytes:
        """Return the whole file; see `Objects.get`."""
        return self._read(key, 0, None)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Return a range of a file; see `Objects.get_range`."""
        check_range(key, start, stop)
        return self._read(key, start, stop) if stop > start else b""

    def get_ranges(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Return ranges of files; see `Objects.get_ranges`."""
        return self._threads.map(lambda one: self.get_range(*one), wanted)

    def _read(self, key: str, start: int, stop: int | None) -> bytes:
        path, began, place = self._path(key), time.monotonic(), self._place_of(key)
        try:
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                end = size if stop is None else stop
                # a damaged caller must not make it allocate what no file holds
                data = _pread(file.fileno(), start, min(end, size))
        except OSError as error:
            raise self._error(error, "read", key) from None
        if len(data) != end - start:
            raise IntegrityError(
                f"{self.url}/{key}: bytes [{start}, {end}) are {len(data)} instead of {end - start}: the file ends "
                f"at {size}; it was cut, restore it from elsewhere",
                key=key, range=[start, end], got=len(data), expected=end - start,
            )  # fmt: skip
        self._note(key, place)
        self._observer("get", key, len(data), time.monotonic() - began)
        return data

    def put(self, key: str, data: Data) -> None:
        """Put a file; see `Objects.put`."""
        began, view, written = time.monotonic(), memoryview(data).cast("B"), list[Identity]()

        def prove(draft: str) -> None:
            written.append(self._prove(key, draft, view))

        self._write(key, lambda path: write_atomic(path, view, prove=prove))
        self._check_kept(key, written[-1])
        self._observer("put", key, len(view), time.monotonic() - began)

    def create(self, key: str, data: Data) -> bool:
        """Put a file unless one is there; see `Objects.create`."""
        began, whole, place = time.monotonic(), bytes(data), self._place_of(key)
        made = self._write(key, lambda path: create_atomic(path, whole), root="/" not in key)
        self._note(key, place)
        self._check_kept(key)
        self._observer("put", key, len(whole) * made, time.monotonic() - began)
        return made

    def creates_exclusively(self) -> bool:
        """Return True: of several links of one name, one is made."""
        return True

    def _write(self, key: str, write: Callable[[str], T], *, root: bool = False) -> T:
        """Return what ``write`` does at the path of a key; its folder is made, with ``root`` the root's too."""
        path = self._path(key)
        for tries_left in reversed(range(_MAKE_TRIES)):
            try:
                self._make_folder(os.path.dirname(path), root=root)
                return write(path)
            except (NotFoundError, FileNotFoundError) as error:
                # a delete of the last object in a folder takes the folder away
                if not tries_left:
                    raise StorageError(f"cannot write {path}: its folder vanishes again and again", key=key) from error
            except OSError as error:
                if isinstance(error, SpoolError):
                    raise
                raise self._error(error, "write", key) from None
        raise AssertionError("the last try returns or raises")

    def _place_of(self, key: str) -> Identity | None:
        return None if "/" in key else self._identity(self._folder)

    def _note(self, key: str, place: Identity | None) -> None:
        """Take the folder for the root that an object at its top was in: it was there before and is after."""
        if place is not None and place == self._place_of(key):
            self._place = place

    def _identity(self, path: str) -> Identity | None:
        try:
            return file_identity(path)
        except OSError as error:
            raise map_os_error(error, what="look at", path=path) from None

    def _check_kept(self, key: str, folder: Identity | None = None) -> None:
        """Make sure that what was written, in ``folder``, is in the root, and not where the root is mounted.

        Raises:
            StorageError: it is not.
        """
        if self._place is None:
            return
        # the root is looked at first: a file that was written while it was away is not there when it is back
        path, is_same = self._path(key), self._place == self._identity(self._folder)
        if is_same and self._identity(path) and folder in (None, self._identity(os.path.dirname(path))):
            return
        raise StorageError(
            f"{self._path(key)} was written while {self._folder} was away, or another folder in its place: it does not "
            "count; try again when it is back",
            key=key,
        )

    def _prove(self, key: str, draft: str, view: memoryview) -> Identity:
        """Read back what was written, its size or all of it, before it gets its name; return which folder it is in."""
        got, folder = os.stat(draft).st_size, self._identity(os.path.dirname(draft))
        if got != len(view) or (self._verify == "always" and read_file(draft) != view):
            raise IntegrityError(
                f"{self.url}/{key}: what was written did not read back equal; it was removed. Check the file system",
                key=key, got=got, expected=len(view),
            )  # fmt: skip
        if folder is None:
            raise FileNotFoundError(draft)
        return folder

    def _make_folder(self, path: str, *, root: bool) -> None:
        """Make a folder and those above it, each name durable; the root's own only where that is asked for.

        Raises:
            StorageError: the root is not there.
        """
        missing = []
        while not os.path.isdir(path):
            if path == self._folder and not root:
                raise StorageError(f"the cold root {path} is not there; is its file system mounted?", path=path)
            missing.append(path)
            path = os.path.dirname(path)
        for made in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(made)
            sync_dir(os.path.dirname(made))

    def info(self, key: str) -> ObjectInfo | None:
        """Return size and time of a file; see `Objects.info`."""
        began = time.monotonic()
        try:
            found = os.stat(self._path(key))
        except _ABSENT:
            return None
        except OSError as error:
            raise self._error(error, "look at", key) from None
        finally:
            self._observer("head", key, 0, time.monotonic() - began)
        return ObjectInfo(key, found.st_size, found.st_mtime) if stat.S_ISREG(found.st_mode) else None

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Return the files whose keys start with ``prefix``; see `Objects.list`."""
        began = time.monotonic()
        top = prefix.rpartition("/")[0]
        if top:
            check_key(top)
        # one look may miss both a file that is deleted meanwhile and the one that was put in its place just before, but
        # what is put after the second look began is in place of files that were there all through the first
        found = {info.key: info for _ in range(2) for info in self._look(top, prefix)}
        self._observer("list", prefix, 0, time.monotonic() - began)
        return sorted(found.values())

    def _look(self, top: str, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the files that are objects; one whose name is no text is none."""
        whole = f"{self._folder}/{prefix}"
        for path, entry in self._walk(os.path.join(self._folder, top), whole):
            if path.startswith(whole) and not entry.name.startswith(".") and _is_text(path):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    yield ObjectInfo(path[len(self._folder) + 1 :], status.st_size, status.st_mtime)

    def _walk(self, folder: str, prefix: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield the files below ``folder``, at least those under ``prefix``; what vanishes meanwhile is left out."""
        todo = [folder]
        while todo:
            folder = todo.pop()
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            if f"{entry.path}/".startswith(prefix[: len(entry.path) + 1]):
                                todo.append(entry.path)
                        elif entry.is_file(follow_symlinks=False):
                            yield entry.path, entry
            except _ABSENT:
                continue
            except OSError as error:
                raise map_os_error(error, what="list", path=folder) from None

    def delete(self, keys: Iterable[str]) -> None:
        """Delete files, and the folders that are empty then; see `Objects.delete`."""
        for key in [check_key(key) for key in keys]:
            path, began = self._path(key), time.monotonic()
            try:
                os.unlink(path)
            except _ABSENT:
                continue
            except OSError as error:
                raise self._error(error, "delete", key) from None
            self._observer("delete", key, 0, time.monotonic() - began)
            folder = os.path.dirname(path)
            with contextlib.suppress(OSError):  # not empty any more, or still in use over there
                while folder != self._folder:
                    os.rmdir(folder)
                    folder = os.path.dirname(folder)

    def abort_stale_uploads(self, older_than_s: float) -> int:
        """Remove temporary files of puts that died; see `Objects.abort_stale_uploads`."""
        latest, n_removed = time.time() - older_than_s, 0
        for path, entry in self._walk(self._folder):
            if entry.name.startswith(".") and entry.name.endswith(".tmp"):
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_mtime <= latest:
                        os.unlink(path)
                        n_removed += 1
        return n_removed

    def close(self) -> None:
        """Let the threads go."""
        self._threads.close()

    def _path(self, key: str) -> str:
        return f"{self._folder}/{check_key(key)}"

    def _error(self, error: OSError, what: str, key: str) -> SpoolError:
        if isinstance(error, _ABSENT):
            return NotFoundError(f"{self.url} has no object {key}", key=key)
        return map_os_error(error, what=what, path=f"{self._folder}/{key}")


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _pread(fd: int, start: int, stop: int) -> bytes:
    """Return bytes [start, stop) of an open file, fewer only where it ends before."""
    parts: list[bytes] = []
    while start < stop and (part := os.pread(fd, min(stop - start, 0x7FFFF000), start)):
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
