"""Reading by reference: from this spool, or from the one that a reference belongs to."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import unquote

import msgspec

from spool.catalog import Catalog
from spool.config import Config, search_roots
from spool.errors import InputError, IntegrityError, NotFoundError, ReleasedError, SpoolError, another_cold_root
from spool.feeds import Feeds
from spool.formats.arrays import Ragged
from spool.logs.keys import gone_key
from spool.logs.packs import GoneMark, parse_tombstone, read_gone
from spool.model.fields import BUILT_IN, FieldSpec, Schema
from spool.model.refs import Extent, Inline, Ref, SegmentRef, StepRef
from spool.observe import Observer
from spool.read.cold import ColdTier
from spool.read.hot import HotTier
from spool.read.lookup import Selection, extents_of
from spool.read.reader import ByteRange, Reader
from spool.read.sample import Coverage, Sample
from spool.read.select import Tokens
from spool.read.sound import name_of
from spool.read.tier import Deletion, Tier
from spool.read.watch import Watch
from spool.root import open_cold, read_cold_identity, read_identity
from spool.stores.hot import HotStore
from spool.stores.objects import Objects

log = logging.getLogger("spool.read")


class Readers:
    """One reader a spool, made when a reference first asks for it.

    Args:
        config: of this spool; its bounds hold for each reader.
        spool_id: of this spool.
        catalog: knows arrays that were attached late.
        feeds: bring it up to date; have the cold root.
        observer: told of reads; None for nobody.

    Attributes:
        store: of this spool's hot root; None where it was opened from its cold one.
    """

    def __init__(
        self, config: Config, spool_id: str, catalog: Catalog, feeds: Feeds, observer: Observer | None = None
    ) -> None:
        self._config = config
        self._observer = observer
        self._spool_id = spool_id
        self._catalog = catalog
        self._feeds = feeds
        self.store = None if config.root is None else self._store_at(config.root)
        self._tiers: dict[str, list[Tier]] = {}
        self._readers: dict[str, Reader] = {}
        self._looked: set[str] = set()
        own: list[Tier] = []
        if self.store is not None:
            own.append(_hot_tier(self.store))
        if feeds.cold is not None:
            own.append(self._cold_tier(feeds.cold.objects, spool_id))
        self._looked.update(config.urls)
        self._add(spool_id, own)

    def read(
        self,
        refs: Sequence[Ref],
        *,
        fields: Sequence[str] | None,
        tokens: Sequence[Tokens] | None,
        layers: slice | None,
        dtype: Literal["train", "stored"],
        out: Sequence[Mapping[str, Any]] | None,
        missing: Literal["error"] | int,
        verify: Literal["whole", "always", "never"],
    ) -> list[Sample]:
        """See `Spool.read`; all references are of one spool."""
        refs, late = self._with_attached(refs, fields)
        reader = self._of_all(refs)
        with Watch(self._observer) as watch:
            try:
                return reader.read(
                    refs,
                    fields=fields,
                    tokens=tokens,
                    layers=layers,
                    dtype=dtype,
                    out=out,
                    missing=missing,
                    verify=verify,
                    seen=watch.seen,
                    late=late,
                )
            except (ReleasedError, IntegrityError) as error:
                raise _naming_reference(error, refs) from error

    def locate(
        self, ref: Ref, *, fields: Sequence[str] | None, tokens: Tokens, layers: slice | None
    ) -> list[ByteRange]:
        """See `Spool.locate`."""
        (whole,), late = self._with_attached([ref], fields)
        self._look(whole)
        return self._of(whole).locate(whole, fields=fields, tokens=tokens, layers=layers, late=late)

    def coverage(self, refs: Sequence[Ref], fields: Sequence[str] | None) -> list[dict[str, Coverage]]:
        """See `Spool.coverage`; all references are of one spool."""
        refs, late = self._with_attached(refs, fields)
        return self._of_all(refs).coverage(refs, fields, late=late)

    def select(self, ref: Ref, name: str) -> Selection | None:
        """Return what a field of a reference is, which rows there are and which were never sent; None for nothing."""
        (whole,), late = self._with_attached([ref], [name])
        self._look(whole)
        return self._of(whole).select(whole, name, late=late)

    def schema(self, stream: str) -> Schema:
        """Return the fields of a stream of this spool."""
        return self._readers[self._spool_id].schema(stream)

    def inline(self, refs: list[SegmentRef], fields: Sequence[str]) -> list[SegmentRef]:
        """Return the references with the payload of ``fields`` inside.

        Raises:
            InputError: a field is ragged.
        """
        samples = self._readers[self._spool_id].read(refs, fields=list(fields))
        return [
            msgspec.structs.replace(ref, inline={name: _inline(name, value) for name, value in sample.items()})
            for ref, sample in zip(refs, samples, strict=True)
        ]

    def close(self) -> None:
        """Let go of all open files."""
        for reader in self._readers.values():
            reader.close()

    def _with_attached(
        self, refs: Sequence[Ref], fields: Sequence[str] | None
    ) -> tuple[list[Ref], dict[str, FieldSpec]]:
        """Return references with the extents of late arrays among ``fields``, and what such arrays are.

        Of an array without rows no stream says that: one of a segment whose response is empty.
        """
        found: list[Ref] = list(refs)
        specs: dict[str, FieldSpec] = {}
        lacking = [i for i, ref in enumerate(found) if self._may_have_more(ref, fields)]
        if lacking:
            self._feeds.catch_up()
        for i in lacking:
            found[i] = self._with_late(found[i], specs)
        return found, specs

    def _may_have_more(self, ref: Ref, fields: Sequence[str] | None) -> bool:
        lacks = not all(ref.extents.values()) if fields is None else not all(_carries(ref, name) for name in fields)
        return lacks and isinstance(ref, StepRef | SegmentRef) and ref.spool_id == self._spool_id

    def _with_late(self, ref: Ref, specs: dict[str, FieldSpec]) -> Ref:
        assert isinstance(ref, StepRef | SegmentRef)
        late: dict[str, tuple[Extent, ...]] = {}
        for attached in self._catalog.attachments(ref.session_id):
            if attached.target == ref.key:
                late.update(attached.extents)
                specs[attached.field.name] = attached.field
        return msgspec.structs.replace(ref, extents={**ref.extents, **late}) if late else ref

    def _of_all(self, refs: Sequence[Ref]) -> Reader:
        """Return the reader of the spool that all references are of.

        Raises:
            InputError: they are of several.
            NotFoundError: it is not found.
        """
        owners = {ref.spool_id for ref in refs}
        if len(owners) > 1:
            raise InputError(f"one read takes references of one spool, got {sorted(owners)}")
        for ref in refs:
            if not self._looked.issuperset(ref.roots):
                self._look(ref)
        return self._of(refs[0]) if refs else self._readers[self._spool_id]

    def _of(self, ref: Ref) -> Reader:
        """Return the reader of the reference's spool.

        Raises:
            NotFoundError: it is neither here, nor in ``$SPOOL_ROOTS``, nor where the reference's hints say.
        """
        reader = self._readers.get(ref.spool_id)
        if reader is None:
            for root in search_roots():
                self._look_at(root)
            reader = self._readers.get(ref.spool_id)
        if reader is None:
            raise NotFoundError(
                f"the reference is of spool {ref.spool_id}, this is {self._spool_id}; name its root in SPOOL_ROOTS",
                spool_id=ref.spool_id,
            )
        return reader

    def _look(self, ref: Ref) -> None:
        """Add the roots that a reference hints at, where there are such: another node's, another spool's."""
        for hint in ref.roots:
            self._look_at(hint)

    def _look_at(self, url: str) -> None:
        if url in self._looked:
            return
        self._looked.add(url)
        found = self._root_at(url)
        if found is not None:
            self._add(found[0], [found[1]])

    def _root_at(self, url: str) -> tuple[str, Tier] | None:
        """Return the spool of a root and the tier that it is; None where there is none, or it cannot be reached."""
        if "\0" in url:
            return None
        path = None if "://" in url and not url.startswith("file://") else unquote(url.removeprefix("file://"))
        try:
            if path is not None:
                identity = read_identity(path)
                if identity is not None and identity.tier == "hot":
                    return identity.id, _hot_tier(self._store_at(path))
                if identity is None:
                    return None
            objects = open_cold(self._config, url if path is None else f"file://{path}", self._observer)
            identity = read_cold_identity(objects)
        except SpoolError as error:
            log.warning("the root %s is passed over: %s", url, error)
            return None
        return None if identity is None else (identity.id, self._cold_tier(objects, identity.id))

    def _add(self, spool_id: str, tiers: list[Tier]) -> None:
        """Add places to look in for the bytes of a spool; the readers that there are look there too."""
        known = self._tiers.setdefault(spool_id, [])
        known += tiers
        if spool_id not in self._readers:
            reader = Reader(known, threads=self._config.threads, reuse_bytes=self._config.reuse_bytes)
            self._readers[spool_id] = reader

    def _store_at(self, root: str) -> HotStore:
        config = self._config
        return HotStore(root, page_cache_bytes=config.page_cache_bytes, max_open_files=config.max_open_files)

    def _cold_tier(self, objects: Objects, spool_id: str) -> ColdTier:
        def deletion(stream: str, pack: int) -> Deletion | None:
            try:
                data = objects.get(gone_key(stream, pack))
            except NotFoundError:
                return None
            return _deletion(parse_tombstone(data, gone_key(stream, pack)))

        def confirm() -> None:
            there = read_cold_identity(objects)
            if there is None or there.id != spool_id:
                raise another_cold_root(objects.url, None if there is None else there.id, spool_id)

        return ColdTier(objects, deletion, confirm, concurrency=self._config.cold_concurrency)


def _hot_tier(store: HotStore) -> HotTier:
    return HotTier(store, lambda stream, pack: _deletion(read_gone(store.root, stream, pack)))


def _deletion(gone: GoneMark | None) -> Deletion | None:
    return None if gone is None else Deletion(gone.at or 0.0, gone.reason or "nobody said why")


def _carries(ref: Ref, name: str) -> bool:
    return name in BUILT_IN or name in ref.inline or bool(extents_of(ref, name))


def _inline(name: str, value: Any) -> Inline:
    if isinstance(value, Ragged):
        raise InputError(f"{name} is ragged and cannot travel inside a reference; read it by the reference", field=name)
    return Inline(value.dtype.name, value.shape, value.tobytes())


def _naming_reference(error: SpoolError, refs: Sequence[Ref]) -> SpoolError:
    """Return the error with the first of the references that has the rows it is about."""
    stream, field, rows = (error.details.get(name) for name in ("stream", "field", "rows"))
    if not isinstance(field, str) or not isinstance(rows, list) or "ref" in error.details:
        return error
    for ref in refs:
        for name, extents in ref.extents.items():
            for extent in extents if name.split(".")[0] == field.split(".")[0] else ():
                if extent.stream == stream and extent.row < rows[1] and rows[0] < extent.row + extent.n:
                    return type(error)(f"{name_of(ref)}: {error}", **{**error.details, "ref": name_of(ref)})
    return error
