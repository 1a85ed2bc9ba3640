"""The routing of a micro-batch, read a few layers at a time when they are asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from spool.arguments import integer, one_of, refused
from spool.errors import InputError
from spool.formats.layers import bounds
from spool.model.fields import ROUTED_EXPERTS, FieldSpec, numpy_dtype
from spool.model.refs import Ref
from spool.model.rows import MOST
from spool.read.fetch import Verify
from spool.train.planning.ranks import RankSlice, check_rank, rank_of
from spool.train.restoring import gaps
from spool.train.restoring.entries import Lengths, entries_of
from spool.train.restoring.fields import agreed, covers_of, expert_spec, have_routing
from spool.train.restoring.handles import handle
from spool.train.restoring.routed import RoutedLayer, Stage
from spool.train.restoring.tensors import Framework, converter

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spool.handle import Spool
    from spool.model.moe import MoEShape
    from spool.read.sample import Coverage

BUDGET_BYTES = 16 << 20
"""Memory for narrow rows that a micro-batch may hold, those that are read ahead included; one layer at least."""


class Piece(NamedTuple):
    """A run of rows of a micro-batch as one rank has it.

    Attributes:
        sample: whose rows of the forward; -1 for padding.
        start: first row; of padding its number, from which its ids follow.
        stop: one past the last.
    """

    sample: int
    start: int
    stop: int


def replay_rows(
    lengths: Sequence[int], rank: RankSlice, *, tp_rank: int = 0, tp_size: int = 1, pad_to: int = 1
) -> list[Piece]:
    """Return the rows of a micro-batch that one rank replays, in their order. Pure.

    As Megatron trainers lay them out: each sequence gets a row for its last token, is padded to equal parts and split
    over context-parallel ranks; what a rank has of all of them follows on each other and is padded to a multiple of
    ``tp_size * pad_to``, of which sequence parallelism gives each tensor-parallel rank an equal part.

    Args:
        lengths: rows that the tokens of each sequence expand to, one more than it has rows of the forward.
        rank: the context-parallel rank.
        tp_rank: the tensor-parallel rank; 0 of 1 without sequence parallelism.
        tp_size: how many of these there are.
        pad_to: the trainer's padding beside.
    """
    pieces: list[Piece] = []
    for sample, n in enumerate(lengths):
        for start, stop in rank.parts(n):
            last = max(n - 1, 0)
            _add(pieces, Piece(sample, min(start, last), min(stop, last)))
            _add(pieces, Piece(-1, 0, 1) if n and start <= last < stop else Piece(-1, 0, 0))
            _add(pieces, Piece(-1, max(start, n) - n, stop - n))
    total = sum(piece.stop - piece.start for piece in pieces)
    _add(pieces, Piece(-1, 0, -total % (tp_size * pad_to)))
    share = sum(piece.stop - piece.start for piece in pieces) // tp_size
    return _cut(pieces, tp_rank * share, (tp_rank + 1) * share)


def _add(pieces: list[Piece], piece: Piece) -> None:
    if piece.stop > piece.start:
        pieces.append(piece)


def _cut(pieces: Sequence[Piece], start: int, stop: int) -> list[Piece]:
    """Return the pieces of rows ``[start, stop)``, counted over all pieces."""
    kept: list[Piece] = []
    at = 0
    for piece in pieces:
        first, last = max(start - at, 0), min(stop - at, piece.stop - piece.start)
        _add(kept, Piece(piece.sample, piece.start + first, piece.start + last))
        at += piece.stop - piece.start
    return kept


class LazyRouting:
    """The routing of one micro-batch on one rank. It holds a few layers, narrow, and reads on as a pass goes on.

    Layers are read in groups of as many as half the budget holds, the next group of the pass while the present one is
    used: ascending in the forward, descending in the backward. After the last MoE layer of a pass nothing is held. A
    hot root stores a row's layers next to each other, so that there each group costs a pass over the rows; a cold one
    fetches only the group's layers. One pass uses it at a time.

    Args:
        sp: an open spool, or its URI.
        refs: of the micro-batch, in its order; None for a sample that failed.
        lengths: where ``refs`` has None ``(n_tokens, response_length)``, else None.
        experts: the routing shape, needed only where no reference has routing.
        rank_slice: the rank's part of sequences, in rows of the forward, and its layers.
        tp_rank, tp_size, pad_to: as `replay_rows` takes them.
        framework: ``torch`` or ``numpy``.
        device: of torch; narrow rows are copied there, and widened there.
        missing: ``error``, or ``arange``: consecutive experts stand for rows that were never sent.
        budget_bytes: most memory for narrow rows; one layer, and one read ahead, are held whatever it is.
        ahead: read the next group while one is used.
        verify: as in `Spool.read`.

    Attributes:
        n_rows: rows that this rank replays.
        layers: absolute layers that it has.

    Raises:
        InputError: an argument does not fit, or no reference has routing.
        GapError: rows were never sent.
    """

    def __init__(
        self,
        sp: Spool | str | os.PathLike[str],
        refs: Sequence[Ref | None],
        *,
        lengths: Lengths | None = None,
        experts: MoEShape | str | None = None,
        rank_slice: RankSlice | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        pad_to: int = 1,
        framework: Framework = "torch",
        device: Any = None,
        missing: Literal["error", "arange"] = "error",
        budget_bytes: int = BUDGET_BYTES,
        ahead: bool = True,
        verify: Verify = "whole",
    ) -> None:
        self._convert = converter(framework, device)
        check_rank("tp", tp_rank, tp_size)
        if integer("pad_to", pad_to) < 1 or integer("budget_bytes", budget_bytes) < 0:
            raise refused("pad_to and budget_bytes", "at least 1 and 0", (pad_to, budget_bytes))
        one_of("missing", missing, ("error", "arange"))
        one_of("verify", verify, get_args(Verify))
        rank = rank_of(rank_slice)
        entries = entries_of(refs, lengths)
        self._spool = handle(sp)
        self._verify, self._ahead = verify, ahead
        self._refs = [None if entry.failed else entry.ref for entry in entries]
        self._covers = self._look(expert_spec(experts), missing)
        rows = [entry.ref.n_rows for entry in entries]
        self._pieces = replay_rows(rows, rank, tp_rank=tp_rank, tp_size=tp_size, pad_to=pad_to)
        self.n_rows = sum(piece.stop - piece.start for piece in self._pieces)
        if self.n_rows >= MOST:
            wanted = f"such that this rank has fewer than {MOST} rows, not {self.n_rows}"
            raise refused("pad_to and tp_size", wanted, (pad_to, tp_size))
        self.layers = range(*bounds(self._spec, rank.layers))
        routed = [layer for layer in self.layers if self._spec.layers is None or layer in self._spec.layers]
        none = self.layers.start
        self._last = {"forward": max(routed, default=none), "backward": min(routed, default=none)}
        layer_bytes = self.n_rows * prod(self._spec.shape[1:]) * numpy_dtype(self._spec.dtype).itemsize
        self._group = max(1, budget_bytes // (2 * max(layer_bytes, 1)))
        self._held: dict[int, Future[list[NDArray[Any]]]] = {}

    def _look(self, experts: FieldSpec | None, missing: gaps.Missing) -> list[Coverage | None]:
        """Return what of the routing is missing, for each sample; learn what it looks like."""
        refs = [ref for ref in self._refs if ref is not None]
        found = [covers.get(ROUTED_EXPERTS) for covers in covers_of(self._spool, refs, [ROUTED_EXPERTS], experts)]
        known = [(ref, cover.spec) for ref, cover in zip(refs, found, strict=True) if cover is not None]
        spec = agreed(known, packed=True) or experts
        if spec is None or not gaps.has_experts(spec):
            raise InputError("no reference says what the routing looks like; pass experts=")
        self._spec: FieldSpec = spec
        self._recorded = have_routing(refs)
        for ref, cover in zip(refs, found, strict=True):
            if cover is not None:
                gaps.check_gaps(ref, cover, missing)
        covers = iter(found)
        return [None if ref is None else next(covers) for ref in self._refs]

    def layer(self, layer: int) -> RoutedLayer:
        """Return what stands for the routing of an absolute layer; nothing is read.

        Raises:
            InputError: this rank does not have it.
        """
        if integer("layer", layer) not in self.layers:
            raise refused("layer", f"one of {self.layers.start} to {self.layers.stop - 1}", layer)
        return RoutedLayer(self, layer, self._spec.missing)

    def read(self, layer: int, stage: Stage = "forward") -> Any:
        """Return the experts of each row in an absolute layer: int32 ``[n_rows, K]``, fresh, on the device.

        Args:
            layer: one of ``layers``.
            stage: the pass, which says what is read next.

        Raises:
            InputError: this rank does not have the layer.
            ReleasedError, IntegrityError, StorageError: as `Spool.read`.
        """
        self.layer(layer)
        one_of("stage", stage, get_args(Stage))
        within = (layer - self.layers.start) % self._group
        rows = self._laid_out(self._rows(self._group_of(layer), 1 if stage == "forward" else -1), layer, within)
        if layer == self._last[stage]:
            self.release()
        return self._convert(rows, self._spec.train_dtype or self._spec.dtype)

    def begin(self, stage: Stage = "forward") -> None:
        """Begin to read the first layers of a pass, while another micro-batch is at work."""
        one_of("stage", stage, get_args(Stage))
        if self.layers:
            self._ahead_of(self._group_of(self._last["backward" if stage == "forward" else "forward"]))

    def release(self) -> None:
        """Let go of what is held; it is read again when it is asked for."""
        self._held = {}

    def _rows(self, number: int, step: int) -> list[NDArray[Any]]:
        """Return the rows of a group of layers, and begin to read the next one."""
        held, behind = self._held, number + step
        self._held = {each: held[each] for each in (number, behind) if each in held}
        try:
            found = held[number].result() if number in held else self._fetch(number)
        except BaseException:
            self.release()
            raise
        self._held[number] = _done(found)
        if self._ahead and self._group_of(self._last["backward"]) <= behind <= self._group_of(self._last["forward"]):
            self._ahead_of(behind)
        return found

    def _group_of(self, layer: int) -> int:
        return (layer - self.layers.start) // self._group

    def _ahead_of(self, number: int) -> None:
        if number not in self._held:
            self._held[number] = _pool().submit(self._fetch, number)

    def _fetch(self, number: int) -> list[NDArray[Any]]:
        """Read the stored rows of each piece for the layers of a group; narrow, ``[rows, layers, K]``."""
        first = self.layers.start + number * self._group
        layers = slice(first, min(first + self._group, self.layers.stop))
        recorded = [piece for piece in self._pieces if self._ref(piece) is not None]
        found = self._read(recorded, layers) if self._recorded else self._nothing(recorded, layers)
        for piece, rows in zip(recorded, found, strict=True):
            cover = self._covers[piece.sample]
            if cover is not None and cover.gaps:
                gaps.fill(rows, np.arange(piece.start, piece.stop), cover, ids=True, layers=layers)
        return found

    def _read(self, pieces: Sequence[Piece], layers: slice) -> list[NDArray[Any]]:
        refs = [ref for piece in pieces if (ref := self._ref(piece)) is not None]
        places = [tokens_of(ref, piece.start, piece.stop) for ref, piece in zip(refs, pieces, strict=True)]
        samples = self._spool.read(
            refs,
            fields=[ROUTED_EXPERTS],
            tokens=[tokens for tokens, _ in places],
            layers=layers,
            dtype="stored",
            missing=0,
            verify=self._verify,
        )
        return [
            sample[ROUTED_EXPERTS][skipped : skipped + piece.stop - piece.start]
            for piece, sample, (_, skipped) in zip(pieces, samples, places, strict=True)
        ]

    def _nothing(self, pieces: Sequence[Piece], layers: slice) -> list[NDArray[Any]]:
        shape = (layers.stop - layers.start, *self._spec.shape[1:])
        return [np.zeros((piece.stop - piece.start, *shape), numpy_dtype(self._spec.dtype)) for piece in pieces]

    def _ref(self, piece: Piece) -> Ref | None:
        return None if piece.sample < 0 else self._refs[piece.sample]

    def _laid_out(self, parts: Sequence[NDArray[Any]], layer: int, within: int) -> NDArray[Any]:
        """Return one layer of all pieces, padding filled; narrow, ``[n_rows, K]``."""
        left, only, dtype = iter(parts), slice(layer, layer + 1), numpy_dtype(self._spec.dtype)
        found: list[NDArray[Any]] = [np.zeros((0, *self._spec.shape[1:]), dtype)]
        for piece in self._pieces:
            if self._ref(piece) is not None:
                found.append(next(left)[:, within])
            elif piece.sample < 0:
                ids = gaps.consecutive(self._spec, np.arange(piece.start, piece.stop), only)
                found.append(ids[:, 0].astype(dtype))
            else:
                found.append(np.zeros((piece.stop - piece.start, *self._spec.shape[1:]), dtype))
        return np.concatenate(found)


def tokens_of(ref: Ref, start: int, stop: int) -> tuple[slice, int]:
    """Return the tokens that forward rows ``[start, stop)`` belong to, and how many of their rows come before."""
    if not ref.units:
        return slice(start, stop), 0
    starts = gaps.first_rows(ref)
    first, last = np.searchsorted(starts, [start, stop - 1], side="right").tolist()
    return slice(first - 1, last), start - int(starts[first - 1])


def _done(found: list[NDArray[Any]]) -> Future[list[NDArray[Any]]]:
    future: Future[list[NDArray[Any]]] = Future()
    future.set_result(found)
    return future


class _Pool:
    pid = 0
    threads: ThreadPoolExecutor | None = None


def _pool() -> ThreadPoolExecutor:
    """Return this process's threads that read ahead."""
    if _Pool.threads is None or _Pool.pid != os.getpid():
        _Pool.threads, _Pool.pid = ThreadPoolExecutor(2, thread_name_prefix="spool-routing"), os.getpid()
    return _Pool.threads
