"""Rolling manifests and fact files up, so that a long run is listed and read in few requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import xxhash

from spool.errors import IntegrityError, NotFoundError
from spool.formats import manifest
from spool.logs.cold import ColdFeeder
from spool.logs.keys import FACTS, MANIFESTS, is_rollup, parse_manifest_key
from spool.points import reach
from spool.stores.objects import Objects

log = logging.getLogger("spool.spiller")

OBJECTS_ROLLED = 64


class _Kind(NamedTuple):
    """Objects of which many can be one: their contents are lists, and the one holds all of these."""

    prefix: str
    decode: Callable[[bytes], list[Any]]
    encode: Callable[[Sequence[Any]], bytes]


_MANIFEST = _Kind(MANIFESTS, manifest.decode, manifest.encode)
_FACT_FILE = _Kind(FACTS, manifest.decode_facts, manifest.encode_facts)


def roll_up(cold: ColdFeeder, streams: Collection[str] | None = None) -> None:
    """Put each `OBJECTS_ROLLED` manifests of ``streams`` into one, and each so many fact files, whosever they are.

    A roll-up is there before the first of what it holds goes; its name follows from theirs. Manifests of deleted packs
    and whatever is damaged are left as they are. Fact files belong to no node: two that roll them up at once may leave
    facts twice, which say no more than once.

    Args:
        cold: the cold root.
        streams: those that nobody else rolls up; all where None.

    Raises:
        StorageError: the cold root failed; call it again.
    """
    objects, own = cold.objects, None if streams is None else set(streams)
    manifests = [key for key in _single(objects, _MANIFEST) if own is None or parse_manifest_key(key)[0] in own]
    if len(manifests) >= OBJECTS_ROLLED:
        gone = cold.tombstones()
        _roll_all(objects, _MANIFEST, [key for key in manifests if parse_manifest_key(key) not in gone])
    _roll_all(objects, _FACT_FILE, _single(objects, _FACT_FILE))


def _single(objects: Objects, kind: _Kind) -> list[str]:
    return [info.key for info in objects.list(kind.prefix) if not is_rollup(info.key)]


def _roll_all(objects: Objects, kind: _Kind, keys: Sequence[str]) -> None:
    with ThreadPoolExecutor(8) as threads:
        for chosen in _batches(keys):
            found = dict(zip(chosen, threads.map(lambda key: _read(objects, kind, key), chosen), strict=True))
            _roll(objects, kind, {key: contents for key, contents in found.items() if contents})


def _batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(keys) - OBJECTS_ROLLED + 1, OBJECTS_ROLLED):
        yield keys[start : start + OBJECTS_ROLLED]


def _read(objects: Objects, kind: _Kind, key: str) -> list[Any]:
    """Return what is in an object; nothing where it cannot be believed or is no longer there."""
    try:
        return kind.decode(objects.get(key))
    except NotFoundError:
        return []
    except IntegrityError as error:
        log.warning("%s/%s is not rolled up: %s", objects.url, key, error)
        return []


def _roll(objects: Objects, kind: _Kind, chosen: dict[str, list[Any]]) -> None:
    """Put objects into one."""
    if len(chosen) < 2:
        return
    objects.put(_rollup_key(kind, list(chosen)), kind.encode([item for found in chosen.values() for item in found]))
    reach("rollup.written")
    for key in chosen:
        objects.delete([key])
        reach("rollup.removed")


def _rollup_key(kind: _Kind, keys: Sequence[str]) -> str:
    time = keys[-1].removeprefix(kind.prefix).partition("-")[0]
    return f"{kind.prefix}{time}-rollup-{xxhash.xxh3_64_hexdigest(' '.join(keys).encode())}.parquet"
