"""Who encodes which unit, and whose features go where: a plan of the encoder's own, beside the backbone's. Pure.

Encoder ranks are balanced among themselves and know nothing of sequences, so that a unit is encoded once however many
sequences, micro-batches and ranks use it. What a backbone rank needs follows from its shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from numbers import Integral
from typing import Literal, get_args

import msgspec
from msgspec import Struct

from spool.arguments import instance, listed, one_of, refused
from spool.errors import InputError
from spool.model.refs import Ref
from spool.train.planning.balance import partition
from spool.train.planning.carried import check_plan
from spool.train.planning.items import Cost, Item, costs_of
from spool.train.planning.mesh import Place
from spool.train.planning.planner import Plan
from spool.train.units.index import UnitIndex, UnitRows, UnitUse, rows_in, unit_index

TpGradients = Literal["replicated", "partial"]
"""What each tensor-parallel rank's gradient of its features is: all of it, or a part that is to be summed."""


class UnitRun(Struct, frozen=True, array_like=True, gc=False):
    """Rows ``[start, stop)`` of the unit with number ``unit``."""

    unit: int
    start: int
    stop: int

    @property
    def n_rows(self) -> int:
        """Rows of the run."""
        return self.stop - self.start


class Route(Struct, frozen=True, array_like=True):
    """What travels from one process to another.

    Attributes:
        source: process that encodes.
        target: process whose backbone uses the features.
        runs: the rows, each once, in the order they travel.
        returns: gradients come back from ``target``; else another tensor-parallel rank returns the same.
    """

    source: int
    target: int
    runs: tuple[UnitRun, ...]
    returns: bool

    @property
    def n_rows(self) -> int:
        """Rows that travel."""
        return sum(run.n_rows for run in self.runs)


class UnitPlan(Struct, frozen=True, kw_only=True):
    """How the units of one mini-batch are encoded. Small, picklable, JSON-able; the same on every rank.

    Processes are numbered as in the process group that they share.

    Attributes:
        index: the units, and who uses them.
        plan: of the backbone.
        assigned: for each encoder rank the numbers of its units, ascending; each unit stands in one of them.
        costs: of each encoder rank.
        encoders: the process of each encoder rank.
        backbone: the process of each rank of the backbone's mesh.
        tp_gradients: what the gradient of each tensor-parallel rank is; see `plan_units`.
    """

    index: UnitIndex
    plan: Plan
    assigned: tuple[tuple[int, ...], ...]
    costs: tuple[float, ...]
    encoders: tuple[int, ...]
    backbone: tuple[int, ...]
    tp_gradients: str = "replicated"

    @property
    def imbalance(self) -> float:
        """Cost of the costliest encoder rank by the mean of all: 1.0 is even."""
        total = sum(self.costs)
        return max(self.costs) * len(self.costs) / total if total else 1.0

    @property
    def n_processes(self) -> int:
        """Processes that a group needs at least."""
        return max((*self.encoders, *self.backbone)) + 1

    def units_of(self, process: int) -> tuple[int, ...]:
        """Return the numbers of the units that a process encodes, in order; none where it is no encoder rank."""
        return self.assigned[self.encoders.index(process)] if process in self.encoders else ()

    def place_of(self, process: int) -> Place | None:
        """Return where a process stands in the backbone's mesh; None where it does not."""
        return self.plan.mesh.place(self.backbone.index(process)) if process in self.backbone else None

    def needs(self, place: Place | int) -> tuple[tuple[UnitRows, ...], ...]:
        """Return for each micro-batch the rows of units that a backbone rank holds, ascending in ``to``.

        Only the first pipeline stage embeds: the others hold none.

        Raises:
            InputError: the mesh has no such place.
        """
        return self._needs(place, self._uses())

    def holds(self, place: Place | int) -> tuple[UnitRun, ...]:
        """Return what a backbone rank needs over the whole mini-batch, each row once; by encoder rank, then unit."""
        return _runs(self.needs(place), self._owners())

    def routes(self, process: int | None = None) -> tuple[Route, ...]:
        """Return what travels, by target and then by encoder rank; a process's own rows have a route as well.

        Args:
            process: only what comes from or goes to this one; None for all.
        """
        owners, uses, mesh = self._owners(), self._uses(), self.plan.mesh
        held: dict[tuple[int, int], tuple[UnitRun, ...]] = {}
        found = []
        for rank, target in enumerate(self.backbone):
            place = mesh.place(rank)
            if place.pp or not (process is None or process == target or process in self.encoders):
                continue
            key = (place.dp, place.cp)
            if key not in held:
                held[key] = _runs(self._needs(place, uses), owners)
            returns = self.tp_gradients == "partial" or place.tp == 0
            for encoder, runs in groupby(held[key], key=lambda run: owners[run.unit]):
                source = self.encoders[encoder]
                if process is None or process in (source, target):
                    found.append(Route(source, target, tuple(runs), returns))
        return tuple(found)

    def to_json(self) -> str:
        """Return the plan as JSON; `unit_plan_from_json` reads it back."""
        return msgspec.json.encode(self).decode()

    def _needs(self, place: Place | int, uses: Sequence[Sequence[UnitUse]]) -> tuple[tuple[UnitRows, ...], ...]:
        rank = self.plan.rank(place)
        if rank.place.pp:
            return ((),) * len(rank.shares)
        return tuple(
            tuple(rows for piece in share.pieces for rows in rows_in(piece, uses[piece.item], self.index.units))
            for share in rank.shares
        )

    def _uses(self) -> list[tuple[UnitUse, ...]]:
        uses: list[tuple[UnitUse, ...]] = [()] * self.index.n_items
        for trajectory in self.index.trajectories:
            uses[trajectory.item] = trajectory.uses
        return uses

    def _owners(self) -> list[int]:
        owners = [0] * len(self.index.units)
        for encoder, units in enumerate(self.assigned):
            for unit in units:
                owners[unit] = encoder
        return owners


def unit_plan_from_json(text: str | bytes) -> UnitPlan:
    """Read a plan back from JSON.

    Raises:
        InputError: the text is not a plan of units.
    """
    try:
        found = msgspec.json.decode(text, type=UnitPlan)
    except (msgspec.DecodeError, UnicodeEncodeError, TypeError, RecursionError) as error:
        raise InputError(f"this is not a plan of units, as UnitPlan.to_json() makes them: {error}") from error
    check_plan(found.plan)
    _check_same(found.index, found.plan)
    return found


def plan_units(
    refs: Iterable[Ref | int | Item | None] | UnitIndex,
    planned: Plan,
    *,
    encoders: int | Sequence[int] | None = None,
    backbone: Sequence[int] | None = None,
    cost: Cost = None,
    tp_gradients: TpGradients = "replicated",
) -> UnitPlan:
    """Assign each unit of a mini-batch to one encoder rank, at nearly equal cost (`balance.partition`).

    Deterministic: every rank that calls this with the same arguments gets the same plan.

    Args:
        refs: what ``planned`` was made of, in that order, None for a sample that failed; or their `unit_index`.
        planned: the backbone's plan, whatever its mesh.
        encoders: how many processes encode, the first ones of the group; or which. Where None, all of the backbone's.
        backbone: the process of each rank of the mesh; where None, rank *r* is process *r*.
        cost: what a unit costs: a function of its rows, a number for each of ``index.units``, or None for its rows.
        tp_gradients: ``replicated``: each tensor-parallel rank gets the whole gradient of its input embeddings, as
            Megatron's column-parallel layers (all-reduce in backward) and its scatter to the sequence-parallel region
            (all-gather in backward) give it. They are copies, of which that of TP rank 0 counts. ``partial``: each has
            a part, as where nothing is reduced in backward, or where each TP rank embeds rows of its own; their sum
            counts.

    Raises:
        InputError: the references are not those of the plan, or an argument is wrong; says which.
    """
    instance("planned", planned, Plan, "the backbone's Plan, as plan() makes it")
    one_of("tp_gradients", tp_gradients, get_args(TpGradients))
    index = refs if isinstance(refs, UnitIndex) else unit_index(refs)
    _check_same(index, planned)
    mesh = planned.mesh
    behind = _processes("backbone", range(mesh.size) if backbone is None else backbone)
    if len(behind) != mesh.size:
        raise InputError(f"backbone names {len(behind)} processes, but the mesh has {mesh.size} ranks: name one a rank")
    ahead = behind if encoders is None else _processes("encoders", encoders)
    costs = costs_of([Item(unit.n_rows) for unit in index.units], cost, what="units")
    bins = partition(costs, len(ahead))
    return UnitPlan(
        index=index, plan=planned, assigned=tuple(map(tuple, bins)), encoders=ahead, backbone=behind,
        costs=tuple(float(costs[found].sum()) if found else 0.0 for found in bins), tp_gradients=tp_gradients,
    )  # fmt: skip


def _processes(name: str, given: object) -> tuple[int, ...]:
    if isinstance(given, Integral) and not isinstance(given, bool):
        given = range(int(given))
    found = listed(name, given, Integral, "numbers of processes in their group")
    if not found or len(set(found)) != len(found) or min(found) < 0:
        raise refused(name, "at least one process, each named once and none of them negative", found)
    return tuple(int(process) for process in found)


def _check_same(index: UnitIndex, planned: Plan) -> None:
    """Check that the plan was made of the references of the index."""
    if index.n_items != len(planned.items):
        raise InputError(
            f"the plan has {len(planned.items)} items and refs are {index.n_items}: give the references that "
            "plan() got, in that order"
        )
    for trajectory in index.trajectories:
        item = planned.items[trajectory.item]
        units = tuple((use.position, index.units[use.unit].n_rows) for use in trajectory.uses)
        if units != item.units:
            raise InputError(
                f"entry {trajectory.item} of refs, {trajectory.id}, has the units {units} (position, n_rows), but "
                f"that item of the plan has {item.units}: give the references that plan() got, in that order",
                item=trajectory.item,
            )


def _runs(needs: Iterable[Iterable[UnitRows]], owners: Sequence[int]) -> tuple[UnitRun, ...]:
    """Return the rows that micro-batches need, each once; by encoder rank, then by unit."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for micro in needs:
        for rows in micro:
            spans.setdefault(rows.unit, []).append((rows.start, rows.stop))
    order = sorted(spans, key=lambda unit: (owners[unit], unit))
    return tuple(UnitRun(unit, *span) for unit in order for span in _merged(spans[unit]))


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges that cover the same rows, ascending, none touching the next."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found
