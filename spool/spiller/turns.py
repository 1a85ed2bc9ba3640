"""Taking turns at the cold objects of a hot root: whoever brings packs over, and whoever deletes them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

from spool.errors import LockedError
from spool.stores.local import map_os_error

WAIT_S, LOOK_S = 120.0, 0.05


@contextlib.contextmanager
def turn(root: str, *, alone: bool) -> Iterator[None]:
    """Wait until nobody else changes what streams of a hot root have in the cold one; a dead process holds nobody up.

    An array's document is read, changed and written, and a pack that is being brought over must not be deleted
    meanwhile: the spiller and `spool gc` may run side by side.

    Args:
        root: the hot root.
        alone: for who deletes; those that bring packs over, each of another stream, do it together.

    Raises:
        LockedError: the other one did not end within `WAIT_S`; it may be stopped.
        StorageError: the lock file cannot be opened.
    """
    path = f"{root}/cold.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise map_os_error(error, what="open", path=path) from error
    try:
        _wait(fd, path, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def _wait(fd: int, path: str, kind: int) -> None:
    until = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise LockedError(
                    f"another process has changed the cold objects of this root for {WAIT_S:g} s (it holds {path}): a "
                    "spiller, or `spool gc`; see whether it is stopped, then try again",
                    file=path,
                ) from None
            time.sleep(LOOK_S)
        else:
            return
