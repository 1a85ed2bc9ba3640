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
    if os.path.exists(marker_path(root, stream, pack, "gone")):
        return  # somebody deletes it just now
    assert os.path.exists(marker_path(root, stream, pack, "cold")), f"pack {pack} of {stream} is not in the cold root"
    _remove_files(root, stream, pack)
    reach("evict.removed")
    catalog.packs.mark(stream, pack, "evicted")


def delete(root: str, catalog: Catalog, stream: str, pack: int, gone: GoneMark) -> None:
    """Delete a pack from the hot root for good. May break off anywhere; once it is marked it is always completed.

    Raises:
        SpoolError: the stream's folder or the catalog cannot be used.
    """
    if not os.path.exists(marker_path(root, stream, pack, "gone")):
        write_gone(root, stream, pack, gone)
    reach("delete.marked")
    _remove_files(root, stream, pack)
    unlink_quietly(marker_path(root, stream, pack, "cold"))
    reach("delete.removed")
    catalog.forget(stream, pack, at=gone.at, reason=gone.reason)


def _remove_files(root: str, stream: str, pack: int) -> None:
    """Remove shards, then records."""
    folder, _ = open_folder(root, stream)
    for spec in folder.schema.arrays:
        remove_shard(folder, spec, pack)
        reach("evict.shard")
    unlink_quietly(records_path(root, stream, pack))
