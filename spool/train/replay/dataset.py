"""A recorded run as a torch dataset: segments by number, or as packed batches.

::

    dataset = SegmentDataset(uri, where="reward > 0.5 and n_tokens < 32768", order="shuffled", seed=1)
    dataset[3]                                                              # a Sample, of torch tensors
    DataLoader(dataset, batch_size=8, collate_fn=list)                      # a batch is one read
    DataLoader(dataset.batches(max_tokens=32768), batch_size=None, num_workers=2)
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, SupportsIndex, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from spool.arguments import instance, integer, names, one_of, optional, refused, size
from spool.config import parse_uri
from spool.errors import AbsentError, GapError, InputError, IntegrityError, NotFoundError, ReleasedError, SpoolError
from spool.formats.arrays import Ragged
from spool.handle import Spool
from spool.handle import open as open_spool
from spool.model.refs import SegmentRef
from spool.read.sample import Sample
from spool.rollout.views import View
from spool.train.replay.order import BatchBy, Ends, Order, Rules
from spool.train.replay.packing import Packer, Wanted
from spool.train.replay.snapshot import Snapshot, snapshot_of
from spool.train.replay.stream import Batch, Batches, Oversize, Share
from spool.train.restoring.tensors import import_torch, same_memory

__all__ = ["Batch", "Batches", "SegmentDataset"]

T = TypeVar("T")
Framework = Literal["torch", "numpy"]

_OF_A_SEGMENT = (NotFoundError, GapError, IntegrityError)
_LOST = (ReleasedError, AbsentError)


class SegmentDataset:
    """The segments that a filter finds when this is made; map-style. What is recorded later does not change it.

    It holds references, no payload: `n_bytes` says how much that is. It pickles with them; each process opens the spool
    for itself, when it first reads.

    Args:
        uri: as `spool.open` takes it; ``$SPOOL_URI`` where None.
        fields: names; all that a segment has where None.
        view: as `Spool.segments` takes it.
        where: a filter, as `Spool.segments` takes it.
        order: of batches: as segments were finalised (``recorded``), or ``shuffled``, anew each epoch. The numbers of
            segments are in recorded order either way, as torch's samplers want them.
        seed: of the orders.
        layers, dtype, missing, verify: as `Spool.read` takes them.
        lost: of segments that were released, or whose files are gone: ``error``, or ``skip`` them and say so.
        framework: ``torch`` for tensors (bfloat16 too), or ``numpy``.

    Raises:
        InputError: an argument does not fit, or the filter does not parse.
        NotFoundError: there is no spool.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | None = None,
        *,
        fields: Sequence[str] | None = None,
        view: View | None = None,
        where: str | None = None,
        order: Order = "recorded",
        seed: int = 0,
        layers: slice | None = None,
        dtype: Literal["train", "stored"] = "train",
        missing: int | Literal["error"] = "error",
        verify: Literal["whole", "always", "never"] = "whole",
        lost: Literal["error", "skip"] = "error",
        framework: Framework = "torch",
    ) -> None:
        one_of("order", order, get_args(Order))
        one_of("lost", lost, ("error", "skip"))
        one_of("framework", framework, get_args(Framework))
        one_of("dtype", dtype, ("train", "stored"))
        one_of("verify", verify, ("whole", "always", "never"))
        if not isinstance(missing, str) or missing != "error":
            integer("missing", missing)
        if layers is not None:
            instance("layers", layers, slice, "a slice of absolute layers")
        chosen = optional(names, "fields", fields)
        self._wanted = Wanted(
            fields=None if chosen is None else tuple(chosen), layers=layers, dtype=dtype, missing=missing, verify=verify
        )
        self._order: Order = order
        self._seed = _at_least("seed", seed, 0)
        self._skips, self._framework = lost == "skip", framework
        if framework == "torch":
            import_torch()
        self._uri = parse_uri(uri).uri
        self._opened: tuple[int, Spool] | None = None
        self._snapshot = snapshot_of(self._handle().segments(where, view))

    # -- what there is -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._snapshot.rows)

    def ref(self, number: SupportsIndex) -> SegmentRef:
        """Return the reference of a segment, as it was when the dataset was made.

        Raises:
            IndexError: there are fewer.
        """
        index = operator.index(number)
        if not -len(self) <= index < len(self):
            raise IndexError(f"segment {index} of {len(self)}")
        return self._snapshot.ref(index % len(self))

    @property
    def n_rows(self) -> NDArray[np.int64]:
        """int64 ``[len(self)]``: rows of each segment: its tokens, or what they expand to. A copy."""
        return self._snapshot.rows.copy()

    @property
    def n_bytes(self) -> int:
        """Memory that the references take."""
        return self._snapshot.n_bytes

    @property
    def fingerprint(self) -> str:
        """16 characters that are equal where datasets have the same segments in the same order."""
        return self._snapshot.fingerprint(len(self))

    # -- map-style ---------------------------------------------------------------------------------------------------

    def __getitem__(self, number: SupportsIndex) -> Sample:
        """Read a segment.

        Raises:
            IndexError: there are fewer.
            ReleasedError, IntegrityError: it is lost; with ``lost='skip'`` too, since there is no other to give.
            SpoolError: as `Spool.read` does.
        """
        samples, _ = self._surviving([self.ref(number)], self._read, skips=False)
        return samples[0]

    def __getitems__(self, numbers: Sequence[SupportsIndex]) -> list[Sample]:
        """Read segments in one pass; with ``lost='skip'`` those that are not lost.

        Raises:
            IndexError: there are fewer.
            ReleasedError, IntegrityError: one is lost; the error names it.
            SpoolError: as `Spool.read` does.
        """
        return self._surviving([self.ref(number) for number in numbers], self._read, skips=self._skips)[0]

    def _read(self, refs: Sequence[SegmentRef]) -> list[Sample]:
        return [
            Sample(sample.ref, {name: self._converted(value) for name, value in sample.items()})
            for sample in self._wanted.read(self._handle(), refs)
        ]

    # -- batches -----------------------------------------------------------------------------------------------------

    def batches(
        self,
        *,
        max_tokens: int | None = None,
        batch_size: int | None = None,
        batch_by: BatchBy = "segment",
        oversize: Oversize = "alone",
        buffer: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        ends: Ends = "uneven",
        fill: int = -1,
        prefetch_bytes: int | str = "256MiB",
    ) -> Batches:
        """Return the segments as packed batches of one rank: an ``IterableDataset``, where the framework is torch.

        Args:
            max_tokens: most rows of a batch, with placeholders expanded.
            batch_size: most units of a batch; 1 where neither this nor ``max_tokens`` is given.
            batch_by: the unit: a ``segment``, or a ``group``: the segments of one group id and rollout step, which
                are never parted.
            oversize: a unit of more than ``max_tokens`` is a batch of its own (``alone``), or an ``error`` right here.
            buffer: shuffled: the next unit is drawn from so many, in recorded order; from all where None.
            rank, world_size: of the data-parallel ranks; those of torch.distributed, where it is initialised, or 0 of
                1. All ranks need datasets of the same `fingerprint`: of a run that is still being recorded, make one
                and send it to them, pickled.
            ends: where ranks do not get equally many batches: ``uneven``: so be it, every segment comes once;
                ``repeat``: some come twice; ``drop``: some do not come in this epoch.
            fill: stands in ``forward`` fields for the last row of a segment, which no forward has.
            prefetch_bytes: most that is read ahead, in each DataLoader worker; 0 for nothing.

        Raises:
            InputError: an argument does not fit, or a unit is too long and ``oversize='error'``; names it.
        """
        one_of("batch_by", batch_by, get_args(BatchBy))
        one_of("oversize", oversize, get_args(Oversize))
        one_of("ends", ends, get_args(Ends))
        if buffer is not None and self._order == "recorded":
            raise InputError("buffer= is for order='shuffled': give that to SegmentDataset, or leave buffer out")
        limits = {"max_tokens": max_tokens, "batch_size": batch_size, "buffer": buffer}
        for name, value in limits.items():
            if value is not None:
                _at_least(name, value, 1)
        if max_tokens is None and batch_size is None:
            limits["batch_size"] = 1
        rules = Rules(order=self._order, seed=self._seed, batch_by=batch_by, **limits)
        share = Share.of(rank, world_size, ends)
        return _batches_class(self._framework)(
            self, rules, share, oversize, integer("fill", fill), size("prefetch_bytes", prefetch_bytes)
        )

    def packs(self, fill: int) -> Callable[[Sequence[SegmentRef]], tuple[dict[str, Any], tuple[str, ...]]]:
        """Return what packs segments in this process: their arrays, and the ids of those that were skipped."""
        packer = Packer(self._handle(), self._wanted, fill)

        def pack(refs: Sequence[SegmentRef]) -> dict[str, Any]:
            return {name: self._converted(value) for name, value in packer.pack(refs).items()}

        return partial(self._surviving, read=pack, skips=self._skips)

    @property
    def snapshot(self) -> Snapshot:
        """The references, packed."""
        return self._snapshot

    # -- reading -----------------------------------------------------------------------------------------------------

    def _surviving(
        self, refs: Sequence[SegmentRef], read: Callable[[Sequence[SegmentRef]], T], *, skips: bool
    ) -> tuple[T, tuple[str, ...]]:
        """Return what ``read`` makes of segments, and the ids of those it was to skip."""
        try:
            return read(refs), ()
        except _OF_A_SEGMENT:
            lost = {ref.id for ref in refs if self._is_lost(ref, skips=skips)}
            if not lost:
                raise
        return read([ref for ref in refs if ref.id not in lost]), tuple(sorted(lost))

    def _is_lost(self, ref: SegmentRef, *, skips: bool) -> bool:
        """Read a segment alone; return whether it is to be skipped, raise what is wrong with it otherwise."""
        try:
            self._wanted.read(self._handle(), [ref])
        except _OF_A_SEGMENT as error:
            lost = isinstance(error, _LOST)
            if not lost or not skips:
                hint = "; lost='skip' goes on without it" if lost else ""
                raise _named(error, f"segment {ref.id} cannot be read: {error}{hint}", ref) from error
            return True
        return False

    def _converted(self, value: Any) -> Any:
        if self._framework == "numpy":
            return value
        return Ragged(*map(same_memory, value)) if isinstance(value, Ragged) else same_memory(value)

    # -- the handle --------------------------------------------------------------------------------------------------

    def _handle(self) -> Spool:
        """Return this process's handle; one that came through a fork is its parent's."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), open_spool(self._uri, create=False)
        return self._opened[1]

    def close(self) -> None:
        """Let go of the spool; the next read opens it again."""
        opened, self._opened = self._opened, None
        if opened is not None and opened[0] == os.getpid():
            opened[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __repr__(self) -> str:
        return f"<SegmentDataset of {len(self)} segments of {self._uri}>"


def _batches_class(framework: Framework) -> type[Batches]:
    if framework == "numpy":
        return Batches
    from spool.train.replay.loading import TorchBatches

    return TorchBatches


def _named(error: SpoolError, message: str, ref: SegmentRef) -> SpoolError:
    return type(error)(message, **{**error.details, "ref": ref.id})


def _at_least(name: str, value: object, least: int) -> int:
    if integer(name, value) < least:
        raise refused(name, f"an integer, at least {least}", value)
    return integer(name, value)
