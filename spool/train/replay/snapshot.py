"""The references of a dataset, fixed when it was opened: metadata alone, a few hundred bytes a segment."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Hashable, Iterable
from itertools import chain, islice
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from spool.model.refs import SegmentRef

SAMPLED = 48
"""References from whose bytes the dictionary is made that all are compressed with."""

_WINDOW_BYTES = 1 << 15
_RAW = -15


class Snapshot(NamedTuple):
    """References in their order; numbers of all, and each packed for itself.

    Attributes:
        rows: int64 ``[n]``: rows of the forward that each expands to.
        groups: int64 ``[n]``: number of its group, by first appearance; a segment without group is one of its own.
        digests: uint64 ``[n]``: of what each is, by id and length.
        ends: int64 ``[n]``: where each ends in ``packed``.
        packed: msgpack of the references, each deflated with ``dictionary``.
        dictionary: bytes that references have in common.
    """

    rows: NDArray[np.int64]
    groups: NDArray[np.int64]
    digests: NDArray[np.uint64]
    ends: NDArray[np.int64]
    packed: bytes
    dictionary: bytes

    def ref(self, number: int) -> SegmentRef:
        """Return a reference, equal to the one that was taken in."""
        start = int(self.ends[number - 1]) if number else 0
        inflate = zlib.decompressobj(_RAW, zdict=self.dictionary)
        data = inflate.decompress(self.packed[start : int(self.ends[number])])
        return msgspec.msgpack.decode(data, type=SegmentRef)

    def fingerprint(self, n: int) -> str:
        """Return what the first ``n`` references are, and their order, in 16 characters."""
        return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(self.digests[:n]).data)

    @property
    def n_bytes(self) -> int:
        """Memory that it takes."""
        columns = (self.rows, self.groups, self.digests, self.ends)
        return sum(column.nbytes for column in columns) + len(self.packed) + len(self.dictionary)


def snapshot_of(refs: Iterable[SegmentRef]) -> Snapshot:
    """Return the snapshot of references; takes them one by one."""
    found = iter(refs)
    first = list(islice(found, SAMPLED))
    dictionary = b"".join(msgspec.msgpack.encode(ref) for ref in first)[-_WINDOW_BYTES:]
    rows, groups, digests, ends = array("q"), array("q"), array("Q"), array("q")
    packed, numbers = bytearray(), dict[Hashable, int]()
    for ref in chain(first, found):
        deflate = zlib.compressobj(6, zlib.DEFLATED, _RAW, zdict=dictionary)
        packed += deflate.compress(msgspec.msgpack.encode(ref)) + deflate.flush()
        ends.append(len(packed))
        rows.append(ref.n_rows)
        groups.append(numbers.setdefault(_group(ref), len(numbers)))
        digests.append(xxhash.xxh3_64_intdigest(f"{ref.spool_id}/{ref.id}:{ref.n_tokens}".encode()))
    return Snapshot(
        np.array(rows, np.int64), np.array(groups, np.int64), np.array(digests, np.uint64), np.array(ends, np.int64),
        bytes(packed), dictionary,
    )  # fmt: skip


def _group(ref: SegmentRef) -> Hashable:
    return ref.id if ref.group_id is None else (ref.rollout_step, ref.group_id)
