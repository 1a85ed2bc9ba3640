"""What ranks tell a reorganiser: how they want micro-batches, and the mini-batches to come. Plain data."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, Literal

from msgspec import Struct

from spool.arguments import instance, listed
from spool.errors import InputError
from spool.model.moe import MoEShape
from spool.model.refs import SegmentRef, StepRef
from spool.read.lookup import names_of
from spool.train.planning.items import Item, items_of
from spool.train.planning.planner import Mesh, Place, Plan, RankPlan
from spool.train.planning.shares import Share
from spool.train.restoring.gaps import Missing
from spool.train.restoring.versions import VersionOrder, named, version_order


class Settings(Struct, frozen=True, kw_only=True):
    """How the ranks of a group want their micro-batches; all of them the same.

    Attributes:
        uri: of the spool, with its options.
        n_ranks: ranks that share this reorganiser.
        mesh: of the trainer.
        fields: names; all that any reference of a mini-batch has where None.
        depth: micro-batches that may be in memory at a time, those that ranks still hold included.
        memory_bytes: most that these may take; None for what the machine has free.
        dtype: ``stored``, narrow, or ``train``.
        missing, mask_versions, verify: as `restore` takes them.
        experts: the routing shape, needed only where no reference has routing.
        pad_token_id: stands in ``token_ids`` for padding.
        join_timeout_s: how long ranks may take to come.
    """

    uri: str
    n_ranks: int
    mesh: Mesh = Mesh()
    fields: tuple[str, ...] | None = None
    depth: int = 2
    memory_bytes: int | None = None
    dtype: Literal["stored", "train"] = "stored"
    missing: Missing = "error"
    mask_versions: Literal["all", "last"] | int = "all"
    verify: Literal["whole", "always", "never"] = "whole"
    experts: MoEShape | str | None = None
    pad_token_id: int = 0
    join_timeout_s: float = 60.0


class Work(Struct, frozen=True, kw_only=True):
    """A mini-batch, as the ranks that share a reorganiser get it.

    Attributes:
        plan: what they consume; the place is that of their first one.
        refs: the sequences, by their number in the plan, None for a sample that failed; and for each field of the
            mini-batch one that has it, so that all ranks have the same fields, and those with only padding, too.
        split: whether ranks have parts of sequences only.
        version: of the current weights, as `restore` takes it.
    """

    plan: RankPlan
    refs: dict[int, StepRef | SegmentRef | None]
    split: bool
    version: str | tuple[str, ...] | None

    @property
    def shares(self) -> tuple[Share, ...]:
        """One for each micro-batch."""
        return self.plan.shares

    @property
    def layers(self) -> slice | None:
        """Absolute layers that are read; None for all."""
        return None if self.plan.stage is None else slice(*self.plan.stage)

    @property
    def order(self) -> VersionOrder:
        """How the weight versions of its sequences are ordered."""
        return version_order([ref for ref in self.refs.values() if ref is not None], self.version)


def work_of(plan: Plan, place: Place, chunk: int, refs: object, version: object) -> Work:
    """Return what the ranks at a place consume of a mini-batch.

    Args:
        plan: of the mini-batch.
        place: of one of them.
        chunk: of their model chunks.
        refs: all sequences of the plan, None for samples that failed.
        version: of the current weights, as `restore` takes it.

    Raises:
        InputError: the references are not those that were planned, and names the first that is not; or ``version`` is
            neither a version nor all of them, each once.
    """
    mine = instance("plan", plan, Plan, "what spool.train.plan returned").rank(place._replace(tp=0), chunk=chunk)
    known = (StepRef, SegmentRef, type(None))
    given: list[Any] = listed("refs", refs, known, "the references that were planned, None for samples that failed")
    if len(given) != len(plan.items):
        raise InputError(f"the plan is of {len(plan.items)} sequences, and refs= has {len(given)}: pass all of them")
    for number, (ref, item) in enumerate(zip(given, plan.items, strict=True)):
        if ref is not None:
            _check_planned(number, ref, item)
    telling: dict[str, int] = {}
    for number, ref in enumerate(given):
        for name in () if ref is None else names_of(ref, None):
            telling.setdefault(name, number)
    needed = sorted({item for share in mine.shares for item in share.items} | set(telling.values()))
    return Work(
        plan=mine, refs={number: given[number] for number in needed}, split=plan.mesh.cp > 1,
        version=named(version),
    )  # fmt: skip


def _check_planned(number: int, ref: StepRef | SegmentRef, item: Item) -> None:
    """Refuse a reference whose rows lie elsewhere than those of the item: each rank would cut it at other tokens."""
    (own,) = items_of([ref])
    if (own.n_tokens, own.units) != (item.n_tokens, item.units):
        units = enumerate(zip_longest(own.units, item.units))
        differs = next((n for n, (mine, planned) in units if mine != planned), None)
        has, planned = _shape(own, differs), _shape(item, differs)
        raise InputError(
            f"entry {number} of refs, {ref.id}, has {has}, and was planned with {planned}: pass the references in the "
            "order in which they were planned; where they have units plan them, not their lengths",
            entry=number, expected=planned, got=has,
        )  # fmt: skip


def _shape(item: Item, unit: int | None) -> str:
    rows = f"{item.n_rows} rows of {item.n_tokens} tokens"
    if unit is None:
        return rows
    if unit >= len(item.units):
        return f"{rows} and {len(item.units)} units"
    position, n_rows = item.units[unit]
    return f"{rows}, unit {unit} being {n_rows} rows at token {position}"
