"""What a read returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from spool.formats.arrays import Ragged

if TYPE_CHECKING:
    from spool.model.fields import FieldSpec
    from spool.model.refs import Ref

__all__ = ["ByteRange", "Coverage", "Ragged", "Sample"]


class Sample(Mapping[str, Any]):
    """The arrays of one reference by field name; a `Ragged` where a row has any number of values.

    Every array is fresh (or the caller's own), writable and C-contiguous; none shares memory with another.

    Attributes:
        ref: the reference that was read.
    """

    __slots__ = ("_arrays", "ref")

    def __init__(self, ref: Ref, arrays: dict[str, Any]) -> None:
        self.ref = ref
        self._arrays = arrays

    def __getitem__(self, field: str) -> Any:
        if field not in self._arrays:
            raise KeyError(f"{field}; there is {', '.join(self._arrays)}")
        return self._arrays[field]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        parts = []
        for field, value in self._arrays.items():
            array = value.values if isinstance(value, Ragged) else value
            parts.append(f"{field}: {'ragged ' if array is not value else ''}{array.dtype}{list(array.shape)}")
        return f"Sample({', '.join(parts)})"


class ByteRange(NamedTuple):
    """Where rows lie, as ``dd`` takes it.

    Attributes:
        file: path.
        offset: first byte.
        length: bytes.
        field: the field's name.
        rows: stored rows ``(start, stop)`` of the stream's array that these bytes are (part of).
        stream: the stream's name.
    """

    file: str
    offset: int
    length: int
    field: str
    rows: tuple[int, int]
    stream: str


class Coverage(NamedTuple):
    """What a field of a reference is, and what of it is missing.

    Attributes:
        spec: of the field; the first stream's, where several hold it.
        gaps: half-open ranges of positions that were never sent: tokens, rows of the forward, or steps.
    """

    spec: FieldSpec
    gaps: tuple[tuple[int, int], ...]
