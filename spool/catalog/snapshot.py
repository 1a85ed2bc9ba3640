"""A copy of a catalog file, made without a lock and without writing beside it.

A reader that must leave a spool as it is cannot add to the file. The file and its WAL are copied as they are, and the
copy is opened. What else is in the logs is fed to it afterwards.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import apsw

from spool.catalog import schema
from spool.catalog.schema import DamagedError

if TYPE_CHECKING:
    from collections.abc import Hashable

MEMORY_BYTES = 64 << 20
"""Larger catalogs are copied into a file."""

_ATTEMPTS = 3
_WAL_HEADER_BYTES = 32
_SETTLED_NS = 20_000_000
"""A file changed less than this ago may change again without its time showing it."""


def load(path: str) -> apsw.Connection | None:
    """Return a database of this process's own with what the catalog at ``path`` holds at one moment.

    It lives in memory; one of more than `MEMORY_BYTES` in a temporary file that has no name any more, and so goes with
    the connection, however the process ends.

    Returns:
        None where there is no sound catalog, no room for a copy, or it changed too often to be copied.
    """
    with TemporaryDirectory(prefix="spool-") as folder:
        copy = os.path.join(folder, "catalog.sqlite")
        try:
            if not any(_copied(path, copy) for _ in range(_ATTEMPTS)):
                return None
            found = schema.connect(copy)
        except (DamagedError, OSError, apsw.Error):
            return None
        try:
            found.pragma("journal_mode", "memory")
            n_bytes = os.path.getsize(copy)
            if n_bytes <= schema.CHECKED_BYTES and schema.check(found, whole=False):
                found.close()
                return None
            return found if n_bytes > MEMORY_BYTES else _in_memory(found)
        except apsw.Error:
            found.close()
            return None


def _in_memory(source: apsw.Connection) -> apsw.Connection:
    """Return a copy in memory; the source is closed."""
    target = schema.connect(schema.MEMORY)
    try:
        with target.backup("main", source, "main") as backup:
            while not backup.done:
                backup.step()
    finally:
        source.close()
    return target


def _copied(path: str, target: str) -> bool:
    """Copy the file and its WAL; whether they belong together is known from what did not change meanwhile."""
    mark = _mark(path)
    if mark is None:
        time.sleep(_SETTLED_NS / 1e9)
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
    if time.time_ns() - found.st_mtime_ns < _SETTLED_NS:
        return None
    header = b""
    with suppress(FileNotFoundError), open(f"{path}-wal", "rb") as file:
        header = file.read(_WAL_HEADER_BYTES)
    return found.st_ino, found.st_size, found.st_mtime_ns, header
