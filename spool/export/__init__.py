"""Taking chosen data out of a spool: as Parquet files that pyarrow alone reads, or as a spool of its own.

``place`` gives an export its name only once it is whole, ``parquet`` writes a row for each segment, ``copy`` moves
whole sessions into a new hot root. Both read through whichever tiers the source has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from spool.errors import InputError
from spool.export.copy import check_there, copy_sessions
from spool.export.parquet import array_bytes, plan_table, write_table
from spool.export.place import staged
from spool.export.source import DtypeChoice, Source
from spool.model.refs import SegmentRef, StepRef

Format = Literal["parquet", "spool"]
Progress = Callable[[int, int], object]

__all__ = ["Exported", "Format", "Source", "export"]


class Exported(Struct, frozen=True, kw_only=True):
    """What an export wrote, or would.

    Attributes:
        path: the folder.
        format: ``parquet`` or ``spool``.
        n_sessions, n_segments: what is in it.
        n_bytes: of the arrays of the segments, before compression.
        file_bytes: what its files take; None where nothing was written.
    """

    path: str
    format: Format
    n_sessions: int
    n_segments: int
    n_bytes: int
    file_bytes: int | None = None


def export(
    source: Source,
    refs: Sequence[SegmentRef | StepRef],
    path: str,
    *,
    form: Format,
    dtype: DtypeChoice,
    check: Callable[[str], None],
    progress: Progress | None,
    dry_run: bool,
) -> Exported:
    """Write references into a new folder; see `Spool.export`.

    Args:
        source: reads the spool.
        refs: of it.
        path: the folder to be.
        form: ``parquet``, or ``spool`` for the whole sessions of ``refs``.
        dtype: of the arrays in Parquet.
        check: called with the root of a new spool before it gets its name.
        progress: called with bytes done and bytes in all.
        dry_run: write nothing.

    Raises:
        InputError: there is something at ``path``, or segments do not fit into one table.
        ReleasedError, NotFoundError: a session is to be copied that is not there any more, or never was.
    """
    path = os.path.abspath(path)
    foreign = next((ref for ref in refs if ref.spool_id != source.spool_id), None)
    if foreign is not None:
        raise InputError(f"{foreign.id} is of spool {foreign.spool_id}, this is {source.spool_id}: export it there")
    table = plan_table(source, refs, dtype) if form == "parquet" else None
    sizes = [array_bytes(source, ref) for ref in refs] if table is None else table.sizes
    weights = dict.fromkeys((ref.session_id for ref in refs), 0)
    for ref, n_bytes in zip(refs, sizes, strict=True):
        weights[ref.session_id] += n_bytes
    made = Exported(path=path, format=form, n_sessions=len(weights), n_segments=len(refs), n_bytes=sum(sizes))
    if form == "spool":
        check_there(source, weights)
    if dry_run:
        return made
    with staged(path) as draft:
        if table is not None:
            write_table(source, table, draft, progress)
        else:
            copy_sessions(source, weights, draft, f"file://{path}", progress)
            check(draft)
    written = (os.path.getsize(f"{at}/{name}") for at, _, names in os.walk(path) for name in names)
    return replace(made, file_bytes=sum(written))
