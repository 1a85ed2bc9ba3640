"""What processes that died left half-done: it is done to its end, or taken away.

Nothing here is needed to read: a pack that is marked as gone is gone, and a temporary name is nobody's.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from spool.catalog import Catalog
from spool.errors import IntegrityError, NotFoundError, SpoolError
from spool.formats import manifest, records
from spool.formats.manifest import PackEntry
from spool.logs import LogFeeder
from spool.logs.cold import ColdFeeder
from spool.logs.keys import MANIFESTS, is_rollup, manifest_key, parse_manifest_key
from spool.logs.packs import list_packs, marker_path, read_entry, write_cold
from spool.logs.streams import records_path, stream_names
from spool.stores.local import read_file
from spool.stores.objects import Objects
from spool.stores.units import HotUnits

log = logging.getLogger("spool.spiller")

STALE_S = 3600.0
"""A temporary file that is older is nobody's any more."""

Pack = tuple[str, int]


class Mender:
    """Sees to what crashes and damage left of one hot root, on behalf of its spiller.

    Args:
        root: the hot root.
        catalog: the root's.
        feeder: feeds it from the root; measures it.
        cold: the cold root; None where there is none.
        again: brings a sealed pack over, whatever its marker says.
    """

    def __init__(
        self,
        root: str,
        catalog: Catalog,
        feeder: LogFeeder,
        cold: ColdFeeder | None,
        again: Callable[[str, int], object],
    ) -> None:
        self._root = root
        self._catalog = catalog
        self._feeder = feeder
        self._cold = cold
        self._again = again
        self._started = False
        self._swept_at = 0.0
        self._seen: set[str] = set()

    def work(self, *, recovered: bool) -> None:
        """Do what is due; to be called again and again, with the catalog up to date.

        Args:
            recovered: streams of dead writers were sealed, so that what they take is known now.

        Raises:
            SpoolError: a root failed.
        """
        if not self._started and self._cold is not None:
            mend_markers(self._root, self._cold, self._again)
            list_again(self._root, self._cold, unlisted(self._root, self._cold))
        if self._cold is not None:
            torn = set(self._cold.damaged())
            mend_manifests(self._root, self._cold, torn - self._seen)
            self._seen = torn
        n_swept = 0
        if not self._swept_at or time.monotonic() - self._swept_at > STALE_S:
            self._swept_at = time.monotonic()
            sweep(self._root)
            n_swept = HotUnits(self._root).sweep(older_than_s=STALE_S)
        if recovered or n_swept or not self._started:
            self._feeder.account()
        self._started = True


def sweep(root: str, *, older_than_s: float = STALE_S) -> int:
    """Remove temporary files of the hot root's own folder; return how many.

    Those in a stream's folder are recovery's, which knows whether its writer lives.
    """
    latest, n_swept = time.time() - older_than_s, 0
    with os.scandir(root) as entries:
        for entry in entries:
            temporary = entry.name.startswith(".") and (entry.name.endswith(".tmp") or entry.name.startswith(".spool-"))
            with suppress(FileNotFoundError):
                if temporary and entry.stat().st_mtime <= latest:
                    os.unlink(entry.path)
                    n_swept += 1
    return n_swept


def _is_readable(root: str, stream: str, pack: int) -> bool:
    try:
        read_entry(root, stream, pack)
    except IntegrityError:
        return False
    return True


def mend_markers(root: str, cold: ColdFeeder, again: Callable[[str, int], object]) -> list[Pack]:
    """Write torn markers of spilled packs anew; return those that were.

    What they held is in the pack's manifest. Where that is lost too, a hot copy is brought over again.

    Args:
        root: the hot root.
        cold: the cold root.
        again: brings a sealed pack over.

    Raises:
        SpoolError: a root failed.
    """
    torn = [pack for pack in _spilled(root) if not _is_readable(root, *pack)]
    known = _entries(cold.objects, torn) if torn else {}
    for stream, pack in torn:
        log.warning("%s is torn and is written anew", marker_path(root, stream, pack, "cold"))
        if (stream, pack) in known:
            write_cold(root, known[stream, pack], cold.objects.url)
        elif os.path.exists(records_path(root, stream, pack)):
            again(stream, pack)
    return torn


def _entries(objects: Objects, packs: Iterable[Pack]) -> dict[Pack, PackEntry]:
    """Return what the manifests say of packs."""
    wanted, found = set(packs), dict[Pack, PackEntry]()
    for info in objects.list(MANIFESTS):
        named = None if is_rollup(info.key) else parse_manifest_key(info.key)
        if named is None or named in wanted:
            with suppress(SpoolError):
                entries = [entry for entry, _ in manifest.decode(objects.get(info.key))]
                found.update({(entry.stream, entry.pack): entry for entry in entries})
    return {pack: found[pack] for pack in wanted & found.keys()}


def mend_manifests(root: str, cold: ColdFeeder, torn: Iterable[str]) -> list[Pack]:
    """Write anew manifests that are torn, those of this root's packs; return the packs.

    A torn roll-up does not say which packs were in it, so all of this root's are listed again. It stays: packs of other
    nodes may have been in it.

    Args:
        root: the hot root.
        cold: the cold root.
        torn: keys of the manifests.

    Raises:
        SpoolError: a root failed.
    """
    named = {None if is_rollup(key) else parse_manifest_key(key) for key in torn if key.startswith(MANIFESTS)}
    return list_again(root, cold, [pack for pack in _spilled(root) if None in named or pack in named] if named else [])


def unlisted(root: str, cold: ColdFeeder) -> list[Pack]:
    """Return the packs of a hot root that are in the cold one, and that no manifest lists: their sessions are not seen.

    Raises:
        SpoolError: a root failed.
    """
    listed: set[Pack | None] = set()
    for info in cold.objects.list(MANIFESTS):
        packs = cold.packs_in(info.key) if is_rollup(info.key) else (parse_manifest_key(info.key),)
        if packs is None:
            return []  # a torn roll-up: see `mend_manifests`
        listed.update(packs)
    found = [pack for pack in _spilled(root) if pack not in listed and _is_readable(root, *pack)]
    gone = cold.tombstones() if found else {}
    return [pack for pack in found if pack not in gone]


def list_again(root: str, cold: ColdFeeder, packs: Iterable[Pack]) -> list[Pack]:
    """Put manifests of packs that are in both roots, or were; return those that there was enough left of.

    Raises:
        SpoolError: a root failed.
    """
    done = []
    for stream, pack in packs:
        entry = read_entry(root, stream, pack)
        if entry is not None:
            data = manifest.encode([(entry, _events(root, cold, stream, pack))])
            cold.objects.put(manifest_key(entry), data)
            done.append((stream, pack))
    return done


def _spilled(root: str) -> Iterator[Pack]:
    """Yield the packs whose markers say that they are in the cold root."""
    for stream in stream_names(root):
        with suppress(FileNotFoundError):
            packs = list_packs(f"{root}/streams/{stream}/records")
            yield from ((stream, pack) for pack in sorted(packs.cold - packs.gone))


def _events(root: str, cold: ColdFeeder, stream: str, pack: int) -> list[bytes]:
    try:
        return records.decode(read_file(records_path(root, stream, pack)))
    except NotFoundError:
        return cold.events(stream, pack)
