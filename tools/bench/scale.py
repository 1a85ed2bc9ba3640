"""The catalog with a million steps against the same with a thousand."""

from __future__ import annotations

import os
from collections.abc import Iterator

from spool.catalog import Catalog, LogItem
from spool.model.events import SessionOpened, StepCommitted
from spool.model.fields import TOKEN_IDS
from spool.model.refs import Extent
from tools.bench.harness import Row, mean_text, pairs

STEPS_A_SESSION, BATCH = 10, 1000
STREAM = "20260101T000000-00000000"


def lookups(root: str, *, runs: int, n_steps: int) -> Iterator[Row]:
    """Look up one session among ``n_steps`` steps and among a thousand."""
    small, large = (_filled(os.path.join(root, f"catalog-{n}"), n) for n in (1000, n_steps))
    n, step = 200, 7919

    def look(catalog: Catalog, n_sessions: int) -> None:
        for i in range(n):
            assert len(catalog.session_events(f"s{i * step % n_sessions}")) == STEPS_A_SESSION + 1

    mine, theirs, ratio = pairs(
        lambda: look(large, n_steps // STEPS_A_SESSION), lambda: look(small, 1000 // STEPS_A_SESSION), runs=2 * runs
    )
    small.close(), large.close()
    yield Row(
        "lookup_scaling",
        f"{mean_text(mine, n, 'look-up')} of {n_steps} steps",
        f"{mean_text(theirs, n, 'look-up')} of 1000",
        1 / ratio,
        2,
        at_least=False,
    )


def _filled(folder: str, n_steps: int) -> Catalog:
    os.makedirs(folder)
    catalog = Catalog.open(os.path.join(folder, "catalog.sqlite"))
    items: list[LogItem] = []
    seq = offset = start = 0
    for session in range(n_steps // STEPS_A_SESSION):
        events = [
            SessionOpened(f"s{session}", float(session), fields=(TOKEN_IDS,)),
            *step_events(session, STREAM, session),
        ]
        for event in events:
            items.append(LogItem(seq, offset, event))
            seq, offset = seq + 1, offset + 300
        if len(items) >= BATCH or session == n_steps // STEPS_A_SESSION - 1:
            catalog.ingest(STREAM, 0, start=start, end=offset, items=items)
            items, start = [], offset
    return catalog


def step_events(session: int, stream: str, place: int) -> Iterator[StepCommitted]:
    """Yield the steps of session number ``session``, the one at ``place`` of its stream."""
    for index in range(STEPS_A_SESSION):
        n_tokens = 100 * (index + 1)
        extent = Extent(stream, place * 1000 + 100 * index, 100, 100 * index, 7)
        yield StepCommitted(
            f"s{session}", index, str(index), float(session), index - 1 if index else None, 100 * index, n_tokens - 50,
            n_tokens, n_tokens, {"token_ids": (extent,)}, finish_reason="stop",
        )  # fmt: skip
