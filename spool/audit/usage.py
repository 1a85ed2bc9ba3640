"""Where the bytes are."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from spool.audit.extents import named_rows
from spool.audit.listed import listed_rows
from spool.audit.streams import Streams
from spool.audit.units import count, usage_row
from spool.catalog import PackRow
from spool.errors import NotFoundError, SpoolError, StorageError
from spool.formats.shard import group_key, parse_group
from spool.model.events import Event
from spool.model.fields import ROUTED_EXPERTS, ArraySpec, FieldSpec, Layout, Schema
from spool.stores.hot import HotStore
from spool.stores.objects import Objects

log = logging.getLogger("spool.audit")

RECORDS = "records"


class _Shape(NamedTuple):
    """What is known of a stream without its rows."""

    schema: Schema
    layout: Layout


def usage(
    store: HotStore | None, objects: Objects | None, packs: Iterable[PackRow], events: Iterable[Event] | None
) -> list[dict[str, Any]]:
    """Return rows and bytes by stream and stored array, those of the records, and those of multimodal units.

    ``rows`` and ``stored_bytes`` are the rows that steps name, ``sent_bytes`` the same as engines send them (routing of
    all layers as int32), ``file_bytes`` what files of the hot root hold, padding and metadata included. ``cold_rows``
    are those of the rows that lie in the cold root, ``cold_sent_bytes`` the same as engines send them, and
    ``cold_bytes`` what the array's objects take there; None where there is no cold root. Units, where there are any,
    are a row without a stream, of files alone.

    Args:
        store: reads the hot root, whose streams are counted; None to count those of the cold root.
        objects: the cold root; None where there is none.
        packs: says which of them are in the cold root.
        events: of all sessions; None to count the rows that the arrays' documents list and tails hold instead, which
            takes no longer for more steps: those of transactions that were given up, and shared ones, come as they are.

    Raises:
        SpoolError: a stream cannot be read, or the cold root where there is no hot one; else it is left out.
    """
    there = {(row.stream, row.pack) for row in packs if row.state in ("spilled", "evicted")}
    try:
        cold_bytes = _cold_bytes(objects)
    except StorageError as error:
        if store is None:
            raise
        log.warning("what the cold root takes is left out: %s", error)
        objects, cold_bytes = None, Counter()
    shapes = _hot_shapes(store) if store is not None else _cold_shapes(objects, {name for name, _ in cold_bytes})
    if events is None:
        rows, cold_rows = listed_rows(store, objects, {name: shape[:2] for name, shape in shapes.items()}, there)
    else:
        rows, cold_rows = _rows(events, shapes, there)
    found = []
    for name, shape in sorted(shapes.items()):
        fields = {array.name: spec for spec in shape.schema.fields for array in spec.arrays}
        for array in shape.schema.arrays:
            key = (name, array.name)
            width = _sent_row_bytes(fields[array.name], array)
            found.append(
                {
                    "stream": name,
                    "field": array.name,
                    "rows": rows[key],
                    "stored_bytes": rows[key] * array.row_bytes,
                    "sent_bytes": rows[key] * width,
                    "file_bytes": _file_bytes(store, *key),
                    "cold_rows": cold_rows[key] if objects is not None else None,
                    "cold_sent_bytes": cold_rows[key] * width if objects is not None else None,
                    "cold_bytes": cold_bytes[key] if objects is not None else None,
                }
            )
        found.append(
            {
                "stream": name,
                "field": RECORDS,
                **dict.fromkeys(("rows", "stored_bytes", "sent_bytes")),
                "file_bytes": _file_bytes(store, name, RECORDS),
                **dict.fromkeys(("cold_rows", "cold_sent_bytes")),
                "cold_bytes": cold_bytes[name, RECORDS] if objects is not None else None,
            }
        )
    units = usage_row(count(None if store is None else store.root, objects))
    return found if units is None else [*found, units]


def _hot_shapes(store: HotStore) -> dict[str, _Shape]:
    streams, shapes = Streams(store), {}
    for name in streams.names():
        stream = streams.get(name)
        if isinstance(stream, SpoolError):
            raise stream
        shapes[name] = _Shape(stream.schema, stream.layout)
    return shapes


def _cold_shapes(objects: Objects | None, names: Iterable[str]) -> dict[str, _Shape]:
    shapes = {}
    for name in names if objects is not None else ():
        try:
            key = group_key(name)
            shapes[name] = _Shape(*parse_group(objects.get(key), f"{objects.url}/{key}"))  # type: ignore[union-attr]
        except NotFoundError:
            continue  # its last packs are being collected, or its first one is on the way
    return shapes


def _rows(
    events: Iterable[Event], shapes: dict[str, _Shape], there: set[tuple[str, int]]
) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """Return the rows of each stream's array, and those that lie in the cold root."""
    rows: Counter[tuple[str, str]] = Counter()
    cold_rows: Counter[tuple[str, str]] = Counter()
    for whole in named_rows(events).extents:
        shape = shapes.get(whole.stream)
        if shape is None or whole.array not in shape.layout.shard_rows:
            continue
        rows[whole.stream, whole.array] += whole.n
        if (whole.stream, whole.row // shape.layout.shard_rows[whole.array]) in there:
            cold_rows[whole.stream, whole.array] += whole.n
    return rows, cold_rows


def _cold_bytes(objects: Objects | None) -> Counter[tuple[str, str]]:
    """Return what the objects of each stream's arrays and records take."""
    sizes: Counter[tuple[str, str]] = Counter()
    for found in objects.list("streams/") if objects is not None else ():
        parts = found.key.split("/")
        if len(parts) > 3:
            sizes[parts[1], parts[2]] += found.size
    return sizes


def _sent_row_bytes(spec: FieldSpec, array: ArraySpec) -> int:
    return 4 * math.prod(spec.row_shape) if spec.name == ROUTED_EXPERTS else array.row_bytes


def _file_bytes(store: HotStore | None, stream: str, array: str) -> int | None:
    if store is None:
        return None
    folder = store.path(f"streams/{stream}/{array}")
    return sum(_size(os.path.join(path, name)) for path, _, names in os.walk(folder) for name in names)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
