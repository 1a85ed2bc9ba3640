"""Wire payloads of expert routing -> arrays ``[rows, layers, topk]`` of the integer dtype they were sent in.

The forms are those of `decode_routing`.

A payload is decoded into one buffer of its decoded size, piece by piece, so that other threads get the GIL in between
and no second copy of it exists. Nothing is unpickled.
"""

from __future__ import annotations

import ast
import binascii
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from spool.errors import PayloadError
from spool.formats.arrays import as_array
from spool.model.moe import MoEShape, as_shape

Text: TypeAlias = str | bytes
Ids: TypeAlias = NDArray[np.integer[Any]]

PIECE_CHARS = 1 << 20
"""Base64 characters decoded at once; a multiple of 4."""
PIECE_ROWS = 1024
"""Rows of nested lists converted at once."""
MOST_ROWS = 1 << 31
"""Tokens are counted in 31 bits; of layers and experts there are fewer."""

_NEMO = "nrlre1:"
_NPY_MAGIC = b"\x93NUMPY"
_NPY_HEADER_BYTES = 10_000
_NPY_BASE64 = binascii.b2a_base64(_NPY_MAGIC, newline=False).decode()


class Routing(NamedTuple):
    """Decoded routing.

    Attributes:
        rows: ``[rows, layers, topk]``, any integer dtype and byte order; owned by whoever asked for it, unless it was
            an array on the wire already.
        start: forward row that row 0 stands for, where the payload says so.
    """

    rows: Ids
    start: int | None = None


def decode_routing(
    payload: object, *, experts: MoEShape | str | None = None, dtype: str | None = None, what: str = "routed_experts"
) -> Routing:
    """Decode a routing payload of any known form.

    ==============================================  ==========================================================
    ``"<base64>"`` of C-order integers              SGLang; int32 unless the response names a dtype
    ``"<base64>"`` of a ``.npy`` file               vLLM 0.22 and later
    ``[[[id, ...], ...], ...]``                     older SGLang and vLLM 0.21; also arrays inside one process
    ``{"data", "shape", "dtype", "start"}``         prime-rl and Dynamo
    ``"nrlre1:<dtype>:<S>x<L>x<K>:<base64>"``       NeMo-RL
    ==============================================  ==========================================================

    Args:
        payload: in one of these forms.
        experts: the model's shape, or its name; needed where the payload carries none, checked against where it does.
        dtype: of a bare base64 payload, as the response names it; None: a ``.npy`` file or int32.
        what: names the payload in errors.

    Raises:
        PayloadError: the payload is not what it claims to be; says what was expected and what came.
        InputError: ``experts`` is no shape.
        NotFoundError: no model of that name is known.
    """
    shape = as_shape(experts)
    if isinstance(payload, Mapping):
        return _from_envelope(payload, shape, what)
    if isinstance(payload, (str, bytes)):
        return Routing(_from_text(payload, shape, dtype, what))
    return Routing(_from_lists(payload, shape, what))


def _from_text(text: Text, experts: MoEShape | None, dtype: str | None, what: str) -> Ids:
    head = text[:64] if isinstance(text, str) else text[:64].decode("ascii", "replace")
    if head.startswith(_NEMO):
        return _from_nemo(text, head, experts, what)
    if dtype is None and head.startswith(_NPY_BASE64):
        return _from_npy(decode_base64(text, what=what), experts, what)
    if experts is None:
        raise PayloadError(
            f"{what} is bare base64, which does not say how many layers it has: pass experts=", field=what
        )
    wire = wire_dtype(dtype or "int32", what=what)
    row_bytes = experts.num_layers * experts.topk * wire.itemsize
    data = decode_base64(text, what=what)
    if len(data) % row_bytes:
        raise PayloadError(
            f"{what} has {len(data)} bytes, which is not a whole number of rows of {experts.num_layers} layers x "
            f"{experts.topk} experts x {wire.itemsize} bytes ({wire.name}): another model, or another dtype?",
            field=what, got=len(data), expected=row_bytes,
        )  # fmt: skip
    return data.view(wire).reshape(-1, experts.num_layers, experts.topk)


def _from_nemo(text: Text, head: str, experts: MoEShape | None, what: str) -> Ids:
    parts = head.split(":", 3)
    if len(parts) < 4:
        raise PayloadError(f"{what} must read nrlre1:<dtype>:<S>x<L>x<K>:<base64>, got {head[:40]!r}...", field=what)
    _, dtype, dimensions, _ = parts
    sizes = [int(size) if size.isdecimal() else size for size in dimensions.split("x")]
    skip = len(_NEMO) + len(dtype) + len(dimensions) + 2
    return _shaped(decode_base64(text, skip=skip, what=what), wire_dtype(dtype, what=what), sizes, experts, what)


def _from_envelope(payload: Mapping[Any, Any], experts: MoEShape | None, what: str) -> Routing:
    missing = [key for key in ("data", "shape", "dtype") if payload.get(key) is None]
    if missing:
        raise PayloadError(
            f"{what} is an object without {', '.join(missing)}; it has {sorted(map(str, payload))}", field=what
        )
    data, shape, start = payload["data"], payload["shape"], payload.get("start")
    if not isinstance(data, (str, bytes)):
        raise PayloadError(f"{what}.data must be base64 text, got {type(data).__name__}", field=what)
    if start is not None and not _is_count(start):
        raise PayloadError(f"{what}.start must be a row number, got {start!r}", field=what, got=repr(start))
    wire = wire_dtype(payload["dtype"], what=what)
    return Routing(_shaped(decode_base64(data, what=what), wire, shape, experts, what), start)


def _from_npy(data: NDArray[np.uint8], experts: MoEShape | None, what: str) -> Ids:
    """Read a ``.npy`` file of format 1 to 3 without numpy's loader, which would go through file objects and copies."""
    version, width = int(data[6]) if len(data) > 8 else 0, 2
    if version not in (1, 2, 3):
        raise PayloadError(f"{what} is a .npy file of unknown version {version}", field=what, got=version)
    width = 2 if version == 1 else 4
    n_header = int.from_bytes(data[8 : 8 + width].tobytes(), "little")
    first = 8 + width + n_header
    if n_header > _NPY_HEADER_BYTES or first > len(data):
        raise PayloadError(
            f"{what} is a .npy file with a header of {n_header} bytes in a file of {len(data)}", field=what
        )
    text = data[8 + width : first].tobytes().decode("latin1")
    try:
        header = ast.literal_eval(text)
        dtype, fortran, shape = header["descr"], header["fortran_order"], header["shape"]
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise PayloadError(f"{what} is a .npy file whose header cannot be read: {text[:80]!r}", field=what) from error
    return _shaped(data[first:], wire_dtype(dtype, what=what), shape, experts, what, order="F" if fortran else "C")


def _from_lists(payload: object, experts: MoEShape | None, what: str) -> Ids:
    """Convert nested lists in pieces, into int32; arrays stay as they are."""
    if isinstance(payload, np.ndarray) or not isinstance(payload, Sequence):
        array = as_array(payload, what=what)
        _check_ids(array, what)
        _check_shape(array.shape, experts, what)
        return array
    if not len(payload):
        layers, topk = (experts.num_layers, experts.topk) if experts else (0, 0)
        return np.empty((0, layers, topk), np.int32)
    out: Ids | None = None
    for first, piece in _converted(payload, what):
        if out is None:
            _check_shape((len(payload), *piece.shape[1:]), experts, what)
            out = np.empty((len(payload), *piece.shape[1:]), np.int32)
        if piece.shape[1:] != out.shape[1:]:
            raise PayloadError(
                f"{what} is ragged: rows of {out.shape[1:]} before row {first}, then {piece.shape[1:]}", field=what
            )
        if piece.dtype.itemsize > 4 and piece.size and max(int(piece.max()), -1 - int(piece.min())) >= 1 << 31:
            raise PayloadError(f"{what} has a value beyond 32 bits in rows {first} to {first + len(piece)}", field=what)
        out[first : first + len(piece)] = piece
    assert out is not None
    return out


def _converted(payload: Sequence[Any], what: str) -> Iterator[tuple[int, Ids]]:
    for first in range(0, len(payload), PIECE_ROWS):
        part = payload[first : first + PIECE_ROWS]
        try:
            piece = np.asarray(part)
        except (ValueError, TypeError, OverflowError) as error:
            raise PayloadError(f"{what} is ragged between rows {first} and {first + len(part)}", field=what) from error
        _check_ids(piece, f"{what}[{first}:{first + len(part)}]")
        yield first, piece


def _check_ids(array: NDArray[Any], what: str) -> None:
    if array.dtype.kind not in "iu" and array.size:
        raise PayloadError(f"{what} must hold integers, got {array.dtype}", field=what, got=str(array.dtype))


def _shaped(
    data: NDArray[np.uint8], wire: np.dtype[Any], shape: object, experts: MoEShape | None, what: str, order: str = "C"
) -> Ids:
    """Return a view of ``data`` as ``shape``, if its size is right to the byte."""
    if not isinstance(shape, (list, tuple)) or not all(map(_is_count, shape)):
        raise PayloadError(
            f"{what} has the shape {shape!r}; expected [rows, layers, topk]", field=what, got=repr(shape)
        )
    _check_shape(tuple(shape), experts, what)
    if max(shape) > MOST_ROWS:
        raise PayloadError(f"{what} has the shape {shape}, more than any array has", field=what, got=repr(shape))
    expected = math.prod(shape) * wire.itemsize
    if len(data) != expected:
        raise PayloadError(
            f"{what} has {len(data)} bytes, but {list(shape)} of {wire.name} takes {expected}",
            field=what, got=len(data), expected=expected,
        )  # fmt: skip
    return data.view(wire).reshape(tuple(shape), order="F" if order == "F" else "C")


def _check_shape(shape: Sequence[int], experts: MoEShape | None, what: str) -> None:
    if len(shape) != 3:
        raise PayloadError(f"{what} has shape {list(shape)}, not [rows, layers, topk]", field=what, got=list(shape))
    if experts is None:
        return
    if shape[1] not in (experts.num_layers, experts.stored_layers) or shape[2] != experts.topk:
        raise PayloadError(
            f"{what} has {shape[1]} layers x {shape[2]} experts a row; the model has {experts.num_layers} layers "
            f"({experts.stored_layers} of them MoE) x {experts.topk}",
            field=what, got=list(shape), expected=[experts.num_layers, experts.topk],
        )  # fmt: skip


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def wire_dtype(name: object, *, what: str) -> np.dtype[Any]:
    """Return the integer dtype that a payload names, little-endian unless it says otherwise.

    Raises:
        PayloadError: it names no integer dtype.
    """
    try:
        dtype = np.dtype(name) if isinstance(name, str) else None
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype.kind not in "iu":
        raise PayloadError(
            f"{what} has dtype {name!r}; expected an integer one such as uint8 or int32", field=what, got=repr(name)
        )
    return dtype.newbyteorder("<") if dtype.byteorder == "=" else dtype


def decode_base64(text: Text, *, skip: int = 0, what: str) -> NDArray[np.uint8]:
    """Decode standard base64, strictly, into one new buffer.

    Args:
        text: base64 characters, padded, nothing else between or around them but a last line end.
        skip: characters of ``text`` before the base64.
        what: names the payload in errors.

    Raises:
        PayloadError: a wrong length, a character that is not base64, or padding inside; names the position.
    """
    if text[-1:] in ("\n", b"\n"):
        text = text.rstrip()
    n_chars = len(text) - skip
    if n_chars % 4:
        raise PayloadError(
            f"{what}: base64 of {n_chars} characters was cut off (not a multiple of 4)", field=what, got=n_chars
        )
    padding = text[-2:].count("=") if isinstance(text, str) else text[-2:].count(b"=")
    out = np.empty(max(n_chars // 4 * 3 - padding, 0), np.uint8)
    done = 0
    for first in range(skip, len(text), PIECE_CHARS):
        try:
            piece = binascii.a2b_base64(text[first : first + PIECE_CHARS], strict_mode=True)
        except ValueError as error:
            raise PayloadError(
                f"{what}: not base64 in the {PIECE_CHARS} characters from {first - skip} on: {error}",
                field=what,
            ) from error
        stop = done + len(piece)
        if first + PIECE_CHARS < len(text) and len(piece) != PIECE_CHARS // 4 * 3:
            raise PayloadError(f"{what}: base64 padding before character {first + PIECE_CHARS - skip}", field=what)
        out[done:stop] = np.frombuffer(piece, np.uint8)
        done = stop
    return out
