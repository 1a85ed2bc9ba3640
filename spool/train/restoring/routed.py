"""Routing as slime takes it: an object for each layer of a micro-batch, and no row in which an entry is absent."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from spool.errors import InputError
from spool.model.fields import ROUTED_EXPERTS

Stage = Literal["forward", "backward"]


class Routing(Protocol):
    """The routing of a micro-batch, from which one layer at a time is read."""

    def read(self, layer: int, stage: Stage) -> Any:
        """Return the experts of each row in an absolute layer, int32 ``[rows, K]``."""


class RoutedLayer:
    """The routing of one layer of a micro-batch, where a trainer keeps a tensor otherwise.

    Attributes:
        source: of the micro-batch.
        layer: absolute.
        absent: what marks an absent entry inside a row; None where the routing has no such mark.
    """

    __slots__ = ("absent", "layer", "source")

    def __init__(self, source: Routing, layer: int, absent: int | None = None) -> None:
        self.source = source
        self.layer = layer
        self.absent = absent

    def materialize_for_routing_replay(self, stage: Stage) -> Any:
        """Return the experts of each row, int32 ``[rows, K]``: slime's routing replay calls this in either pass.

        Raises:
            InputError: an entry inside a row is absent; ``source.read`` returns such rows.
            ReleasedError, IntegrityError, StorageError: as `Spool.read`.
        """
        rows = self.source.read(self.layer, stage)
        check_whole(ROUTED_EXPERTS, self.absent, rows, otherwise=f"take them by read({self.layer})")
        return rows


def check_whole(name: str, absent: int | None, rows: Any, *, otherwise: str) -> None:
    """Refuse rows with absent entries, whose mark slime would take for an expert.

    Args:
        name: of the field.
        absent: the mark; where it is None nothing is looked at.
        rows: an array, or a tensor.
        otherwise: what to do where such rows are wanted.

    Raises:
        InputError: there are some.
    """
    if absent is not None and bool((rows == absent).any()):
        raise InputError(
            f"{name} has entries of {absent} inside rows, which slime does not take; {otherwise}, or leave such "
            "segments out",
            field=name,
        )
