"""The batches of one rank, epoch after epoch, from any point on."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from spool.arguments import integer, mapping, refused
from spool.errors import InputError
from spool.formats.arrays import Ragged
from spool.model.refs import SegmentRef
from spool.train.replay.order import Ends, Epoch, Rules, Units, end_of, epoch_of, units_of
from spool.train.replay.prefetch import read_ahead

if TYPE_CHECKING:
    from spool.train.replay.dataset import SegmentDataset

Oversize = Literal["alone", "error"]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]

_MOST_EPOCHS = 1 << 62
"""Behind any that begins below it a state still counts the next one."""


class Batch(dict[str, Any]):
    """Packed arrays by name: fields, and ``cu_seqlens``, ``position_ids``, ``cu_steps``; see `Packer.pack`.

    Attributes:
        refs: the segments, in the order they lie in.
        skipped: ids of segments that are lost and left out. A batch of which nothing is left has no fields.
        state: what `Batches.load_state_dict` takes to go on behind this batch, whatever else was read ahead.
    """

    refs: tuple[SegmentRef, ...] = ()
    skipped: tuple[str, ...] = ()
    state: dict[str, Any] = {}

    @property
    def n_bytes(self) -> int:
        """Memory of the arrays."""
        arrays = [part for value in self.values() for part in (value if isinstance(value, Ragged) else (value,))]
        return sum(int(array.nbytes) for array in arrays)


class Share(NamedTuple):
    """Which batches a rank gets: every ``world_size``-th."""

    rank: int
    world_size: int
    ends: Ends

    @classmethod
    def of(cls, rank: int | None, world_size: int | None, ends: Ends) -> Share:
        """Return the share of a rank; of this process in torch.distributed where both are None.

        Raises:
            InputError: one of them is given alone, or there is no such rank.
        """
        if (rank is None) != (world_size is None):
            raise InputError("give both rank= and world_size=, or neither for those of torch.distributed")
        if rank is None or world_size is None:
            distributed = sys.modules.get("torch.distributed")
            if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
                return cls(0, 1, ends)
            return cls(distributed.get_rank(), distributed.get_world_size(), ends)
        if not 0 <= integer("rank", rank) < integer("world_size", world_size):
            raise refused("rank", f"at least 0 and below world_size={world_size}", rank)
        return cls(rank, world_size, ends)


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Where an iteration is, as `Batches.state_dict` gives it.

    Attributes:
        epoch: number of the epoch.
        position: batches of all ranks that are done; of a worker, those before the ones that it comes to next.
        n_segments: segments of the dataset.
        fingerprint: of which and in what order they are.
        rules: what else the batches follow from.
        world_size: number of ranks.
        worker: which DataLoader worker says so; None for the whole rank.
        n_workers: how many there are.
    """

    epoch: Count
    position: Count
    n_segments: Count
    fingerprint: str
    rules: Rules
    world_size: Size
    worker: Count | None = None
    n_workers: Size = 1


class Batches:
    """An iterable of a rank's `Batch`es; each ``iter()`` is an epoch. Made by `SegmentDataset.batches`.

    Each iteration is the next epoch, whether the one before was gone over to its end or not, so that DataLoader workers
    that live on (``persistent_workers=True``) stay together; a loaded state is followed by what comes behind it. For
    workers made anew each time call `set_epoch`, as for torch's DistributedSampler.
    """

    def __init__(
        self, dataset: SegmentDataset, rules: Rules, share: Share, oversize: Oversize, fill: int, prefetch_bytes: int
    ) -> None:
        self._dataset, self._rules, self._share = dataset, rules, share
        self._fill, self._prefetch_bytes = fill, prefetch_bytes
        self._n_segments = len(dataset)
        self._epoch = self._position = 0
        self._worker: int | None = None
        self._loaded = self._begun = self._ended = False
        if oversize == "error":
            self._check_sizes()

    def __iter__(self) -> Iterator[Batch]:
        worker, n_workers = _worker()
        if not self._loaded:
            self._begin(self._epoch + self._begun)
        epoch = epoch_of(self._units(), self._rules, self._epoch)
        rank, world_size, ends = self._share
        stop = end_of(len(epoch), self._position, world_size, ends)
        if self._worker is None:
            self._position += worker * world_size
        self._worker, self._loaded, self._begun = worker, False, True
        numbers = range(self._position + rank, stop, n_workers * world_size)
        self._ended = not numbers
        return self._run(epoch, numbers, n_workers)

    def _run(self, epoch: Epoch, numbers: range, n_workers: int) -> Iterator[Batch]:
        pack, snapshot, rate = self._dataset.packs(self._fill), self._dataset.snapshot, float("inf")
        rank, world_size, _ = self._share
        state = self._state(self._epoch, 0)

        def read(number: int) -> Batch:
            refs = [snapshot.ref(index) for index in epoch.batch(number)]
            arrays, skipped = pack(refs)
            batch = Batch(arrays)
            batch.refs, batch.skipped = tuple(ref for ref in refs if ref.id not in skipped), skipped
            done = msgspec.structs.replace(state, position=number - rank + world_size)
            batch.state = msgspec.to_builtins(done)
            return batch

        def n_bytes(number: int) -> float:
            return rate * max(int(snapshot.rows[epoch.batch(number)].sum()), 1)

        def handed_out(batch: Batch) -> Batch:
            nonlocal rate
            each = batch.n_bytes / max(sum(ref.n_rows for ref in batch.refs), 1)
            rate = each if rate == float("inf") else max(each, rate)
            self._position = batch.state["position"] + (n_workers - 1) * world_size
            return batch

        # no name here may hold a batch, so that its memory is free once the caller lets go of it
        yield from map(handed_out, read_ahead(numbers, read, n_bytes=n_bytes, limit_bytes=self._prefetch_bytes))
        self._ended = True

    def __len__(self) -> int:
        """Return how many batches this rank has in the epoch that a new iteration begins with."""
        epoch = epoch_of(self._units(), self._rules, self._epoch + (self._begun and not self._loaded))
        rank, world_size, ends = self._share
        return len(range(rank, end_of(len(epoch), 0, world_size, ends), world_size))

    # -- where it is -------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Number of the epoch that is, or was last, gone over."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be epoch number ``epoch``: behind a state of it that was loaded, else all of it."""
        if not 0 <= integer("epoch", epoch) < _MOST_EPOCHS:
            raise refused("epoch", "an integer, at least 0 and below 2**62", epoch)
        if not self._loaded or epoch != self._epoch:
            self._begin(epoch)
            self._loaded = True

    def state_dict(self) -> dict[str, Any]:
        """Return where the iteration is, behind the batch that was yielded last: small, picklable, JSON-able.

        In a DataLoader worker it is that worker's own state, for the same worker of as many (torchdata's
        ``StatefulDataLoader`` does that). In the process that trains, where workers read, use the state of the last
        batch: ``batch.state``.
        """
        worker, n_workers = _worker()
        if n_workers == 1 and self._ended:
            return msgspec.to_builtins(self._state(self._epoch + 1, 0))  # type: ignore[no-any-return]
        state = self._state(self._epoch, self._position)
        if n_workers > 1 and self._worker is not None:
            state = msgspec.structs.replace(state, worker=worker, n_workers=n_workers)
        return msgspec.to_builtins(state)  # type: ignore[no-any-return]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on behind where ``state`` was taken; exactly, with any number of workers.

        Of a dataset that was made anew and found more segments, only those count that there were then. Another number
        of ranks may go on, from a state that all ranks have come to.

        Raises:
            InputError: it is the state of other batches, of another dataset, or of a worker that this is not; says
                what differs.
        """
        try:
            found = msgspec.convert(dict(mapping("state", state, "what state_dict() returned")), State)
        except msgspec.ValidationError as error:
            raise InputError(f"this is not what state_dict() of batches returns: {error}") from error
        self._check(found)
        n_batches = len(epoch_of(self._units(found.n_segments), self._rules, found.epoch))
        if found.position > (most := n_batches + found.world_size * found.n_workers):
            raise InputError(
                f"the state is behind batch {found.position}, and epoch {found.epoch} has {n_batches}: it is damaged; "
                "take another checkpoint's",
                expected=most, got=found.position,
            )  # fmt: skip
        self._begin(found.epoch)
        self._position, self._worker, self._n_segments = found.position, found.worker, found.n_segments
        self._loaded = True

    def _begin(self, epoch: int) -> None:
        self._epoch, self._position, self._worker = epoch, 0, None
        self._begun = self._ended = False

    def _state(self, epoch: int, position: int) -> State:
        n = self._n_segments
        fingerprint = self._dataset.snapshot.fingerprint(n)
        return State(
            epoch=epoch, position=position, n_segments=n, fingerprint=fingerprint, rules=self._rules,
            world_size=self._share.world_size,
        )  # fmt: skip

    def _check(self, state: State) -> None:
        was, now = msgspec.structs.asdict(state.rules), msgspec.structs.asdict(self._rules)
        differ = [f"{name}={was[name]!r}, here {now[name]!r}" for name in was if was[name] != now[name]]
        if differ:
            raise InputError(f"the state is of batches with {'; '.join(differ)}: make these with the same arguments")
        n = len(self._dataset)
        if state.n_segments > n or state.fingerprint != self._dataset.snapshot.fingerprint(state.n_segments):
            raise InputError(
                f"the state is of a dataset of {state.n_segments} segments, and the first of these {n} are others: "
                "facts that came later changed what the filter finds. Keep the dataset with the checkpoint, pickled",
                expected=state.n_segments, got=n,
            )  # fmt: skip
        if state.worker is not None and (
            (state.worker, state.n_workers) != _worker() or state.world_size != self._share.world_size
        ):
            raise InputError(
                f"this is the state of worker {state.worker} of {state.n_workers} and of {state.world_size} ranks: "
                "with another number of workers or ranks go on from the state of the last batch, batch.state"
            )

    # -- what it goes over -------------------------------------------------------------------------------------------

    def _units(self, n_segments: int | None = None) -> Units:
        snapshot, n = self._dataset.snapshot, self._n_segments if n_segments is None else n_segments
        return units_of(snapshot.rows[:n], snapshot.groups[:n], self._rules.batch_by)

    def _check_sizes(self) -> None:
        units, most = self._units(), self._rules.max_tokens
        long = np.flatnonzero(units.rows > most) if most is not None else units.starts[:0]
        if len(long):
            number = int(long[0])
            ref = self._dataset.ref(int(units.members[units.starts[number]]))
            what = f"segment {ref.id}" if self._rules.batch_by == "segment" else f"the group of segment {ref.id}"
            raise InputError(
                f"{what} has {units.rows[number]} rows, more than max_tokens={most}, and so have {len(long) - 1} "
                "others: raise max_tokens, filter with n_tokens, or pass oversize='alone'",
                ref=ref.id, n_rows=int(units.rows[number]), max_tokens=most,
            )  # fmt: skip


def _worker() -> tuple[int, int]:
    """Return which DataLoader worker this process is, and of how many; 0 of 1 where it is none."""
    data: Any = sys.modules.get("torch.utils.data")
    info = None if data is None else data.get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)
