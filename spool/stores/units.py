"""The files of multimodal units in a hot root: stored once by key, and their age.

A file gets its name by a hard link, so of several processes that store the same unit one does, and knows it. Its time
is when it was last put or named. Who deletes one moves it away first and looks at its time then: whoever put or named
it before that has said so in the file's time, and whoever comes later finds that it is not there.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from spool import locks
from spool.model.units import UNITS, is_unit_key, unit_path
from spool.points import reach
from spool.stores import unit_files
from spool.stores.local import BLOCK, make_dirs, map_os_error, sync_dir, sync_file

_GOING = ".going-"
ACCOUNT = "units"
"""The name under which the room of units is accounted, beside those of streams."""


class HotUnit(NamedTuple):
    """A unit's file in a hot root.

    Attributes:
        key: the unit's.
        size: bytes of the file.
        used_at: when it was last put or named, seconds since the epoch.
    """

    key: str
    size: int
    used_at: float


def disk_bytes(size: int) -> int:
    """Return what a unit's file of ``size`` bytes counts for in the account of room: whole blocks."""
    return -(-size // BLOCK) * BLOCK


class HotUnits:
    """The units of a hot root; any process may store, read and delete there at any time.

    Args:
        root: the hot root.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._lock = f"{root}/units.lock"
        self._durable: set[str] = set()

    def path(self, key: str) -> str:
        """Return where a unit's file lies."""
        return f"{self._root}/{unit_path(key)}"

    def touch(self, key: str) -> bool:
        """Say that a unit is used now; return whether it is there.

        Raises:
            StorageError: the file system failed.
        """
        path = self.path(key)
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise map_os_error(error, what="use", path=path) from error
        return True

    def info(self, key: str) -> HotUnit | None:
        """Return what is known of a unit's file; None where there is none."""
        with suppress(FileNotFoundError, NotADirectoryError):
            found = os.stat(self.path(key))
            return HotUnit(key, found.st_size, found.st_mtime)
        return None

    def read(self, key: str) -> bytearray | None:
        """Return a unit's file, memory of the caller's own; None where there is none.

        Raises:
            StorageError: it cannot be read.
        """
        path = self.path(key)
        # one that is being deleted may be put back: so it is looked for under its other name in between
        for at in (path, self._going(key), path):
            with suppress(FileNotFoundError):
                return unit_files.read(at)
        return None

    def holds(self, key: str, parts: Sequence[bytes | memoryview]) -> bool:
        """Return whether a unit is there as it was put, its bytes and no others; they are read."""
        return unit_files.same(self.path(key), parts)

    def store(self, key: str, parts: Sequence[bytes | memoryview], *, sync: bool, direct: bool = True) -> bool:
        """Store a unit unless it is there; return whether it was stored. It is there whole or not at all.

        A file of its name with other bytes was damaged, and is replaced.

        Args:
            key: the unit's.
            parts: its bytes.
            sync: it outlives a power cut when this returns.
            direct: write past the page cache where the file system allows it.

        Raises:
            CapacityError: the disk is full.
            StorageError: it cannot be written.
        """
        path = self.path(key)
        folder, name = os.path.split(path)
        draft = f"{folder}/.{name}.{secrets.token_hex(8)}.tmp"
        try:
            self._make_folder(folder, sync=sync)
            try:
                unit_files.write(draft, parts, sync=sync, direct=direct)
                reach("put.written")
                stored = unit_files.name(draft, path, parts)
                reach("put.named")
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(draft)
        except OSError as error:
            raise map_os_error(error, what="write", path=path) from error
        if sync and stored:
            sync_dir(folder)
        elif sync:
            self.make_durable(key)
        return stored

    def make_durable(self, key: str) -> None:
        """Make a unit that is there outlive a power cut, whoever stored it.

        Raises:
            StorageError: it cannot be synced, or is gone.
        """
        sync_file(self.path(key))
        sync_dir(os.path.dirname(self.path(key)))

    def all(self) -> Iterator[HotUnit]:
        """Yield the units that are there, in no order.

        Raises:
            StorageError: they cannot be listed.
        """
        for entry in self._entries():
            if is_unit_key(entry.name):
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    yield HotUnit(entry.name, found.st_size, found.st_mtime)

    def measure(self) -> int:
        """Return what all files count for, drafts included."""
        total = 0
        for entry in self._entries():
            with suppress(FileNotFoundError):
                total += disk_bytes(entry.stat(follow_symlinks=False).st_size)
        return total

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Keep `still` away while files and the account of their room change, one after the other.

        Raises:
            StorageError: the lock file cannot be opened.
        """
        try:
            fd = locks.wait_for(self._lock, make=True, shared=True)
        except OSError as error:
            raise map_os_error(error, what="open", path=self._lock) from error
        try:
            yield
        finally:
            locks.release(fd)

    @contextmanager
    def still(self) -> Iterator[bool]:
        """Yield whether nobody changes anything inside of the block, so that what is measured is what is accounted.

        Raises:
            StorageError: the lock file cannot be opened.
        """
        try:
            fd = locks.take(self._lock, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise map_os_error(error, what="open", path=self._lock) from error
        try:
            yield fd is not None
        finally:
            if fd is not None:
                locks.release(fd)

    def remove(self, key: str, *, unless_used_after: float | None = None) -> int:
        """Delete a unit; return what its file counted for, 0 where there is none or it was used after that time.

        Raises:
            StorageError: it cannot be deleted.
        """
        path, going = self.path(key), self._going(key)
        try:
            os.rename(path, going)
            reach("delete.unit")
            return self._finish(key, going, unless_used_after)
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise map_os_error(error, what="delete", path=path) from error

    def _finish(self, key: str, going: str, unless_used_after: float | None) -> int:
        """Delete what was moved away, or put it back."""
        found = os.stat(going)
        if unless_used_after is not None and found.st_mtime > unless_used_after:
            with suppress(FileExistsError):
                os.link(going, self.path(key))
            os.unlink(going)
            return 0
        os.unlink(going)
        return disk_bytes(found.st_size)

    def sweep(self, *, older_than_s: float) -> int:
        """Remove what processes that died left behind; a unit that they were about to delete is put back.

        Returns:
            How many files there were.
        """
        latest, n_swept = time.time() - older_than_s, 0
        for entry in self._entries(gone=True):
            if not entry.name.startswith("."):
                continue
            with suppress(FileNotFoundError):
                if entry.stat(follow_symlinks=False).st_mtime > latest:
                    continue
                key = entry.name.removeprefix(_GOING)
                if is_unit_key(key):
                    self._finish(key, entry.path, float("-inf"))
                else:
                    os.unlink(entry.path)
                n_swept += 1
        return n_swept

    def _going(self, key: str) -> str:
        folder, name = os.path.split(self.path(key))
        return f"{folder}/{_GOING}{name}"

    def _entries(self, *, gone: bool = False) -> Iterator[os.DirEntry[str]]:
        """Yield what is in the folders of units, and with ``gone`` in that of deletions."""
        top = f"{self._root}/{UNITS}"
        try:
            with os.scandir(top) as folders:
                paths = sorted(folder.path for folder in folders if _is_folder(folder, gone=gone))
            for path in paths:
                with os.scandir(path) as entries:
                    yield from entries
        except FileNotFoundError:
            return
        except OSError as error:
            raise map_os_error(error, what="list", path=top) from error

    def _make_folder(self, folder: str, *, sync: bool) -> None:
        if not os.path.isdir(folder):
            make_dirs(self._root, folder)
        if sync and folder not in self._durable:  # whoever made it may not have synced it
            sync_dir(os.path.dirname(folder))
            sync_dir(self._root)
            self._durable.add(folder)


def _is_folder(entry: os.DirEntry[str], *, gone: bool) -> bool:
    return (len(entry.name) == 2 or (gone and entry.name == "gone")) and entry.is_dir()
