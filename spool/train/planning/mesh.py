"""The mesh of a trainer: how many ranks along each axis, which place each has, and which layers a stage holds."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import force_setattr

from spool.arguments import instance, integer, listed, text
from spool.errors import ConfigError, InputError
from spool.train.planning.items import Range

_AXES = ("tp", "cp", "dp", "pp")


class Place(NamedTuple):
    """Where a rank stands on each axis of its mesh."""

    dp: int = 0
    cp: int = 0
    tp: int = 0
    pp: int = 0


class Mesh(Struct, frozen=True, kw_only=True):
    """The parallel sizes of a trainer, named and meant as Megatron does.

    Experts are spread over ranks of these axes, so expert parallelism changes nothing here.

    Attributes:
        dp: data parallel: ranks that train different sequences.
        cp: context parallel: ranks that share a sequence.
        tp: tensor parallel: ranks that take the same rows.
        pp: pipeline parallel: stages that hold different layers.
        vpp: model chunks a stage holds (virtual pipeline); chunk c of stage p is the ``c * pp + p``-th run of layers.
        num_layers: hidden layers of the model, dense ones included; needed where ``pp * vpp > 1``.
        stages: layers of each of the ``pp * vpp`` runs; where empty all have the same number.
        first_dense: leading layers without experts.
        sequence_parallel: TP ranks share the rows of norms, so that a share must be a multiple of ``tp`` rows.
        order: how global ranks are numbered, the fastest axis first; ``ep`` may be named and means nothing.

    Raises:
        ConfigError: a size is not positive, or the layers do not add up.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    num_layers: int | None = None
    stages: tuple[int, ...] = ()
    first_dense: int = 0
    sequence_parallel: bool = True
    order: str = "tp-cp-ep-dp-pp"

    def __post_init__(self) -> None:
        for name in (*_AXES, "vpp"):
            if integer(name, getattr(self, name)) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if sorted(axis for axis in text("order", self.order).split("-") if axis != "ep") != sorted(_AXES):
            raise ConfigError(f"order must name tp, cp, dp and pp once each, joined by '-', got {self.order!r}")
        instance("sequence_parallel", self.sequence_parallel, bool, "True or False")
        force_setattr(self, "stages", tuple(listed("stages", self.stages, int, "numbers of layers, one for each run")))
        self._check_stages()
        n_layers = self._n_layers
        if integer("first_dense", self.first_dense) < 0 or (n_layers is not None and self.first_dense > n_layers):
            raise ConfigError(f"first_dense must be in [0, {n_layers}], the layers, got {self.first_dense}")

    @property
    def size(self) -> int:
        """Ranks altogether."""
        return self.dp * self.cp * self.tp * self.pp

    def place(self, rank: int | Place) -> Place:
        """Return where a rank stands: a global rank, or one that is named by its place.

        Raises:
            InputError: the mesh has no such rank or place.
        """
        if isinstance(rank, Place):
            for axis, at in zip(Place._fields, rank, strict=True):
                if not 0 <= integer(axis, at) < getattr(self, axis):
                    raise InputError(f"{rank} is not on this mesh: {axis} is {getattr(self, axis)}")
            return rank
        if not 0 <= integer("rank", rank) < self.size:
            raise InputError(f"rank must be in [0, {self.size}), the ranks of this mesh, got {rank}", got=rank)
        found, rest = {}, rank
        for axis in self.order.split("-"):
            if axis != "ep":
                rest, found[axis] = divmod(rest, getattr(self, axis))
        return Place(**found)

    def layers(self, pp: int, chunk: int = 0) -> Range | None:
        """Return the absolute layers that a model chunk of a stage holds; None for all, where nobody said how many.

        Raises:
            InputError: the mesh has no such stage or chunk.
        """
        for name, value, size in (("pp", pp, self.pp), ("chunk", chunk, self.vpp)):
            if not 0 <= integer(name, value) < size:
                raise InputError(f"{name} must be in [0, {size}) of this mesh, got {value}", got=value)
        if self._n_layers is None:
            return None
        n_runs, run = self.pp * self.vpp, chunk * self.pp + pp
        counts = self.stages or (self._n_layers // n_runs,) * n_runs
        start = sum(counts[:run])
        return start, start + counts[run]

    @property
    def _n_layers(self) -> int | None:
        return sum(self.stages) if self.stages else self.num_layers

    def _check_stages(self) -> None:
        n_runs, n_layers = self.pp * self.vpp, self.num_layers
        if not self.stages:
            if n_runs > 1 and n_layers is None:
                raise ConfigError(f"pp={self.pp} and vpp={self.vpp} share out layers: pass num_layers= or stages=")
            if n_layers is not None and (integer("num_layers", n_layers) < 1 or n_layers % n_runs):
                raise ConfigError(
                    f"{n_layers} layers do not go evenly into pp * vpp = {n_runs}: pass stages=, the layers of each"
                )
            return
        if len(self.stages) != n_runs or min(self.stages) < 0:
            raise ConfigError(f"stages must be pp * vpp = {n_runs} numbers of layers, got {self.stages}")
        if n_layers not in (None, sum(self.stages)):
            raise ConfigError(f"stages {self.stages} have {sum(self.stages)} layers, but num_layers is {n_layers}")
