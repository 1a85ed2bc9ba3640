"""Shapes of MoE models: what one row of routing looks like."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.resources import files
from typing import Any

from msgspec import Struct

from spool.errors import ConfigError, InputError, NotFoundError


class MoEShape(Struct, frozen=True):
    """The routing shape of a model.

    Attributes:
        num_layers: all hidden layers, dense ones included; layer numbers everywhere are absolute.
        num_experts: routed experts a layer; ids are in ``[0, num_experts)``.
        topk: experts chosen for a token in a layer.
        moe_layers: absolute numbers of the MoE layers, ascending; None where every layer is one.
    """

    num_layers: int
    num_experts: int
    topk: int
    moe_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_experts, self.topk) < 1:
            raise ConfigError(f"num_layers, num_experts and topk must be at least 1, got {self}")
        if self.topk > self.num_experts:
            raise ConfigError(f"topk={self.topk} is more than num_experts={self.num_experts}")
        layers = self.moe_layers
        if layers is not None and (
            not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= self.num_layers
        ):
            raise ConfigError(f"moe_layers must be ascending layer numbers in [0, {self.num_layers}), got {layers}")

    @property
    def stored_layers(self) -> int:
        """Number of layers that are stored."""
        return self.num_layers if self.moe_layers is None else len(self.moe_layers)


class _Models(Mapping[str, MoEShape]):
    """The known models by lower-case name; read from ``moe.toml`` on first use."""

    @cached_property
    def _shapes(self) -> dict[str, MoEShape]:
        table = tomllib.loads(files("spool.model").joinpath("moe.toml").read_text())
        return {name: _shape(entry) for name, entry in table.items()}

    def __getitem__(self, name: str) -> MoEShape:
        shape = self._shapes.get(name.lower()) if isinstance(name, str) else None
        if shape is None:
            raise NotFoundError(
                f"no MoE shape named {name!r}; known: {', '.join(self)}. "
                "For another model pass spool.MoEShape(num_layers=, num_experts=, topk=, moe_layers=)"
            )
        return shape

    def get(self, name: str, default: Any = None) -> Any:  # LookupError, not KeyError, is what __getitem__ raises
        """Return the shape called ``name``, or ``default``."""
        return self._shapes.get(name.lower(), default)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._shapes

    def __repr__(self) -> str:
        return f"<spool.models: {', '.join(self)}>"

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _shape(entry: dict[str, int]) -> MoEShape:
    layers = entry["layers"]
    moe: tuple[int, ...] | None = None
    if "dense_first" in entry:
        moe = tuple(range(entry["dense_first"], layers))
    elif "every" in entry:
        moe = tuple(range(entry["every"] - 1, layers, entry["every"]))
    return MoEShape(num_layers=layers, num_experts=entry["experts"], topk=entry["topk"], moe_layers=moe)


models: Mapping[str, MoEShape] = _Models()


def as_shape(experts: object) -> MoEShape | None:
    """Return the shape that a shape, the name of a known model, or None stands for.

    Raises:
        InputError: it is something else.
        NotFoundError: no model of that name is known.
    """
    if isinstance(experts, str):
        return models[experts]
    if experts is not None and not isinstance(experts, MoEShape):
        raise InputError(f"experts must be a spool.MoEShape or a name in spool.models, got {experts!r:.80}")
    return experts
