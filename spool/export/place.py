"""A folder that gets its name only when it is whole."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from spool.errors import InputError
from spool.stores.local import map_os_error


@contextmanager
def staged(path: str) -> Iterator[str]:
    """Yield an empty folder beside ``path`` that is renamed to it when the block ends well, and removed when it fails.

    What a killed process left is removed by the next one that writes to the same ``path``.

    Raises:
        InputError: there is something at ``path`` already.
        StorageError: the folder cannot be made.
    """
    _check_free(path)
    parent, name = os.path.split(path)
    prefix = f".{name}.export-"
    try:
        os.makedirs(parent, exist_ok=True)
        _sweep(parent, prefix)
        draft = os.path.join(parent, prefix + secrets.token_hex(8))
        os.mkdir(draft)
        lock = os.open(draft, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise map_os_error(error, what="make", path=path) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield draft
        _sync(draft)
        _check_free(path)
        os.rename(draft, path)
        _sync_one(parent)
    except OSError as error:
        raise map_os_error(error, what="write", path=path) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        os.close(lock)


def _check_free(path: str) -> None:
    if os.path.lexists(path):
        raise InputError(f"there is something at {path} already, and an export overwrites nothing: name a new folder")


def _sweep(parent: str, prefix: str) -> None:
    """Remove what killed exports to the same place left; those at work hold the lock of their folder."""
    for name in os.listdir(parent):
        if not name.startswith(prefix):
            continue
        left = os.path.join(parent, name)
        with suppress(OSError):
            fd = os.open(left, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(fd)


def _sync(folder: str) -> None:
    for at, _, names in os.walk(folder):
        for name in names:
            _sync_one(os.path.join(at, name))
        _sync_one(at)


def _sync_one(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
