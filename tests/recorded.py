"""Events, and folders of commit logs, as a writer would leave them; for the tests of the index."""

from __future__ import annotations

import os

from spool.catalog import LogItem
from spool.formats import records
from spool.formats.frames import LOG_HEADER, encode_event, frame
from spool.model.events import (
    Annotated,
    Attached,
    Checkpointed,
    Released,
    SessionDiscarded,
    SessionFinalized,
    SessionOpened,
    StepCommitted,
    StepDiscarded,
    ToolsStored,
    Transaction,
)
from spool.model.fields import FieldSpec
from spool.model.refs import Extent, SegmentRef, Span, VersionSpan

__all__ = [
    "Annotated",
    "Checkpointed",
    "Released",
    "SessionDiscarded",
    "SessionOpened",
    "StepDiscarded",
    "ToolsStored",
    "Transaction",
]

ADVANTAGES = FieldSpec(name="advantages", dtype="float32", align="response")


def opened(session_id, at=1.0, **facts):
    return SessionOpened(session_id, at, **facts)


def step(session_id, index, at=2.0, *, messages=b'[{"role":"user"}]', stream="s", finish_reason="stop", **more):
    """A step of 10 prompt and 5 response tokens on top of its parent's chain."""
    base = index * 15
    values = {
        "parent": index - 1 if index else None,
        "base": base,
        "n_prompt": base + 10,
        "n_tokens": base + 15,
        "n_rows": base + 15,
        "extents": {"token_ids": (Extent(stream, base, 15, base, 7),)},
        "finish_reason": finish_reason,
        "messages": messages,
        **more,
    }
    return StepCommitted(session_id, index, f"step-{index}", at, **values)


def segment(session_id, index=0, *, view="lineage", n_tokens=15, versions=("9",), **more):
    spans = (Span(0, 10, n_tokens),)
    return SegmentRef(
        spool_id="spool",
        session_id=session_id,
        view=view,
        index=index,
        steps=(index,),
        n_tokens=n_tokens,
        n_rows=n_tokens,
        response_start=10,
        spans=spans,
        versions=tuple(VersionSpan(name, 10, n_tokens) for name in versions),
        extents={"token_ids": (Extent("s", 0, n_tokens, 0, 7),)},
        **more,
    )


def final(session_id, at=9.0, *, view="lineage", outcome="completed", segments=None):
    return SessionFinalized(
        session_id, at, outcome, view, (segment(session_id, view=view),) if segments is None else segments
    )


def attached(session_id, at=10.0, *, target="lineage:0:15", row=0):
    return Attached(session_id, at, target, ADVANTAGES, {"advantages": (Extent("late", row, 5, 10, 3),)})


def items(events, first=0):
    """Frames of 100 bytes each, behind a header of 16."""
    return [LogItem(seq, 16 + 100 * seq, event) for seq, event in enumerate(events, first)]


def feed(catalog, events, *, stream="s", pack=0):
    """Ingest one whole pack's log at once."""
    assert catalog.ingest(stream, pack, start=0, end=16 + 100 * len(events), items=items(events))


class Folder:
    """A stream's folder under a hot root, its logs written by hand."""

    def __init__(self, root, name="20260101T000000-00000000"):
        self.name = name
        self.path = f"{root}/streams/{name}"
        os.makedirs(f"{self.path}/records", exist_ok=True)
        with open(f"{self.path}/lock", "wb"):
            pass

    def log(self, pack=0):
        return f"{self.path}/records/{pack}.log"

    def arrow(self, pack=0):
        return f"{self.path}/records/{pack}.arrow"

    def append(self, *events, pack=0):
        """Write frames; return the offsets where they begin."""
        with open(self.log(pack), "ab") as file:
            if file.tell() == 0:
                file.write(LOG_HEADER)
            offsets = []
            for event in events:
                offsets.append(file.tell())
                file.write(frame(encode_event(event)))
        return offsets

    def append_bytes(self, data, pack=0):
        with open(self.log(pack), "ab") as file:
            file.write(data)

    def seal(self, *events, pack=0):
        """Write the records and unlink the log, as a writer does."""
        temp = f"{self.path}/records/.{pack}.tmp"
        with open(temp, "wb") as file:
            file.write(records.encode([encode_event(event) for event in events]))
        os.rename(temp, self.arrow(pack))
        if os.path.exists(self.log(pack)):
            os.unlink(self.log(pack))
