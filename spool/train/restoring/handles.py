"""The spool that a trainer reads from: its own handle, or one that is opened for a URI and kept."""

from __future__ import annotations

import os
import threading
from typing import Any

from spool.arguments import refused
from spool.handle import Spool
from spool.handle import open as open_spool

_kept: dict[str, Spool] = {}
_lock = threading.Lock()


def handle(sp: Any) -> Spool:
    """Return ``sp``, or the handle of a spool's URI: one a process, opened on first use and kept.

    Raises:
        InputError: it is neither.
        NotFoundError: there is no such spool.
    """
    if isinstance(sp, Spool):
        return sp
    if not isinstance(sp, str | os.PathLike):
        raise refused("sp", "an open spool, or its URI", sp)
    uri = os.fspath(sp)
    with _lock:
        if uri not in _kept:
            _kept[uri] = open_spool(uri, create=False)
        return _kept[uri]


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 - another thread may have held it
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
