"""A parent whose forked child forgets the store it inherited and ends as any interpreter does; run as a program."""

from __future__ import annotations

import gc
import logging
import os
import sys
import time

from spool.stores.objects import open_objects

logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
store = open_objects(sys.argv[1])
store.put("k", bytes(100_000))
wanted = [("k", 0, 100_000)] * 8
store.get_ranges(wanted)
pid = os.fork()
if pid == 0:
    if sys.argv[2] == "use":
        store.get_ranges(wanted)
    del store
    gc.collect()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
began = time.monotonic()
assert store.get_ranges(wanted) == [bytes(100_000)] * 8
assert time.monotonic() - began < 10
store.close()
