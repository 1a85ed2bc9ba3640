"""How many rows a sealed pack really has: its shards are padded, and zeros look like rows.

References may name more than there are: a copy of the root, a backup put back, or a power cut left the pack with fewer.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from spool.errors import IntegrityError, NotFoundError, SpoolError
from spool.formats.shard import array_key, parse_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from spool.read.fetch import Batch
    from spool.read.plan import Piece
    from spool.read.streams import Source
    from spool.stores.hot import HotStore

MOST_KEPT = 100_000
"""Shards whose rows are remembered."""


class ValidRows:
    """What the arrays' ``zarr.json`` in a hot root say; each file is read again where it changed. Thread-safe.

    Args:
        store: the hot root's bytes.
    """

    def __init__(self, store: HotStore) -> None:
        self._store = store
        self._sealed: dict[str, int] = {}
        self._files: dict[str, tuple[object, dict[int, int]]] = {}

    def split(self, pieces: Sequence[Piece], sources: Mapping[str, Source]) -> tuple[Sequence[Piece], list[Piece]]:
        """Return the pieces whose rows are there, those of open packs among them, and the others."""
        ends: dict[str, int] = {}
        for piece in pieces:
            end = piece[1] + piece[2]
            if end > ends.get(piece[0], -1):
                ends[piece[0]] = end
        short = {key for key, end in ends.items() if not self.has(sources[key], key, end)}
        if not short:
            return pieces, []
        lacks = [piece.key in short and not self._fits(sources[piece.key], piece) for piece in pieces]
        parts: tuple[list[Piece], list[Piece]] = [], []
        for piece, lacking in zip(pieces, lacks, strict=True):
            parts[lacking].append(piece)
        return parts

    def _fits(self, source: Source, piece: Piece) -> bool:
        return self.has(source, piece.key, piece.offset + piece.length)

    def has(self, source: Source, key: str, end: int) -> bool:
        """Whether the first ``end`` bytes of a shard's rows are there, or its pack is open."""
        rows = self._sealed.get(key)
        if rows is None:
            rows = self._look(source, key)
        return rows is None or end <= rows * source.row_bytes

    def _look(self, source: Source, key: str) -> int | None:
        path = self._store.path(array_key(source.stream, source.name))
        try:
            found = os.stat(path)
            mark, known = (found.st_ino, found.st_mtime_ns, found.st_size), self._files.get(path)
            if known is None or known[0] != mark:
                rows = dict(parse_rows(self._store.read(array_key(source.stream, source.name)), path)[1])
                known = self._files[path] = (mark, rows)
        except (OSError, SpoolError):
            return None  # whatever is wrong with it, the shard may be sound
        sealed = known[1].get(source.pack_of(key) * source.shard_rows)
        if sealed is not None:
            if len(self._sealed) >= MOST_KEPT:
                self._sealed.clear()
            self._sealed[key] = sealed
        return sealed


class ListedRows:
    """What the arrays' ``zarr.json`` in a cold root say: each costs a request, so they are asked only where they must.

    Thread-safe.

    Args:
        get: returns a document as it is now, or raises `NotFoundError`.
    """

    def __init__(self, get: Callable[[str], bytes]) -> None:
        self._get = get
        self._arrays: dict[str, dict[int, int]] = {}

    def past(self, pieces: Iterable[Piece], batch: Batch) -> list[Piece]:
        """Return those of the pieces, which were brought, that are padding at their end.

        Padding is zeros: a piece whose last row is none is sound, and so is what was checked.
        """
        return [
            piece
            for piece in pieces
            if piece.length and piece.target >= 0 and piece.check < 0
            if not _ends_in_data(piece, batch)
            if not self.has(batch.sources[piece.key], piece.key, piece.offset + piece.length)
        ]

    def has(self, source: Source, key: str, end: int) -> bool:
        """Whether the first ``end`` bytes of a shard's rows are there, or no document lists its pack."""
        document, start = array_key(source.stream, source.name), source.pack_of(key) * source.shard_rows
        rows = self._arrays.get(document, {}).get(start)
        if rows is None:
            rows = self._look(document).get(start)
        return rows is None or end <= rows * source.row_bytes

    def _look(self, document: str) -> dict[int, int]:
        try:
            rows = self._arrays[document] = dict(parse_rows(self._get(document), document)[1])
        except (NotFoundError, IntegrityError):
            return {}  # whatever is wrong with it, the shard may be sound
        return rows


def _ends_in_data(piece: Piece, batch: Batch) -> bool:
    """Whether the last row that a piece was put to is other than zeros."""
    end = piece.row + piece.length // piece.row_bytes
    return bool(batch.targets[piece.target].array[end - 1 : end].any())
