"""What other processes do with the stores of a cold root."""

from __future__ import annotations

import hashlib
import os
import signal
import sys

from spool.stores import local
from spool.stores.objects import PIECE_BYTES, open_objects

_opened = {}


def digest(store, wanted):
    """Return one digest of what the ranges hold."""
    return hashlib.sha256(b"".join(store.get_ranges(wanted)) + store.get(wanted[0][0])).hexdigest()


def inherit(stores, environment):
    """Keep the stores that a parent had open, and its environment: a fork server has that of when it was started."""
    os.environ.update(environment)
    _opened.update(stores)


def pooled(job):
    """`digest` of a store that is kept open here."""
    url, wanted = job
    if url not in _opened:
        _opened[url] = open_objects(url)
    return digest(_opened[url], wanted)


def read_and_leave(store, wanted, *, close):
    """Read in a forked child, then end it as an interpreter ends."""
    import atexit

    status = 1
    try:
        store.get_ranges(wanted)
        if close:
            store.close()
        atexit._run_exitfuncs()
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def die_in_rename(url, key):
    """Be killed in a put before the object gets its name."""
    local.os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    open_objects(url).put(key, b"x" * 1000)


def die_in_upload(url, key):
    """Put an object in parts, slowly enough to be killed."""
    open_objects(url).put(key, bytes(3 * PIECE_BYTES))
