"""One spiller a hot root: who holds the lock is it, and it is started with the lock already held.

The lock is taken before the process is made and handed over to it: of many writers that find no spiller one starts
one, and the others see it from the first moment on. It is gone with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from typing import IO

from spool import locks
from spool.errors import LockedError
from spool.stores.local import map_os_error

NICE = 10
"""By how much a spiller that a writer started is nicer than that."""

MAPPED_BYTES = 256 << 10
"""Larger pieces of memory are mapped one by one."""
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # of glibc's malloc.h


def lock_path(root: str) -> str:
    """Return the lock file of a root's spiller."""
    return f"{root}/spiller.lock"


def take_lock(root: str) -> int | None:
    """Return the descriptor that holds the spiller's lock until `locks.release`; None where another process has it.

    Raises:
        StorageError: the file cannot be opened.
    """
    path = lock_path(root)
    try:
        return locks.take(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise map_os_error(error, what="open", path=path) from error


def require_lock(root: str) -> int:
    """`take_lock`, for a process that is of no use without it.

    Raises:
        LockedError: another spiller works.
    """
    fd = take_lock(root)
    if fd is None:
        raise LockedError(f"a spiller works on {root} already; one is enough: `spool status` shows what it does")
    return fd


def is_running(root: str) -> bool:
    """Whether a process holds the spiller's lock.

    Raises:
        StorageError: the file cannot be opened.
    """
    path = lock_path(root)
    try:
        return locks.is_taken(path)
    except OSError as error:
        raise map_os_error(error, what="open", path=path) from error


_started: list[subprocess.Popen[bytes]] = []
"""Spillers that run on when the handle that started them is gone; one that is forgotten while it runs is warned of."""


def start(root: str, uri: str) -> subprocess.Popen[bytes] | None:
    """Start a spiller unless there is one; it outlives this process and ends when nothing needs it.

    Args:
        root: the hot root.
        uri: of the spool, with its options.

    Returns:
        The process, to be polled; None where one works already.
    """
    fd = take_lock(root)
    if fd is None:
        return None
    try:
        with _log(root) as output:
            started = subprocess.Popen(  # noqa: S603 - our own command line
                [sys.executable, "-m", "spool", "spill", uri, "--follow", "--until-idle", "--lock-fd", str(fd)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(fd,),
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": import_path()},
            )
        _started[:] = [*(known for known in _started if known.poll() is None), started]
        return started
    finally:
        locks.release(fd)


def settle_in(*, beside: bool) -> None:
    """Make this process one that only spills: memory goes back to the system as soon as it is not needed.

    Without that every thread keeps what it freed of the last part that it sent.

    Args:
        beside: it was started beside a writer, and leaves the CPU to the processes that record and roll out.
    """
    with contextlib.suppress(OSError, AttributeError):
        allocator = ctypes.CDLL(None).mallopt
        allocator(M_MMAP_THRESHOLD, MAPPED_BYTES)
        allocator(M_ARENA_MAX, 2)
    if beside:
        step_back(NICE)


def step_back(by: int) -> None:
    """Make this process nicer; it leads a session of its own.

    Where the kernel shares the CPU between sessions first, niceness alone counts inside that session only.
    """
    with contextlib.suppress(OSError):
        os.nice(by)
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as group:
        group.write(str(by))


def _log(root: str) -> IO[bytes]:
    return open(f"{root}/spiller.log", "ab")


def import_path() -> str:
    """Return the ``PYTHONPATH`` with which another process finds this very package."""
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
