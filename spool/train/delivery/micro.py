"""A micro-batch as a rank consumes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from spool.arguments import integer, one_of, refused
from spool.errors import NotFoundError
from spool.model.fields import ROUTED_EXPERTS
from spool.train.planning.planner import RankPlan
from spool.train.restoring.routed import RoutedLayer, Stage

if TYPE_CHECKING:
    from spool.model.refs import SegmentRef, StepRef
    from spool.train.planning.shares import Share


class Micro(Mapping[str, Any]):
    """The arrays of one rank's share of a micro-batch, by name; row *i* of every field is the same position.

    Fields have ``[n_rows, ...]``. Beside them: ``weight_versions`` and, where the current one was said, ``staleness``,
    int64; ``position_ids`` int64; ``cu_seqlens`` and ``cu_seqlens_padded`` int32, of the whole micro-batch. What pads:
    0, or ``pad_token_id``; -1 in versions; consecutive experts in routing.

    Numpy arrays and tensors on the CPU are a mapping that the ranks of the place share: pages are this rank's own only
    once it writes to them, which no other sees. The memory is free, and counts no more, when the last of them is gone.

    Attributes:
        plan: what this rank consumes of the mini-batch; ``plan.mini_batch`` is its number.
        number: of the micro-batch in it.
        share: what this rank has of the micro-batch.
        refs: the sequences, in the order they lie in; None for samples that failed.
        version_names: weight versions by number, where they are no numbers; else None.
        n_bytes: of the arrays, as they are shared.
        fetched_bytes: read for it from hot and cold roots, by the one process that read.
    """

    __slots__ = (
        "_absent", "_arrays", "fetched_bytes", "n_bytes", "number", "plan", "refs", "share", "version_names",
    )  # fmt: skip

    def __init__(
        self,
        arrays: dict[str, Any],
        plan: RankPlan,
        number: int,
        *,
        refs: tuple[StepRef | SegmentRef | None, ...],
        version_names: tuple[str, ...] | None,
        absent: int | None,
        n_bytes: int,
        fetched_bytes: int,
    ) -> None:
        self._arrays, self._absent = arrays, absent
        self.plan, self.number, self.refs, self.version_names = plan, number, refs, version_names
        self.share: Share = plan.shares[number]
        self.n_bytes, self.fetched_bytes = n_bytes, fetched_bytes

    def __getitem__(self, name: str) -> Any:
        if name not in self._arrays:
            raise KeyError(f"{name}; there is {', '.join(self._arrays)}")
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        sequences = f"{len(self.refs)} sequences, {self.share.n_rows} rows"
        return f"<Micro {self.number} of mini-batch {self.plan.mini_batch}: {sequences}, {', '.join(self)}>"

    @property
    def layers(self) -> range:
        """Absolute layers that the routing has here."""
        start = 0 if self.plan.stage is None else self.plan.stage[0]
        return range(start, start + self._routing.shape[1])

    def layer(self, layer: int) -> RoutedLayer:
        """Return what stands for the routing of an absolute layer: slime's routing replay takes such objects.

        Raises:
            InputError: this rank does not have it.
            NotFoundError: the micro-batch has no routing.
        """
        layers = self.layers
        if integer("layer", layer) not in layers:
            raise refused("layer", f"one of {layers.start} to {layers.stop - 1}", layer)
        return RoutedLayer(self, layer, self._absent)

    def read(self, layer: int, stage: Stage = "forward") -> Any:
        """Return the experts that the routers of this rank see in an absolute layer: int32 ``[rows, K]``, fresh.

        With sequence parallelism these are the rows of its part of the TP ranks' share.

        Args:
            layer: one of ``layers``.
            stage: the pass; both are the same here.

        Raises:
            InputError: this rank does not have the layer.
            NotFoundError: the micro-batch has no routing.
        """
        one_of("stage", stage, ("forward", "backward"))
        self.layer(layer)
        rows = self._routing[self.plan.router_rows(self.share), layer - self.layers.start]
        return rows.astype(np.int32) if isinstance(rows, np.ndarray) else rows.int()

    @property
    def _routing(self) -> Any:
        if ROUTED_EXPERTS not in self._arrays:
            raise NotFoundError(f"this micro-batch has {', '.join(self)} and no {ROUTED_EXPERTS}", field=ROUTED_EXPERTS)
        return self._arrays[ROUTED_EXPERTS]
