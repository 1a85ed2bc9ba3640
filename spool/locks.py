"""Locks between processes (``flock``) that a forked child never holds.

An inherited descriptor keeps a lock alive after the process that took it is gone. So every descriptor that is going to
hold one is listed from the moment it is opened, and a child closes what is listed before any of its code runs. A fork
waits while a descriptor is opened or closed, not while a lock is waited for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time

_PROBED_S = (0.001, 0.01)
"""Pauses before a lock counts as taken: whoever only looks whether it is holds it for a moment, too."""

_changing = threading.RLock()
_listed: set[int] = set()


def take(path: str, flags: int = os.O_RDWR, mode: int = 0o644) -> int | None:
    """Take the lock of a file; return the descriptor that holds it until `release`, None where it is taken.

    Args:
        path: the file.
        flags: of ``os.open``; ``O_CLOEXEC`` is added.
        mode: permissions of a new file.

    Raises:
        OSError: the file cannot be opened or locked.
    """
    fd = _open(path, flags, mode)
    try:
        for pause_s in (*_PROBED_S, None):
            if _lock(fd, fcntl.LOCK_EX):
                return fd
            if pause_s is not None:
                time.sleep(pause_s)
    except BaseException:
        release(fd)
        raise
    release(fd)
    return None


def wait_for(path: str, *, make: bool = False, shared: bool = False) -> int:
    """Wait for the lock of a file that is there, or is made; return the descriptor that holds it until `release`.

    Args:
        path: the file.
        make: it may not be there.
        shared: together with others that share it.

    Raises:
        OSError: the file cannot be opened or locked.
    """
    fd = _open(path, os.O_RDWR | os.O_CREAT, 0o644) if make else _open(path, os.O_RDONLY, 0)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    except BaseException:
        release(fd)
        raise
    return fd


def is_taken(path: str) -> bool:
    """Whether a process, this one included, holds the lock of a file; not where there is no file.

    Raises:
        OSError: the file cannot be opened or locked.
    """
    try:
        fd = _open(path, os.O_RDONLY, 0)
    except FileNotFoundError:
        return False
    try:
        return not _lock(fd, fcntl.LOCK_SH)
    finally:
        release(fd)


def file_identity(path: str) -> tuple[int, int] | None:
    """Return device and inode of a file or folder; None where there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def adopt(fd: int) -> int:
    """Take over a descriptor that holds a lock already; return it."""
    with _changing:
        _listed.add(fd)
    return fd


def release(fd: int) -> None:
    """Close a descriptor of this module and let its lock go; in a child that closed it already, do nothing."""
    with _changing:
        if fd in _listed:
            _listed.remove(fd)
            os.close(fd)


def _open(path: str, flags: int, mode: int) -> int:
    with _changing:
        fd = os.open(path, flags | os.O_CLOEXEC, mode)
        _listed.add(fd)
    return fd


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_child() -> None:
    for fd in _listed:
        with contextlib.suppress(OSError):
            os.close(fd)
    _listed.clear()
    _changing.release()


os.register_at_fork(before=_changing.acquire, after_in_parent=_changing.release, after_in_child=_in_child)
