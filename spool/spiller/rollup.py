"""Rolling manifests up, so that a long run is listed and read in few requests."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from spool.errors import IntegrityError, NotFoundError
from spool.formats import manifest
from spool.formats.manifest import PackEntry
from spool.logs.cold import MANIFESTS, ColdFeeder, is_rollup, parse_manifest_key
from spool.points import reach
from spool.stores.objects import Objects

log = logging.getLogger("spool.spiller")

MANIFESTS_ROLLED = 64

Packs = list[tuple[PackEntry, list[bytes]]]


def roll_up(cold: ColdFeeder, streams: Collection[str] | None = None) -> int:
    """Put each `MANIFESTS_ROLLED` manifests of ``streams`` into one; return how many objects are left of all.

    The roll-up is there before the first of its manifests goes; its name follows from theirs. Those of deleted packs
    and damaged ones are left as they are.

    Args:
        cold: the cold root.
        streams: those that nobody else rolls up; all where None.

    Raises:
        StorageError: the cold root failed; call it again.
    """
    objects, own = cold.objects, None if streams is None else set(streams)
    found = [info.key for info in objects.list(MANIFESTS)]
    single = [key for key in found if not is_rollup(key) and (own is None or parse_manifest_key(key)[0] in own)]
    n_left = len(found)
    if len(single) < MANIFESTS_ROLLED:
        return n_left
    gone = cold.tombstones()
    single = [key for key in single if parse_manifest_key(key) not in gone]
    with ThreadPoolExecutor(8) as threads:
        for chosen in _batches(single):
            packs = dict(zip(chosen, threads.map(lambda key: _read(objects, key), chosen), strict=True))
            n_left -= _roll(objects, {key: found for key, found in packs.items() if found})
    return n_left


def _batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(keys) - MANIFESTS_ROLLED + 1, MANIFESTS_ROLLED):
        yield keys[start : start + MANIFESTS_ROLLED]


def _read(objects: Objects, key: str) -> Packs:
    """Return the packs of a manifest; none where it cannot be believed or is no longer there."""
    try:
        return manifest.decode(objects.get(key))
    except NotFoundError:
        return []
    except IntegrityError as error:
        log.warning("%s/%s is not rolled up: %s", objects.url, key, error)
        return []


def _roll(objects: Objects, chosen: dict[str, Packs]) -> int:
    """Put manifests into one; return how many objects that saves."""
    if len(chosen) < 2:
        return 0
    objects.put(_rollup_key(list(chosen)), manifest.encode([pack for packs in chosen.values() for pack in packs]))
    reach("rollup.written")
    for key in chosen:
        objects.delete([key])
        reach("rollup.removed")
    return len(chosen) - 1


def _rollup_key(keys: Sequence[str]) -> str:
    time = keys[-1].removeprefix(MANIFESTS).partition("-")[0]
    return f"{MANIFESTS}{time}-rollup-{xxhash.xxh3_64_hexdigest(' '.join(keys).encode())}.parquet"
