"""What the chains of a session hold, folded step by step from the root."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from spool.model.refs import Unit
from spool.model.rows import forward_rows
from spool.rollout.coverage import EMPTY, Cover, cover, cut, moved, overlay

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from spool.model.fields import FieldSpec
    from spool.rollout.tree import StepTree

_KEPT = 8


class Chain(NamedTuple):
    """What the path from a root to a step holds.

    Attributes:
        covers: by field; fields of which nothing is stored are left out. Response fields have all steps' responses,
            step fields the ordinal on the path as position.
        units: multimodal units by position.
        n_tokens: tokens.
        n_rows: rows of the forward they expand to.
    """

    covers: Mapping[str, Cover]
    units: tuple[Unit, ...]
    n_tokens: int
    n_rows: int


ROOT = Chain({}, (), 0, 0)


class Chains:
    """Makes chains and keeps the last few.

    A step's chain is its parent's, extended: one that grows costs a copy of some tuples a step, and memory does not
    grow with the square of its length.
    """

    def __init__(self, tree: StepTree) -> None:
        self._tree = tree
        self._kept: OrderedDict[int, Chain] = OrderedDict()

    def of(self, index: int, fields: Iterable[FieldSpec]) -> Chain:
        """Return the chain that ends with a step."""
        missing: list[int] = []
        at: int | None = index
        while at is not None and at not in self._kept:
            missing.append(at)
            at = self._tree.events[at].parent
        chain = ROOT
        if at is not None:
            chain = self._kept[at]
            self._kept.move_to_end(at)
        for step in reversed(missing):
            chain = self._extended(chain, step, fields)
            # Other leaves go on from a branching step.
            if step == index or self._tree.is_branch(step):
                self._kept[step] = chain
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return chain

    def _extended(self, chain: Chain, step: int, fields: Iterable[FieldSpec]) -> Chain:
        event = self._tree.events[step]
        covers = {}
        for spec in fields:
            own, held = cover(spec, event.extents), chain.covers.get(spec.name, EMPTY)
            if spec.align == "step":
                own = moved(own, self._tree.depth(step))
            elif held.extents and event.n_tokens:
                held = cut(held, 0, forward_rows(chain.units, event.base) if spec.align == "forward" else event.base)
            if own.extents or held.extents:
                covers[spec.name] = overlay(held, own)
        if not event.n_tokens:
            return chain._replace(covers=covers)
        units = [unit for unit in chain.units if unit.position < event.base]
        units += [unit for unit in event.units if unit.position >= event.base]
        return Chain(covers, tuple(units), event.n_tokens, event.n_rows)

    def forget(self, indexes: Iterable[int]) -> None:
        """Let go of the chains of steps that are gone; their indexes may be used again."""
        for index in indexes:
            self._kept.pop(index, None)
