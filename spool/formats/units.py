"""Multimodal units: arrays <-> the bytes of a file.

A unit's file is one in the safetensors format (a header's length as u64, the header as JSON, little-endian values)
with one tensor, ``unit``, so that whatever reads safetensors reads units. The header is written in one way only: equal
arrays (dtype, shape, values bit for bit) give equal files, and the digest of the file is that of the array. A dtype
that safetensors does not know is stored as its bits, with its name in the header's ``__metadata__``.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from typing import Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from spool.errors import IntegrityError, PayloadError
from spool.formats.arrays import as_array
from spool.model.units import PREFIX

_TENSOR = "unit"
_ALIGNMENT = 8
_MOST_HEADER_BYTES = 4096
_GUESSES = (bool, int, float, complex, str, bytes, bytearray, memoryview, list, tuple, dict)
_LENGTH = struct.Struct("<Q")

_NAMES: dict[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "float32": "F32", "float64": "F64", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_AS_BITS = ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz", "float8_e8m0fnu", "float8_e4m3", "float8_e3m4")

DTYPES = (*_NAMES, *_AS_BITS)
"""Names of the dtypes that a unit may have."""


class _Tensor(Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Metadata(Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str


class _Header(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    unit: _Tensor
    metadata: _Metadata | None = msgspec.field(default=None, name="__metadata__")


class Encoded(NamedTuple):
    """A unit as it is stored.

    Attributes:
        key: names it.
        head: the file's first bytes, a multiple of 8.
        body: the rest; it may be the caller's own memory.
    """

    key: str
    head: bytes
    body: memoryview

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.head) + len(self.body)


def encode(array: object) -> Encoded:
    """Return an array as it is stored, its values normalised: C order, little-endian.

    Args:
        array: a numpy or torch array of any shape, or what numpy takes for one; not lists or bytes, whose dtype would
            be a guess. C-contiguous little-endian values are not copied.

    Raises:
        PayloadError: it is something else, or of a dtype that is not among `DTYPES`.
    """
    values = _as_array(array)
    name = values.dtype.name
    if name not in DTYPES:
        raise PayloadError(f"a unit's dtype is one of {', '.join(DTYPES)}, got {name}: convert the array", got=name)
    plain: NDArray[Any] = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    body = plain.reshape(-1).view(np.uint8).data.toreadonly()
    head = _head(name, values.shape, len(body))
    return Encoded(key_of(head, body), head, body)


def key_of(*parts: bytes | bytearray | memoryview) -> str:
    """Return the key of a unit whose file consists of ``parts``."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return PREFIX + digest.hexdigest()


def decode(data: bytearray, key: str, *, where: str) -> NDArray[Any]:
    """Return the array in a unit's file, a writable view of ``data``, once it is known to be what was put.

    Args:
        data: the whole file.
        key: the unit's.
        where: names the file in errors.

    Raises:
        IntegrityError: these are not the bytes that have this key.
    """
    check(data, key, where=where)
    try:
        return _parse(data)
    except (msgspec.DecodeError, struct.error, ValueError, TypeError) as error:
        raise IntegrityError(
            f"{where} is what its key says, and no unit of this version ({error}): upgrade", file=where, unit=key
        ) from error


def check(data: bytes | bytearray | memoryview, key: str, *, where: str) -> None:
    """Check that ``data`` are the bytes of the unit called ``key``.

    Raises:
        IntegrityError: they are not.
    """
    found = key_of(data)
    if found != key:
        raise IntegrityError(
            f"{where} is damaged: its {len(data)} bytes have the key {found}; put the unit again (in a cold root "
            "remove the object first), or restore it from elsewhere",
            file=where,
            unit=key,
        )


def _as_array(array: object) -> NDArray[Any]:
    if not isinstance(array, np.generic) and isinstance(array, _GUESSES):
        raise PayloadError(f"a unit is a numpy or torch array, got {type(array).__name__}: pass np.asarray(...) of it")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        bits = _torch_bits(torch, array)
        return as_array(array, what="the unit") if bits is None else bits
    found = np.asarray(array)
    plain = found.dtype.name in DTYPES and not isinstance(array, np.ma.MaskedArray)
    return found if plain else as_array(array, what="the unit")


def _torch_bits(torch: Any, tensor: Any) -> NDArray[Any] | None:
    """Return a tensor of a dtype that numpy knows by ml_dtypes only; None for any other."""
    name = str(tensor.dtype).removeprefix("torch.")
    if not name.startswith("float8_") or not hasattr(ml_dtypes, name):
        return None
    found: NDArray[Any] = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    typed: NDArray[Any] = found.view(getattr(ml_dtypes, name))
    return typed


def _head(name: str, shape: tuple[int, ...], n_bytes: int) -> bytes:
    tensor = _Tensor(_NAMES.get(name, "U8"), shape, (0, n_bytes))
    header = msgspec.json.encode(_Header(tensor, None if name in _NAMES else _Metadata(name)))
    header += b" " * (-len(header) % _ALIGNMENT)
    return _LENGTH.pack(len(header)) + header


def _parse(data: bytearray) -> NDArray[Any]:
    (n_header,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + n_header
    if n_header > _MOST_HEADER_BYTES or start > len(data):
        raise ValueError(f"a header of {n_header} bytes in a file of {len(data)}")
    header = msgspec.json.decode(data[_LENGTH.size : start], type=_Header)
    names = {stored: name for name, stored in _NAMES.items()}
    name = header.metadata.dtype if header.metadata is not None else names[header.unit.dtype]
    dtype = np.dtype(getattr(ml_dtypes, name, name)).newbyteorder("<")
    return np.frombuffer(data, np.uint8, offset=start).view(dtype).reshape(header.unit.shape)
