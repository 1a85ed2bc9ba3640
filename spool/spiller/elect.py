"""One spiller a hot root: who holds the lock is it, and it is started with the lock already held.

The lock is taken before the process is made and handed over to it: of many writers that find no spiller one starts
one, and the others see it from the first moment on. It is gone with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from typing import IO

from spool.errors import LockedError
from spool.stores.local import map_os_error

TRY_S = 0.2

_handing_over = threading.Lock()


def lock_path(root: str) -> str:
    """Return the lock file of a root's spiller."""
    return f"{root}/spiller.lock"


def take_lock(root: str) -> int | None:
    """Return the descriptor that holds the spiller's lock until it is closed; None where another process has it.

    Raises:
        StorageError: the file cannot be opened.
    """
    path = lock_path(root)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise map_os_error(error, what="open", path=path) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def require_lock(root: str) -> int:
    """`take_lock`, for a process that is of no use without it.

    Raises:
        LockedError: another spiller works.
    """
    until = time.monotonic() + TRY_S
    while (fd := take_lock(root)) is None and time.monotonic() < until:
        time.sleep(TRY_S / 20)  # who only looks whether there is a spiller holds the lock for a moment
    if fd is None:
        raise LockedError(f"a spiller works on {root} already; one is enough: `spool status` shows what it does")
    return fd


def is_running(root: str) -> bool:
    """Whether a process holds the spiller's lock."""
    try:
        fd = os.open(lock_path(root), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def start(root: str, uri: str) -> subprocess.Popen[bytes] | None:
    """Start a spiller unless there is one; it outlives this process and ends when nothing needs it.

    Args:
        root: the hot root.
        uri: of the spool, with its options.

    Returns:
        The process, to be polled; None where one works already.
    """
    with _handing_over:  # a child forked meanwhile would hold the lock as well
        fd = take_lock(root)
        if fd is None:
            return None
        try:
            with _log(root) as output:
                return subprocess.Popen(  # noqa: S603 - our own command line
                    [sys.executable, "-m", "spool", "spill", uri, "--follow", "--until-idle", "--lock-fd", str(fd)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(fd,),
                    start_new_session=True,
                    env={**os.environ, "PYTHONPATH": _import_path()},
                )
        finally:
            os.close(fd)


def _log(root: str) -> IO[bytes]:
    return open(f"{root}/spiller.log", "ab")


def _import_path() -> str:
    """Return where the spiller is to find this very package."""
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))


os.register_at_fork(
    before=_handing_over.acquire, after_in_parent=_handing_over.release, after_in_child=_handing_over.release
)
