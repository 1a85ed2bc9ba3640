"""Taking a pack's files out of the hot root: because it is safe in the cold one, or because nobody needs it."""

from __future__ import annotations

import os

from spool.catalog import Catalog
from spool.logs.packs import GoneMark, marker_path, write_gone
from spool.logs.streams import records_path
from spool.points import reach
from spool.write.folder import open_folder, unlink_quietly
from spool.write.seal import remove_shard


def evict(root: str, catalog: Catalog, stream: str, pack: int) -> None:
    """Remove the hot copy of a spilled pack. May break off anywhere and be done again.

    Readers that find a file missing look in the cold root; those that have it open read on.

    Raises:
        SpoolError: the stream's folder or the catalog cannot be used.
    """
    assert os.path.exists(marker_path(root, stream, pack, "cold")), f"pack {pack} of {stream} is not in the cold root"
    n_bytes = _remove_files(root, stream, pack)
    reach("evict.removed")
    catalog.packs.mark(stream, pack, "evicted")
    catalog.settle(stream, n_bytes)


def delete(root: str, catalog: Catalog, stream: str, pack: int, gone: GoneMark) -> None:
    """Delete a pack from the hot root for good. May break off anywhere; once it is marked it is always completed.

    Raises:
        SpoolError: the stream's folder or the catalog cannot be used.
    """
    if not os.path.exists(marker_path(root, stream, pack, "gone")):
        write_gone(root, stream, pack, gone)
    reach("delete.marked")
    n_bytes = _remove_files(root, stream, pack)
    unlink_quietly(marker_path(root, stream, pack, "cold"))
    reach("delete.removed")
    catalog.forget(stream, pack, at=gone.at, reason=gone.reason)
    catalog.settle(stream, n_bytes)


def _remove_files(root: str, stream: str, pack: int) -> int:
    """Remove shards, then records; return the bytes that were freed on disk."""
    folder, _ = open_folder(root, stream)
    paths = [folder.shard_path(spec, pack) for spec in folder.schema.arrays]
    records = records_path(root, stream, pack)
    n_bytes = sum(map(disk_bytes, [*paths, records]))
    for spec in folder.schema.arrays:
        remove_shard(folder, spec, pack)
        reach("evict.shard")
    unlink_quietly(records)
    return n_bytes


def disk_bytes(path: str) -> int:
    """Return what a file takes on disk; 0 where there is none."""
    try:
        return os.stat(path).st_blocks * 512
    except FileNotFoundError:
        return 0
