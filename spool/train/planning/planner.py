"""The planner: lengths and a mesh -> micro-batches, and for each rank the exact rows it reads and where they go. Pure.

Sequences are admitted to micro-batches whole. Only then is each split over context-parallel ranks, so that balance and
limits do not depend on how. A plan covers one mini-batch and knows nothing of others: plan the next while one trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, cast, get_args

import msgspec
import numpy as np
from msgspec import Struct

from spool.arguments import instance, integer, one_of, refused
from spool.errors import InputError
from spool.model.refs import Ref
from spool.model.rows import MOST
from spool.train.planning.balance import Bins, fit, n_needed, partition
from spool.train.planning.items import Cost, Item, Piece, Range, costs_of, items_of
from spool.train.planning.mesh import Mesh, Place
from spool.train.planning.padding import Layout, Padding, padding
from spool.train.planning.shares import MicroBatch, Share, Split, Table, share_of, table_of

__all__ = [
    "Item", "Mesh", "MicroBatch", "Piece", "Place", "Plan", "RankPlan", "Share", "lengths_of", "plan", "plans",
]  # fmt: skip

Oversize = Literal["alone", "error"]


class RankPlan(Struct, frozen=True, kw_only=True):
    """What one rank consumes in a mini-batch.

    Attributes:
        mini_batch: number of the mini-batch.
        place: where the rank stands.
        chunk: which of its model chunks this is for.
        stage: absolute layers that the chunk holds; None for all.
        first_dense: leading layers of the model without experts.
        tp_parts: ``tp`` with sequence parallelism, else 1.
        layout: of the plan.
        shares: one for each micro-batch, in the order they are trained.
    """

    mini_batch: int
    place: Place
    chunk: int
    stage: Range | None
    first_dense: int
    tp_parts: int
    layout: str
    shares: tuple[Share, ...]

    @property
    def layers(self) -> slice:
        """All layers of the chunk, as ``layers=`` of `Spool.read` takes them."""
        return slice(None) if self.stage is None else slice(*self.stage)

    @property
    def moe_layers(self) -> slice:
        """The layers of the chunk without the model's leading dense ones: those that have routing."""
        if self.stage is None:
            return slice(self.first_dense, None)
        start, stop = self.stage
        return slice(min(max(start, self.first_dense), stop), stop)

    def router_rows(self, share: Share) -> slice:
        """Return the rows of a share that this rank's routers see: with sequence parallelism the part of its TP rank.

        Raises:
            InputError: with layout ``padded`` they are no run of rows, but part of each sequence.
        """
        if self.layout == "padded" and self.tp_parts > 1 and len(share.items) > 1:
            raise InputError(
                "layout='padded' with sequence parallelism gives each TP rank a part of every sequence, not a run of "
                "rows: plan with layout='packed', or reshape to [sequences, rows] and take the part of each"
            )
        n_rows, part = share.n_rows // self.tp_parts, self.place.tp % self.tp_parts
        return slice(part * n_rows, (part + 1) * n_rows)


class Plan(Struct, frozen=True, kw_only=True):
    """How one mini-batch is trained on a mesh. Small, picklable, JSON-able; the same on every rank.

    Attributes:
        mesh: the mesh.
        items: the sequences, numbered as they were given.
        batches: for each DP rank its micro-batches, the costliest first; as many on every rank.
        split: how sequences are split over CP ranks; ``custom`` by ``table``.
        layout: ``packed``, or ``padded``: all sequences of a micro-batch take the same rows.
        mini_batch: number of the mini-batch.
        table: what a split function said of each padded length.
    """

    mesh: Mesh
    items: tuple[Item, ...]
    batches: tuple[tuple[MicroBatch, ...], ...]
    split: str
    layout: str
    mini_batch: int = 0
    table: Table = {}

    @property
    def n_micro(self) -> int:
        """Micro-batches on each DP rank."""
        return len(self.batches[0])

    @property
    def costs(self) -> list[float]:
        """Cost of each DP rank."""
        return [sum(batch.cost for batch in batches) for batches in self.batches]

    @property
    def imbalance(self) -> float:
        """Cost of the costliest DP rank by the mean of all: 1.0 is even."""
        return _ratio(max(self.costs), sum(self.costs) / self.mesh.dp)

    @property
    def micro_imbalance(self) -> float:
        """The same where DP ranks wait for each other at every micro-batch, as they do with expert parallelism."""
        slowest = sum(max(batch.cost for batch in batches) for batches in zip(*self.batches, strict=True))
        return _ratio(slowest, sum(self.costs) / self.mesh.dp)

    @property
    def padding(self) -> float:
        """Part of all rows that is padding, in [0, 1]."""
        n_rows = sum(batch.n_rows for batches in self.batches for batch in batches)
        return 1 - sum(item.n_rows for item in self.items) / n_rows if n_rows else 0.0

    def rank(self, place: Place | int, *, chunk: int = 0) -> RankPlan:
        """Return what a rank consumes.

        Args:
            place: where it stands, or its global rank.
            chunk: which of its model chunks, with a virtual pipeline.

        Raises:
            InputError: the mesh has no such place or chunk.
        """
        where = self.mesh.place(place)
        shares = [
            share_of(batch, self.items, self.split, self.table, self.mesh.cp, where.cp)
            for batch in self.batches[where.dp]
        ]
        return RankPlan(
            mini_batch=self.mini_batch, place=where, chunk=chunk, stage=self.mesh.layers(where.pp, chunk),
            first_dense=self.mesh.first_dense, tp_parts=self.mesh.tp if self.mesh.sequence_parallel else 1,
            layout=self.layout, shares=tuple(shares),
        )  # fmt: skip

    def to_json(self) -> str:
        """Return the plan as JSON; `plan_from_json` reads it back."""
        return msgspec.json.encode(self).decode()


def plan(
    items: Iterable[Ref | int | Item],
    mesh: Mesh,
    *,
    max_tokens: int | None = None,
    n_micro: int | None = None,
    cost: Cost = None,
    oversize: Oversize = "alone",
    equal_counts: bool = False,
    split: Split = "zigzag",
    layout: Layout = "packed",
    sequence_multiple: int | None = None,
    micro_multiple: int | None = None,
    mini_batch: int = 0,
) -> Plan:
    """Share out a mini-batch over a mesh.

    DP ranks get sequences of nearly equal cost (`balance.partition`), then each rank its micro-batches. All ranks have
    the same number of them. Where there are fewer sequences than micro-batches, some hold padding only.

    Args:
        items: the sequences: references, lengths in rows, or Items.
        mesh: the mesh.
        max_tokens: most rows of a micro-batch, padding included, over all its CP ranks (slime's
            ``max_tokens_per_gpu`` times ``cp``); there are as few micro-batches as the ranks need. A multimodal
            placeholder counts the rows it expands to.
        n_micro: this many micro-batches on each DP rank instead. With ``vpp > 1`` a multiple of ``pp``.
        cost: what a sequence costs: a function of its rows, a number for each item, or None for its rows. The
            ``cost`` of an Item goes before it.
        oversize: of a sequence longer than ``max_tokens``: ``alone``, in a micro-batch of its own, or ``error``.
        equal_counts: all DP ranks get the same number of sequences.
        split: how CP ranks share a sequence: ``zigzag``, rank r has parts r and ``2 * cp - 1 - r`` of ``2 * cp``;
            ``contiguous``; ``micro_batch``, contiguous parts of the whole micro-batch; or a function ``(n_rows, cp)``
            that returns, for each rank, ``(start, stop)`` ranges of a padded sequence.
        layout: ``packed``, or ``padded``: all sequences of a micro-batch are padded to the longest.
        sequence_multiple: a sequence's rows are padded to a multiple of this; where None, to the least that gives
            all CP ranks, and all TP ranks with sequence parallelism, the same rows (``2 * cp * tp`` for zigzag). An
            empty sequence takes as much.
        micro_multiple: the same of the whole micro-batch, which an empty one takes too.
        mini_batch: its number.

    Raises:
        InputError: an argument is wrong, or ``oversize="error"`` and a sequence is; says which.
    """
    instance("mesh", mesh, Mesh, "a Mesh, as Mesh(dp=8, cp=2, tp=4)")
    if (max_tokens is None) == (n_micro is None):
        raise InputError(
            "pass max_tokens=, the most rows of a micro-batch, or n_micro=, how many there are; one of them"
        )
    one_of("oversize", oversize, get_args(Oversize))
    instance("equal_counts", equal_counts, bool, "True or False")
    integer("mini_batch", mini_batch)
    rule = padding(mesh, split, layout, sequence_multiple=sequence_multiple, micro_multiple=micro_multiple)
    taken = items_of(items)
    costs, sizes = costs_of(taken, cost), rule.sizes(taken)
    ranks = [np.array(found, np.int64) for found in partition(costs, mesh.dp, equal_counts=equal_counts)]
    if n_micro is not None:
        bins = [_by_number(found, costs, _number(n_micro, mesh)) for found in ranks]
    else:
        capacity = _capacity(max_tokens, rule)
        if oversize == "error":
            _refuse_oversize(sizes, capacity)
        bins = _by_size(ranks, costs, sizes, capacity, mesh, alike=rule.alike)
    batches = tuple(tuple(_batch(found, taken, sizes, costs, rule) for found in each) for each in bins)
    _refuse_giant(batches)
    named = isinstance(split, str)
    table = {} if named else table_of(cast("Any", split), lengths_of(batches), mesh.cp)
    return Plan(
        mesh=mesh, items=tuple(taken), batches=batches, split=str(split) if named else "custom", layout=layout,
        mini_batch=mini_batch, table=table,
    )  # fmt: skip


def plans(mini_batches: Iterable[Iterable[Ref | int | Item]], mesh: Mesh, **options: Any) -> Iterator[Plan]:
    """Yield a plan for each mini-batch when it arrives, numbered from 0; ``options`` are those of `plan`."""
    for number, items in enumerate(mini_batches):
        yield plan(items, mesh, mini_batch=number, **options)


def _number(n_micro: int, mesh: Mesh) -> int:
    if integer("n_micro", n_micro) < 1:
        raise refused("n_micro", "at least 1", n_micro)
    if mesh.vpp > 1 and n_micro % mesh.pp:
        raise InputError(
            f"n_micro must be a multiple of pp={mesh.pp} with a virtual pipeline, got {n_micro}: pass "
            f"{-(-n_micro // mesh.pp) * mesh.pp}",
            got=n_micro,
        )
    return n_micro


def _capacity(max_tokens: int | None, rule: Padding) -> int:
    if integer("max_tokens", max_tokens) < rule.micro:
        raise InputError(
            f"max_tokens={max_tokens} holds nothing: a micro-batch takes at least {rule.micro} rows padded"
        )
    return cast("int", max_tokens) // rule.micro * rule.micro


def _by_number(found: np.ndarray, costs: np.ndarray, n_micro: int) -> Bins:
    return [found[part].tolist() for part in partition(costs[found], n_micro)]


def _by_size(
    ranks: Sequence[np.ndarray], costs: np.ndarray, sizes: np.ndarray, capacity: int, mesh: Mesh, *, alike: bool
) -> list[Bins]:
    """Return the micro-batches of each DP rank, none larger than ``capacity`` but those of one sequence."""
    alone = [found[sizes[found] > capacity] for found in ranks]
    rest = [found[sizes[found] <= capacity] for found in ranks]
    needed = [n_needed(sizes[found], capacity, alike=alike) for found in rest]
    n_micro = max(n + len(large) for n, large in zip(needed, alone, strict=True))
    if mesh.vpp > 1:
        n_micro = -(-n_micro // mesh.pp) * mesh.pp
    bins = []
    for large, found in zip(alone, rest, strict=True):
        parts = fit(costs[found], sizes[found], n_micro - len(large), capacity, alike=alike)
        both = [[number] for number in large.tolist()] + [found[part].tolist() for part in parts]
        bins.append(sorted(both, key=lambda part: (-float(costs[part].sum()), part)))
    return bins


def _refuse_oversize(sizes: np.ndarray, capacity: int) -> None:
    large = np.flatnonzero(sizes > capacity)
    if len(large):
        raise InputError(
            f"item {large[0]} takes {sizes[large[0]]} rows padded and a micro-batch holds {capacity}; {len(large)} "
            "items are as long: cut them with ref.head(n), raise max_tokens, or pass oversize='alone'",
            items=large[:100].tolist(), capacity=capacity,
        )  # fmt: skip


def _refuse_giant(batches: Iterable[Iterable[MicroBatch]]) -> None:
    most = max((batch.n_rows for each in batches for batch in each), default=0)
    if most >= MOST:
        raise InputError(
            f"a micro-batch would have {most} rows, and cu_seqlens, which are int32, count fewer than {MOST}: plan "
            "more of them (n_micro=, max_tokens=)",
            got=most,
        )


def _batch(
    found: Sequence[int], items: Sequence[Item], sizes: np.ndarray, costs: np.ndarray, rule: Padding
) -> MicroBatch:
    mine = sizes[found] if found else np.zeros(0, np.int64)
    padded = np.full(len(mine), mine.max(initial=0)) if rule.alike else mine
    rows = tuple(items[number].n_rows for number in found)
    cost = float(costs[found].sum()) if found else 0.0
    return MicroBatch(tuple(found), rows, tuple(padded.tolist()), rule.whole(mine), cost)


def lengths_of(batches: Sequence[Sequence[MicroBatch]]) -> Iterator[int]:
    """Yield the padded lengths that a split has to part."""
    for each in batches:
        for batch in each:
            yield from (length for length in (*batch.padded, batch.tail) if length)


def _ratio(most: float, mean: float) -> float:
    return most / mean if mean else 1.0
