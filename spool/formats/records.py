"""The records of a sealed pack: an Arrow IPC file (zstd), one row a frame of its commit log, in order.

Readable with pyarrow alone; ``spool:events`` of the schema's metadata is the number of rows. Columns, null where the
event has no such fact:

=================  ===================================================================================================
``kind``           ``open``, ``step``, ``tools``, ``undo``, ``final``, ``discard``, ``note``, ``attach``, ``release``,
                   ``ckpt``, or ``all`` for a transaction
``session_id``     the session it is about
``at``             seconds since the epoch
``index``          number of the step in its session (``step``, ``undo``)
``step_id``        the caller's id of the step
``parent``         index of the step whose chain it extends
``n_prompt``       tokens of the prompt
``n_tokens``       tokens of prompt and response
``finish_reason``  as the engine gave it
``outcome``        how the session ended (``final``)
``messages``       JSON array: the messages that the parent's do not start with
``tools_key``      content key of the tool schemas (``step``, ``tools``)
``tools``          JSON: the tool schemas (``tools``)
``facts``          JSON object: ``facts`` of ``note``, ``metadata`` of ``open`` and ``step``; null if JSON cannot say it
``extents``        list of ``{array, stream, row, n, position, crc, before, after}``: where the rows are (``step``,
                   ``attach``); ``crc`` is the crc32c of the stored bytes of rows ``[row - before, row + n + after)``
``inner``          the events of a transaction, each a struct of the columns above
``event``          the exact msgpack payload
``crc``            crc32c of ``event``
=================  ===================================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from crc32c import crc32c
from msgspec.structs import asdict

from spool.errors import IntegrityError
from spool.formats.frames import decode_event
from spool.model.events import Event, ToolsStored, Transaction

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence

BATCH_ROWS = 256
"""Rows of every record batch but the last, so that one row is found without reading the others' batches."""

_PLAIN = ("session_id", "at", "index", "step_id", "parent", "n_prompt", "n_tokens", "finish_reason", "outcome")
_EXTENT = pa.struct(
    [
        pa.field("array", pa.string()),
        pa.field("stream", pa.string()),
        pa.field("row", pa.int64()),
        pa.field("n", pa.int64()),
        pa.field("position", pa.int64()),
        pa.field("crc", pa.uint32()),
        pa.field("before", pa.int64()),
        pa.field("after", pa.int64()),
    ]
)
_COLUMNS: list[pa.Field[Any]] = [
    pa.field("kind", pa.string(), nullable=False),
    pa.field("session_id", pa.string()),
    pa.field("at", pa.float64()),
    pa.field("index", pa.int64()),
    pa.field("step_id", pa.string()),
    pa.field("parent", pa.int64()),
    pa.field("n_prompt", pa.int64()),
    pa.field("n_tokens", pa.int64()),
    pa.field("finish_reason", pa.string()),
    pa.field("outcome", pa.string()),
    pa.field("messages", pa.large_string()),
    pa.field("tools_key", pa.string()),
    pa.field("tools", pa.large_string()),
    pa.field("facts", pa.large_string()),
    pa.field("extents", pa.list_(_EXTENT)),
]
_SCHEMA = pa.schema(
    [
        *_COLUMNS,
        pa.field("inner", pa.list_(pa.struct(_COLUMNS))),
        pa.field("event", pa.large_binary(), nullable=False),
        pa.field("crc", pa.uint32(), nullable=False),
    ],
)
_EVENT_ONLY = pa.ipc.IpcReadOptions(included_fields=[_SCHEMA.get_field_index(name) for name in ("event", "crc")])


_ARROW_ERRORS = (pa.ArrowException, OSError, KeyError, MemoryError, OverflowError, TypeError, SystemError)
"""What Arrow raises for files whose bits have changed."""


def encode(events: Sequence[bytes]) -> memoryview:
    """Return the Arrow IPC file of the payloads of a log.

    Args:
        events: payloads, in the order of their frames.

    Returns:
        Read-only bytes.

    Raises:
        IntegrityError: a payload is not an event.
    """
    sink = pa.BufferOutputStream()
    schema = _SCHEMA.with_metadata({"spool:format": "1", "spool:events": str(len(events))})
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        for start in range(0, len(events), BATCH_ROWS):
            rows = [_row(payload) for payload in events[start : start + BATCH_ROWS]]
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))
    return memoryview(sink.getvalue())


def decode(buffer: bytes | memoryview | mmap.mmap) -> list[bytes]:
    """Return the payloads of a records file, in order.

    Raises:
        IntegrityError: the file is damaged.
    """
    reader = _open(buffer)
    payloads: list[bytes] = []
    for number in range(reader.num_record_batches):
        events, sums = _events(reader, number)
        payloads.extend(map(_checked, events.to_pylist(), sums.to_pylist()))
    told = (reader.schema.metadata or {}).get(b"spool:events")
    if told != str(len(payloads)).encode():
        raise _damaged(f"it has {len(payloads)} events and says {told!r}")
    return payloads


def one(buffer: bytes | memoryview | mmap.mmap, row: int) -> bytes:
    """Return the payload of one row; of the file only its footer and two columns of one batch are touched.

    Args:
        buffer: the file, as bytes or memory map.
        row: number of the frame in its log, from 0.

    Raises:
        IntegrityError: the file is damaged or has no such row.
    """
    reader = _open(buffer)
    number, inside = divmod(row, BATCH_ROWS)
    if 0 <= number < reader.num_record_batches:
        events, sums = _events(reader, number)
        if inside < len(events):
            return _checked(events[inside].as_py(), sums[inside].as_py())
    raise IntegrityError(
        f"the records file has no row {row}: it is not the one the catalog was fed from; rebuild the catalog", row=row
    )


def _open(buffer: bytes | memoryview | mmap.mmap) -> pa.ipc.RecordBatchFileReader:
    try:
        return pa.ipc.open_file(pa.py_buffer(buffer), options=_EVENT_ONLY)
    except _ARROW_ERRORS as error:
        raise _damaged(error) from error


def _events(reader: pa.ipc.RecordBatchFileReader, number: int) -> tuple[pa.Array[Any], pa.Array[Any]]:
    """Return the payloads of a batch and their checksums."""
    try:
        batch = reader.get_batch(number)
        batch.validate(full=True)  # Arrow trusts offsets and lengths otherwise, wherever they point
        return batch.column("event"), batch.column("crc")
    except _ARROW_ERRORS as error:
        raise _damaged(error) from error


def _checked(payload: Any, crc: Any) -> bytes:
    if payload is None or crc32c(payload) != crc:
        raise _damaged("the crc32c of an event is not the one that was recorded")
    return bytes(payload)


def _damaged(error: Exception | str) -> IntegrityError:
    return IntegrityError(f"the records file is damaged: {error}; restore it from a copy")


def _row(payload: bytes) -> dict[str, Any]:
    event = decode_event(payload)
    row = _columns(event)
    if isinstance(event, Transaction):
        row["inner"] = [_columns(part) for part in event.events]
    row["event"], row["crc"] = payload, crc32c(payload)
    return row


def _columns(event: Event) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(event, name, None) for name in _PLAIN}
    row["kind"] = event.__struct_config__.tag
    row["messages"] = _text(getattr(event, "messages", b""))
    row["tools_key"] = event.key if isinstance(event, ToolsStored) else getattr(event, "tools_key", None)
    row["tools"] = _text(event.json) if isinstance(event, ToolsStored) else None
    row["facts"] = _json(getattr(event, "facts", None) or getattr(event, "metadata", None))
    extents = getattr(event, "extents", None)
    if extents is not None:
        row["extents"] = [{"array": name, **asdict(run)} for name, runs in extents.items() for run in runs]
    return row


def _text(data: bytes) -> str | None:
    # sealing a pack never fails for a record that says it badly: the exact bytes are in ``event``
    return data.decode(errors="replace") if data else None


def _json(facts: dict[str, Any] | None) -> str | None:
    try:
        return msgspec.json.encode(facts).decode() if facts else None
    except (TypeError, ValueError):
        return None
