"""Field specs: what a named quantity is, and which stored arrays carry it."""

from __future__ import annotations

import math
import re
from difflib import get_close_matches
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, get_args

import ml_dtypes
import numpy as np
import xxhash
from msgspec import Struct, json

from spool.errors import ConfigError
from spool.model.moe import MoEShape

Align = Literal["token", "response", "forward", "step"]
"""What a row stands for: a token, a generated-or-later token, the forward over a token (T-1 rows), or a step."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_RESERVED = frozenset({"records", "lock", "units", "streams"})

DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "bfloat16", "float16", "float32", "float64",
)  # fmt: skip
"""Names of what can be stored; each number little-endian."""

_ALIASES = {
    "float": "float32", "double": "float64", "half": "float16", "int": "int32", "long": "int64", "bf16": "bfloat16",
    "fp16": "float16", "fp32": "float32",
}  # fmt: skip

MAX_CHUNK_BYTES = 1 << 20
MAX_CHUNK_ROWS = 4096
MAX_SHARD_BYTES = 64 << 20
MAX_SHARD_ROWS = 1 << 20
MAX_VALUE_ROWS = 1 << 26


@lru_cache(maxsize=32)
def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Return the little-endian numpy dtype called ``name``; ``bfloat16`` comes from ml_dtypes."""
    bits: Any = ml_dtypes.bfloat16 if name == "bfloat16" else name
    dtype: np.dtype[np.generic] = np.dtype(bits).newbyteorder("<")
    return dtype


class FieldSpec(Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True, cache_hash=True):
    """A named per-token or per-step quantity.

    Attributes:
        name: letters, digits and underscores, at most 64; it becomes a folder name.
        dtype: stored dtype, one of `DTYPES`.
        align: what a row stands for.
        shape: inner shape of one stored row.
        ragged: each row holds any number of values of inner shape ``shape``; stored as values and end offsets.
        positions: values are token positions, rebased when segments are packed.
        bound: values are integers in ``[0, bound)``; others are refused.
        num_layers: axis 0 of the inner shape is layers, and a caller sees this many (absolute) ones.
        layers: the absolute layers that are stored, where not all are; the rest are zero for the caller.
        missing: the negative value that marks one absent entry inside a row; needs a signed dtype.
        train_dtype: dtype a trainer gets; the stored one where None.
    """

    name: str
    dtype: str
    align: Align
    shape: tuple[int, ...] = ()
    ragged: bool = False
    positions: bool = False
    bound: int | None = None
    num_layers: int | None = None
    layers: tuple[int, ...] | None = None
    missing: int | None = None
    train_dtype: str | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name.lower() in _RESERVED:
            raise ConfigError(
                f"{self.name!r} cannot name a field: use letters, digits and underscores, not starting with a digit, "
                f"at most 64, and none of {', '.join(sorted(_RESERVED))}",
                field=self.name,
            )
        self._check_dtype()
        whole = [n for n in (self.bound, self.num_layers, self.missing, *self.shape) if n is not None]
        if any(isinstance(n, bool) or not isinstance(n, int) for n in whole) or not isinstance(self.ragged, bool):
            raise ConfigError(f"field {self.name!r}: shape, bound, num_layers and missing are integers, ragged a bool")
        if any(n < 1 for n in self.shape):
            raise ConfigError(f"field {self.name!r}: every inner dimension must be at least 1, got {self.shape}")
        if self.num_layers is not None:
            stored = self.num_layers if self.layers is None else len(self.layers)
            if not self.shape or self.shape[0] != stored:
                raise ConfigError(f"field {self.name!r}: axis 0 of {self.shape} must be its {stored} stored layers")
        elif self.layers is not None:
            raise ConfigError(f"field {self.name!r}: layers= needs num_layers=")
        if self.num_layers is not None and self.layers is not None:
            layers = list(self.layers)
            if not layers or layers != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= self.num_layers:
                raise ConfigError(
                    f"field {self.name!r}: layers must be ascending, in [0, {self.num_layers}), got {self.layers}"
                )

        if self.align not in get_args(Align):
            raise ConfigError(
                f"field {self.name!r}: align={self.align!r} is not one of {', '.join(get_args(Align))}", field=self.name
            )

    def _check_dtype(self) -> None:
        for name in (self.dtype, *(() if self.train_dtype is None else (self.train_dtype,))):
            if name not in DTYPES:
                near = get_close_matches(str(_ALIASES.get(str(name), name)), DTYPES, 1, 0.75)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(
                    f"field {self.name!r}: {name!r} is not one of the dtypes {', '.join(DTYPES)}{hint}", field=self.name
                )
        if self.train_dtype is not None and not self._widens(self.train_dtype):
            raise ConfigError(
                f"field {self.name!r}: train_dtype={self.train_dtype} does not hold every {self.dtype}", field=self.name
            )
        if self.missing is not None and (self.missing >= 0 or numpy_dtype(self.dtype).kind != "i"):
            raise ConfigError(
                f"field {self.name!r}: missing={self.missing} must be negative, and {self.dtype} signed",
                field=self.name,
            )
        if self.bound is not None:
            kind = numpy_dtype(self.dtype).kind
            if kind not in "iu" or self.bound < 1 or self.bound - 1 > np.iinfo(self.dtype).max:
                raise ConfigError(f"field {self.name!r}: ids below {self.bound} do not fit dtype {self.dtype}")

    def _widens(self, train: str) -> bool:
        """Whether ``train`` holds all values of the field: those of its dtype, or below its bound."""
        if numpy_dtype(self.dtype).kind in "iu" and numpy_dtype(train).kind in "iu" and self.bound is not None:
            limits = np.iinfo(train)
            return self.bound - 1 <= limits.max and (self.missing or 0) >= limits.min
        return np.can_cast(numpy_dtype(self.dtype), numpy_dtype(train), "safe")

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        """Inner shape that a caller sees: absolute layers where the field has layers."""
        return self.shape if self.num_layers is None else (self.num_layers, *self.shape[1:])

    @cached_property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """The stored arrays that carry this field: one, or values and end offsets where ragged."""
        if not self.ragged:
            return (ArraySpec(name=self.name, dtype=self.dtype, shape=self.shape),)
        return (
            ArraySpec(name=f"{self.name}.offsets", dtype="uint64", values=True),
            ArraySpec(name=f"{self.name}.values", dtype=self.dtype, shape=self.shape, values=True),
        )


class ArraySpec(Struct, frozen=True, kw_only=True, dict=True):
    """One stored array: a row is ``row_bytes`` bytes, C order, little-endian.

    Attributes:
        name: folder name under the stream.
        dtype: stored dtype's numpy name.
        shape: inner shape.
        values: belongs to a ragged field; its rows are counted apart from the other arrays', with an R of its own.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    values: bool = False

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return numpy_dtype(self.dtype).itemsize * math.prod(self.shape)


class Schema(Struct, frozen=True, dict=True):
    """The frozen set of fields of a stream.

    Attributes:
        fields: the specs, ordered by name; names are unique without regard to case.
    """

    fields: tuple[FieldSpec, ...] = ()

    def __post_init__(self) -> None:
        names = [spec.name.lower() for spec in self.fields]
        if len(set(names)) < len(names):
            raise ConfigError(f"two fields of one stream share a name: {sorted(names)}")

    @classmethod
    def of(cls, *fields: FieldSpec) -> Schema:
        """Return the schema of ``fields`` in any order."""
        return cls(tuple(sorted(fields, key=lambda spec: spec.name)))

    @cached_property
    def _by_name(self) -> dict[str, FieldSpec]:
        return {spec.name: spec for spec in self.fields}

    def __getitem__(self, name: str) -> FieldSpec:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @cached_property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """Every stored array of the stream."""
        return tuple(array for spec in self.fields for array in spec.arrays)

    @cached_property
    def key(self) -> str:
        """A short digest: equal schemas have equal keys."""
        return xxhash.xxh3_64_hexdigest(json.encode(self))


class Layout(Struct, frozen=True):
    """Rows a chunk and a shard of each array of a schema.

    Attributes:
        chunk_rows: C by array name.
        shard_rows: R by array name; pack n holds rows ``[n*R, (n+1)*R)``.
    """

    chunk_rows: dict[str, int]
    shard_rows: dict[str, int]


def layout(schema: Schema, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> Layout:
    """Return the layout of a stream of ``schema``.

    C is the largest power of two up to 4,096 with ``C * widest row <= 1 MiB``, R the largest up to 2**20 with
    ``R * widest row <= max_shard_bytes``; ragged values have theirs apart.
    """
    rows = [array for array in schema.arrays if not array.values]
    widest = max((array.row_bytes for array in rows), default=1)
    chunk, shard = {}, {}
    for array in schema.arrays:
        width, cap = (array.row_bytes, MAX_VALUE_ROWS) if array.values else (widest, MAX_SHARD_ROWS)
        chunk[array.name] = _power_of_two(MAX_CHUNK_BYTES // width, MAX_CHUNK_ROWS)
        shard[array.name] = max(_power_of_two(max_shard_bytes // width, cap), chunk[array.name])
    return Layout(chunk, shard)


class ArraySize(NamedTuple):
    """R, the rows of a pack of a stored array, and the bytes of a row of it in the hot tier."""

    shard_rows: int
    row_bytes: int


def array_sizes(schema: Schema, sizes: Layout) -> dict[str, ArraySize]:
    """Return the sizes of each stored array of a stream, by name."""
    return {array.name: ArraySize(sizes.shard_rows[array.name], array.row_bytes) for array in schema.arrays}


def _power_of_two(limit: int, cap: int) -> int:
    return 1 << (max(1, min(limit, cap)).bit_length() - 1)


TOKEN_IDS = FieldSpec(name="token_ids", dtype="int32", align="token")
LOGPROBS = FieldSpec(name="logprobs", dtype="float32", align="response")
LOSS_MASK = FieldSpec(name="loss_mask", dtype="uint8", align="response")
ROUTED_EXPERTS = "routed_experts"
BUILT_IN = frozenset({"token_ids", "logprobs", "loss_mask", ROUTED_EXPERTS})


@lru_cache(maxsize=64)
def expert_field(shape: MoEShape, *, signed: bool = False) -> FieldSpec:
    """Return the spec of ``routed_experts`` for a model.

    Args:
        shape: the model's routing shape.
        signed: store a signed dtype, so that -1 may stand inside a row.
    """
    widths = ("int8", "int16", "int32") if signed else ("uint8", "uint16", "uint32")
    dtype = next(name for name in widths if np.iinfo(name).max >= shape.num_experts - 1)
    return FieldSpec(
        name=ROUTED_EXPERTS,
        dtype=dtype,
        align="forward",
        shape=(shape.stored_layers, shape.topk),
        bound=shape.num_experts,
        num_layers=shape.num_layers,
        layers=shape.moe_layers,
        missing=-1 if signed else None,
        train_dtype="int32",
    )
