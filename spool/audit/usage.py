"""Where the bytes are."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any

from spool.audit.extents import named_rows
from spool.audit.streams import Streams
from spool.errors import SpoolError
from spool.model.events import Event
from spool.model.fields import ROUTED_EXPERTS, ArraySpec, FieldSpec
from spool.stores.hot import HotStore


def usage(store: HotStore, events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return rows and bytes by stream and stored array, and those of the records.

    ``stored_bytes`` are the rows', ``sent_bytes`` the same as engines send them (routing of all layers as int32), and
    ``file_bytes`` what the files hold, padding and metadata included.

    Raises:
        SpoolError: a stream cannot be read.
    """
    rows: dict[tuple[str, str], int] = {}
    for whole in named_rows(events).extents:
        rows[whole.stream, whole.array] = rows.get((whole.stream, whole.array), 0) + whole.n
    streams, found = Streams(store), []
    for name in streams.names():
        stream = streams.get(name)
        if isinstance(stream, SpoolError):
            raise stream
        folder = store.path(f"streams/{name}")
        for array in stream.schema.arrays:
            n_rows = rows.get((name, array.name), 0)
            width = _sent_row_bytes(stream.fields[array.name], array)
            found.append({
                "stream": name, "field": array.name, "rows": n_rows, "stored_bytes": n_rows * array.row_bytes,
                "sent_bytes": n_rows * width, "file_bytes": _disk_bytes(f"{folder}/{array.name}"),
            })  # fmt: skip
        found.append({
            "stream": name, "field": "records", "rows": None, "stored_bytes": None, "sent_bytes": None,
            "file_bytes": _disk_bytes(f"{folder}/records"),
        })  # fmt: skip
    return found


def _sent_row_bytes(spec: FieldSpec, array: ArraySpec) -> int:
    return 4 * math.prod(spec.row_shape) if spec.name == ROUTED_EXPERTS else array.row_bytes


def _disk_bytes(folder: str) -> int:
    return sum(_file_bytes(os.path.join(path, name)) for path, _, names in os.walk(folder) for name in names)


def _file_bytes(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
