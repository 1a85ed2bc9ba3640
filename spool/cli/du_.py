"""``spool du``."""

from __future__ import annotations

from typing import Any

import click

from spool.cli.output import Column, json_option, write_json, write_rows
from spool.cli.places import location_argument, open_spool

_BYTES = ("stored_bytes", "sent_bytes", "file_bytes", "cold_sent_bytes", "cold_bytes")
_COLUMNS = (
    Column("field", "FIELD"),
    Column("rows", "ROWS", "count"),
    Column("stored_bytes", "STORED", "size"),
    Column("sent_bytes", "AS INT32", "size"),
    Column("ratio", "RATIO", "number"),
    Column("file_bytes", "FILES", "size"),
    Column("cold_rows", "COLD ROWS", "count"),
    Column("cold_bytes", "COLD", "size"),
    Column("cold_ratio", "RATIO", "number"),
    Column("cold_sent_bytes"),
)


@click.command("du")
@location_argument
@click.option("--streams", is_flag=True, help="Each stream apart.")
@json_option
def command(location: str | None, streams: bool, as_json: bool) -> None:
    """Say where the bytes are.

    For each field: rows; their bytes as stored; the bytes of the same as engines send them (routing of all layers as
    int32), and how many times as much that is; and what the files hold, records, metadata and padding included. Then
    the same of the cold root: rows that are there, what their objects take, and how many times as much they are as
    engines send them. From a hot root its own streams are counted, from a cold root all. Multimodal units, where there
    are any, are a line of their own: what their files take.
    """
    with open_spool(location) as sp:
        rows = sp.usage()
    total = {"field": "total", **_sum(rows)}
    if as_json:
        write_json({"streams": rows, "fields": _by(rows, "field"), "total": _sum(rows)})
    elif streams:
        found = [{**row, **_ratio(row)} for row in rows]
        write_rows([*found, {"stream": "total", **total}], (Column("stream", "STREAM"), *_COLUMNS))
    else:
        write_rows([*_by(rows, "field"), total], _COLUMNS)


def _by(rows: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return [
        {key: name, "rows": _add(group, "rows"), "cold_rows": _add(group, "cold_rows"), **_sum(group)}
        for name, group in sorted(groups.items(), key=lambda item: (item[0] in ("records", "units"), item[0]))
    ]


def _add(rows: list[dict[str, Any]], name: str) -> int | None:
    found = [row[name] for row in rows if row[name] is not None]
    return sum(found) if found else None


def _sum(rows: list[dict[str, Any]]) -> dict[str, Any]:
    total = {name: _add(rows, name) for name in _BYTES}
    return {**total, **_ratio(total)}


def _ratio(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "ratio": _quotient(row["sent_bytes"], row["stored_bytes"]),
        "cold_ratio": _quotient(row["cold_sent_bytes"], row["cold_bytes"]),
    }


def _quotient(sent: int | None, taken: int | None) -> float | None:
    return round(sent / taken, 2) if sent and taken else None
