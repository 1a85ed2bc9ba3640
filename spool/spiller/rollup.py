"""Rolling manifests up, so that a long run is listed and read in few requests."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from spool.formats import manifest
from spool.logs.cold import MANIFESTS
from spool.points import reach
from spool.stores.objects import Objects

MANIFESTS_ROLLED = 64


def roll_up(objects: Objects, streams: Sequence[str]) -> int:
    """Put each `MANIFESTS_ROLLED` manifests of ``streams`` into one; return how many are left of all.

    The roll-up is there before the first of its manifests goes; its name follows from theirs.

    Raises:
        StorageError: the cold root failed; call it again.
    """
    found = [info.key for info in objects.list(MANIFESTS)]
    own = [key for key in found if key.rpartition("-")[0].endswith(tuple(streams))] if streams else []
    n_left = len(found)
    for start in range(0, len(own) - MANIFESTS_ROLLED + 1, MANIFESTS_ROLLED):
        chosen = own[start : start + MANIFESTS_ROLLED]
        with ThreadPoolExecutor(8) as threads:
            packs = [pack for data in threads.map(objects.get, chosen) for pack in manifest.decode(data)]
        objects.put(_rollup_key(chosen), manifest.encode(packs))
        reach("rollup.written")
        for key in chosen:
            objects.delete([key])
            reach("rollup.removed")
        n_left -= len(chosen) - 1
    return n_left


def _rollup_key(keys: Sequence[str]) -> str:
    time = keys[-1].removeprefix(MANIFESTS).partition("-")[0]
    return f"{MANIFESTS}{time}-rollup-{xxhash.xxh3_64_hexdigest(' '.join(keys).encode())}.parquet"
