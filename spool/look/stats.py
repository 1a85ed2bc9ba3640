"""The shape of a run as the command line and the report show it: what the index counts, and routing of a sample."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from spool.catalog.shape import Summary
from spool.errors import ReleasedError
from spool.look.routing import RoutingSummary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from spool.handle import Spool
    from spool.model.refs import SegmentRef, StepRef


class LayerRouting(Struct, frozen=True, kw_only=True):
    """Routing of one layer; None where nothing was counted.

    Attributes:
        layer: its absolute number.
        imbalance: load of the busiest expert over the mean; 1 where all are used alike.
        entropy: of the load, over the largest possible; 1 where all are used alike.
        overlap: part of its experts that a row has in common with the row before it.
        unused: part of its experts that were never chosen.
    """

    layer: int
    imbalance: float | None
    entropy: float | None
    overlap: float | None
    unused: float | None


class ModelRouting(Struct, frozen=True, kw_only=True):
    """Routing of the segments of one model's shape.

    Attributes:
        num_experts, topk: of a layer.
        n_refs: segments or steps that were counted.
        n_rows: forward rows that were.
        n_missing: forward rows that were never sent.
        layers: of the MoE layers.
    """

    num_experts: int
    topk: int
    n_refs: int
    n_rows: int
    n_missing: int
    layers: tuple[LayerRouting, ...]


class Stats(Struct, frozen=True, kw_only=True):
    """What ``spool stats`` says.

    Attributes:
        summary: of the index.
        n_sampled: segments that were chosen for the routing; None where it was not asked for.
        n_released: those of them that were deleted meanwhile.
        routing: of the sample, by model; the largest first.
    """

    summary: Summary
    n_sampled: int | None = None
    n_released: int = 0
    routing: tuple[ModelRouting, ...] = ()


class Sampled(Struct, frozen=True, kw_only=True):
    """Routing of a sample, by model, the largest first; and how many segments of it could not be read any more."""

    models: tuple[RoutingSummary, ...]
    n_released: int


def stats(
    sp: Spool,
    where: str | None = None,
    *,
    current_version: str | None = None,
    routing: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Stats:
    """Return the shape of a run.

    Args:
        sp: the spool.
        where: a filter of sessions.
        current_version: what staleness is counted from.
        routing: how many segments the routing is counted of; None for no routing.
        progress: called with how many of them were read, and how many there are.

    Raises:
        InputError: the filter does not parse.
        IntegrityError, StorageError: a segment cannot be read.
    """
    summary = sp.summary(where, current_version=current_version)
    if routing is None:
        return Stats(summary=summary)
    refs = sp.sample(routing, where)
    sampled = sample_routing(sp, refs, progress=progress)
    return Stats(
        summary=summary,
        n_sampled=len(refs),
        n_released=sampled.n_released,
        routing=tuple(map(model_routing, sampled.models)),
    )


def sample_routing(
    sp: Spool,
    refs: Iterable[SegmentRef | StepRef],
    *,
    rows: slice | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Sampled:
    """Count the routing of references, those of each model's shape together; memory does not grow with them.

    Args:
        sp: the spool.
        refs: segments or steps.
        rows: only these forward rows of each.
        progress: called with how many references were read, and how many there are.

    Raises:
        IntegrityError, StorageError: one cannot be read.
    """
    found: dict[Any, RoutingSummary] = {}
    chosen, n_released = list(refs), 0
    for number, ref in enumerate(chosen, 1):
        try:
            summary = RoutingSummary.of(sp, ref, rows=rows)
        except ReleasedError:
            n_released += 1
            continue
        if summary.layers:
            found[summary.shape] = found.get(summary.shape, RoutingSummary.none()).add(summary)
        if progress is not None:
            progress(number, len(chosen))
    models = sorted(found.values(), key=lambda model: (-model.n_rows, model.shape))
    return Sampled(models=tuple(models), n_released=n_released)


def model_routing(summary: RoutingSummary) -> ModelRouting:
    """Return a summary as plain numbers, without the load of single experts."""
    columns = (summary.imbalance, summary.entropy, summary.overlap, summary.unused)
    layers = [
        LayerRouting(
            layer=layer,
            imbalance=_known(imbalance) if summary.n_rows else None,
            entropy=_known(entropy) if summary.n_rows else None,
            overlap=_known(overlap),
            unused=_known(unused),
        )
        for layer, imbalance, entropy, overlap, unused in zip(summary.layers, *columns, strict=True)
    ]
    return ModelRouting(
        num_experts=summary.num_experts,
        topk=summary.topk,
        n_refs=summary.n_refs,
        n_rows=summary.n_rows,
        n_missing=summary.n_missing,
        layers=tuple(layers),
    )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
