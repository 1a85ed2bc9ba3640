"""A copy in memory of a catalog file, made without a lock and without writing beside it.

A reader that must leave a spool as it is cannot open the file: SQLite would make and lock its WAL. The file and its WAL
are copied as they are, and the copy is opened. What else is in the logs is fed to it afterwards.
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

_ATTEMPTS = 3
_WAL_HEADER_BYTES = 32
_SETTLED_NS = 20_000_000
"""A file changed less than this ago may change again without its time showing it."""


def load(path: str, into: apsw.Connection) -> bool:
    """Fill a database in memory with what the catalog at ``path`` holds at one moment.

    Returns:
        False, and nothing changed, where there is no sound catalog, or it changed too often to be copied.
    """
    with TemporaryDirectory(prefix="spool-") as folder:
        copy = os.path.join(folder, "catalog.sqlite")
        try:
            if not any(_copied(path, copy) for _ in range(_ATTEMPTS)):
                return False
            source = schema.connect(copy)
        except (DamagedError, OSError, apsw.Error):
            return False
        try:
            source.pragma("journal_mode", "delete")
            if os.path.getsize(copy) <= schema.CHECKED_BYTES and schema.check(source, whole=False):
                return False
            with into.backup("main", source, "main") as backup:
                while not backup.done:
                    backup.step()
        except apsw.Error:
            return False
        finally:
            source.close()
    return True


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
