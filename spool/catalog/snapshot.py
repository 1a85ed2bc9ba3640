"""A copy of a catalog file, made without holding up a writer and without writing beside it.

A reader that must leave a spool as it is cannot add to the file. What else is in the logs is fed to its copy. That is
made through SQLite; of a file that cannot be read where it lies the bytes are copied, and those of its WAL.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import apsw

from spool.catalog import files, schema
from spool.catalog.files import DamagedError

if TYPE_CHECKING:
    from collections.abc import Hashable

MEMORY_BYTES = 64 << 20
"""Larger catalogs are copied into a file."""

_ATTEMPTS = 3
_WAL_HEADER_BYTES = 32


def load(path: str) -> apsw.Connection | None:
    """Return a database of this process's own with what the catalog at ``path`` holds at one moment.

    It lives in memory; one of more than `MEMORY_BYTES` in a temporary file that has no name any more, and so goes with
    the connection, however the process ends.

    Returns:
        None where there is no sound catalog, no room for a copy, or it changed too often to be copied.
    """
    for _ in range(_ATTEMPTS):
        before = files.settled_mark(path)
        try:
            found = _through_sqlite(path)
        except (DamagedError, OSError, apsw.Error):
            break
        if before is None or before.has_wal or files.mark(path) == before:
            return found
        found.close()
    return _through_files(path)


def _through_sqlite(path: str) -> apsw.Connection:
    """Copy a catalog that can be read where it lies.

    No descriptor of it is closed but by SQLite: that would take away the locks that this process may have on it for
    another handle.
    """
    source = files.connect_readonly(path)
    try:
        return _copy_of(source, os.path.getsize(path))
    finally:
        source.close()


def _through_files(path: str) -> apsw.Connection | None:
    """Copy the file and the WAL of a catalog that nobody has open, or that is damaged."""
    with TemporaryDirectory(prefix="spool-") as folder:
        copy = os.path.join(folder, "catalog.sqlite")
        try:
            if not any(_copied(path, copy) for _ in range(_ATTEMPTS)):
                return None
            found = files.connect(copy)
        except (DamagedError, OSError, apsw.Error):
            return None
        try:
            n_bytes = os.path.getsize(copy)
            if n_bytes <= files.CHECKED_BYTES and schema.check(found, whole=False):
                return None
            return _copy_of(found, n_bytes)
        except (OSError, apsw.Error):
            return None
        finally:
            found.close()


def _copy_of(source: apsw.Connection, n_bytes: int) -> apsw.Connection:
    """Return a copy in memory, or in a file without a name."""
    with TemporaryDirectory(prefix="spool-") as folder:
        target = files.connect(files.MEMORY if n_bytes <= MEMORY_BYTES else os.path.join(folder, "catalog.sqlite"))
        try:
            target.pragma("journal_mode", "memory")
            with target.backup("main", source, "main") as backup:
                backup.step(-1)
            target.pragma("journal_mode", "memory")  # the source's came with it
        except BaseException:
            target.close()
            raise
        return target


def _copied(path: str, target: str) -> bool:
    """Copy the file and its WAL; whether they belong together is known from what did not change meanwhile."""
    mark = _mark(path)
    if mark is None:
        time.sleep(files.SETTLED_NS / 1e9)
        return False
    shutil.copyfile(path, target)
    with suppress(FileNotFoundError):
        os.unlink(f"{target}-wal")
    with suppress(FileNotFoundError):
        shutil.copyfile(f"{path}-wal", f"{target}-wal")
    return _mark(path) == mark


def _mark(path: str) -> Hashable:
    """Return what changes with the main file and with each restart of its WAL; None where it changed just now.

    Frames that a WAL grows by are no change: what is behind the last commit in the copy is left out by SQLite.
    """
    found = os.stat(path)
    if abs(time.time_ns() - found.st_mtime_ns) < files.SETTLED_NS:
        return None
    header = b""
    with suppress(FileNotFoundError), open(f"{path}-wal", "rb") as file:
        header = file.read(_WAL_HEADER_BYTES)
    return found.st_ino, found.st_size, found.st_mtime_ns, header
