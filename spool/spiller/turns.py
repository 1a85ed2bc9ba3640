"""Taking turns at the cold objects of a hot root: whoever brings packs over, and whoever deletes them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from spool.stores.local import map_os_error


@contextlib.contextmanager
def turn(root: str, *, alone: bool) -> Iterator[None]:
    """Wait until nobody else changes what streams of a hot root have in the cold one; a dead process holds nobody up.

    An array's document is read, changed and written, and a pack that is being brought over must not be deleted
    meanwhile: the spiller and `spool gc` may run side by side.

    Args:
        root: the hot root.
        alone: for who deletes; those that bring packs over, each of another stream, do it together.

    Raises:
        StorageError: the lock file cannot be opened.
    """
    path = f"{root}/cold.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise map_os_error(error, what="open", path=path) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)
