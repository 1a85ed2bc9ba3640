"""Reading by reference: from this spool, or from the one that a reference belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from spool.catalog import Catalog
from spool.config import Config, search_roots
from spool.errors import InputError, NotFoundError
from spool.formats.arrays import Ragged
from spool.logs import LogFeeder
from spool.model.fields import BUILT_IN
from spool.model.refs import Extent, Inline, Ref, SegmentRef, StepRef
from spool.read.hot import HotTier
from spool.read.reader import ByteRange, Reader
from spool.read.sample import Sample
from spool.read.select import Tokens
from spool.root import read_identity
from spool.stores.hot import HotStore


class Readers:
    """One reader a spool, made when a reference first asks for it.

    Args:
        config: of this spool; its bounds hold for each reader.
        spool_id: of this spool.
        catalog: knows arrays that were attached late.
        feeder: feeds it.

    Attributes:
        store: of this spool.
    """

    def __init__(self, config: Config, spool_id: str, catalog: Catalog, feeder: LogFeeder) -> None:
        self._config = config
        self._spool_id = spool_id
        self._catalog = catalog
        self._feeder = feeder
        self.store = self._store_at(config.root)
        self._readers = {spool_id: self._reader(self.store)}

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
        if fields is not None and not BUILT_IN.issuperset(fields):
            refs = [self._with_attached(ref, fields) for ref in refs]
        owners = {ref.spool_id for ref in refs}
        if len(owners) > 1:
            raise InputError(f"one read takes references of one spool, got {sorted(owners)}")
        reader = self._of(refs[0]) if refs else self._readers[self._spool_id]
        return reader.read(
            refs, fields=fields, tokens=tokens, layers=layers, dtype=dtype, out=out, missing=missing, verify=verify
        )

    def locate(
        self, ref: Ref, *, fields: Sequence[str] | None, tokens: Tokens, layers: slice | None
    ) -> list[ByteRange]:
        """See `Spool.locate`."""
        whole = ref if fields is None else self._with_attached(ref, fields)
        return self._of(whole).locate(whole, fields=fields, tokens=tokens, layers=layers)

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

    def _with_attached(self, ref: Ref, fields: Sequence[str]) -> Ref:
        """Return ``ref`` with the extents of late arrays among ``fields`` that it does not carry."""
        if all(_carries(ref, name) for name in fields):
            return ref
        if not isinstance(ref, StepRef | SegmentRef) or ref.spool_id != self._spool_id:
            return ref
        self._feeder.catch_up()
        target = ref.key
        late: dict[str, tuple[Extent, ...]] = {}
        for attached in self._catalog.attachments(ref.session_id):
            if attached.target == target:
                late.update(attached.extents)
        return msgspec.structs.replace(ref, extents={**ref.extents, **late}) if late else ref

    def _of(self, ref: Ref) -> Reader:
        """Return the reader of the reference's spool: this one, one in ``$SPOOL_ROOTS``, or where its hints say."""
        reader = self._readers.get(ref.spool_id)
        if reader is not None:
            return reader
        for root in (*search_roots(), *(hint.removeprefix("file://") for hint in ref.roots)):
            identity = read_identity(root)
            if identity is not None and identity.id == ref.spool_id:
                return self._readers.setdefault(ref.spool_id, self._reader(self._store_at(root)))
        raise NotFoundError(
            f"the reference is of spool {ref.spool_id}, this is {self._spool_id}; name its root in SPOOL_ROOTS",
            spool_id=ref.spool_id,
        )

    def _reader(self, store: HotStore) -> Reader:
        return Reader([HotTier(store)], threads=self._config.threads, reuse_bytes=self._config.reuse_bytes)

    def _store_at(self, root: str) -> HotStore:
        config = self._config
        return HotStore(root, page_cache_bytes=config.page_cache_bytes, max_open_files=config.max_open_files)


def _carries(ref: Ref, name: str) -> bool:
    return name in ref.extents or name in BUILT_IN or name in ref.inline or f"{name}.offsets" in ref.extents


def _inline(name: str, value: Any) -> Inline:
    if isinstance(value, Ragged):
        raise InputError(f"{name} is ragged and cannot travel inside a reference; read it by the reference", field=name)
    return Inline(value.dtype.name, value.shape, value.tobytes())
