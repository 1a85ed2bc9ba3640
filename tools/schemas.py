"""Writes ``schemas/*.json`` from the structs; ``--check`` says whether they are up to date instead."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from spool.audit import Report
from spool.catalog import SessionRow
from spool.formats.manifest import PackEntry
from spool.logs.units import GoneUnits
from spool.look.diff import Comparison
from spool.look.stats import Stats
from spool.model.events import Event
from spool.model.fields import Layout, Schema
from spool.model.refs import SegmentRef, StepRef
from spool.record import SuspendToken
from spool.root import Identity
from spool.status import Status

FOLDER = Path(__file__).parents[1] / "schemas"

SOURCES: dict[str, tuple[str, Any]] = {
    "reference.json": ("A reference as to_json() writes it", StepRef | SegmentRef),
    "record.json": ("A payload of the commit log, and of the event column of sealed records", Event),
    "spool.json": ("spool.json in a spool's root", Identity),
    "stream-schema.json": ("The attribute spool:schema of a stream's group", Schema),
    "stream-layout.json": ("The attribute spool:layout of a stream's group", Layout),
    "pack-entry.json": ("An entry of spool:packs in a manifest's metadata", PackEntry),
    "gone-units.json": ("units/gone/<time>-<16 hex>.json", GoneUnits),
    "suspend-token.json": ("A suspend token", SuspendToken),
    "cli-diff.json": ("spool diff --json", Comparison),
    "cli-ls.json": ("spool ls --json", list[SessionRow]),
    "cli-stats.json": ("spool stats --json", Stats),
    "cli-status.json": ("spool status --json", Status),
    "cli-verify.json": ("spool verify --json", Report),
}


def documents() -> dict[str, str]:
    """Return the text of each schema file by name."""
    return {name: _document(title, kind) for name, (title, kind) in SOURCES.items()}


def _document(title: str, kind: Any) -> str:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **msgspec.json.schema(kind)}
    return json.dumps(schema, indent=2) + "\n"


def main() -> int:
    stale = []
    for name, text in documents().items():
        path = FOLDER / name
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(text)
    print("\n".join(f"{'stale' if '--check' in sys.argv else 'written'}: {name}" for name in stale) or "up to date")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
