"""What a root's streams say of themselves."""

from __future__ import annotations

from typing import NamedTuple

from spool.errors import IntegrityError, SpoolError
from spool.formats import shard
from spool.logs.streams import stream_names
from spool.model.fields import ArraySpec, FieldSpec, Layout, Schema
from spool.stores.hot import HotStore
from spool.write.folder import is_stream_name


class Stream(NamedTuple):
    """A stream's group.

    Attributes:
        name: of the stream.
        schema, layout: as its ``zarr.json`` says.
        arrays: spec by array name.
        fields: the field that an array belongs to, by array name.
    """

    name: str
    schema: Schema
    layout: Layout
    arrays: dict[str, ArraySpec]
    fields: dict[str, FieldSpec]

    def shard_key(self, array: ArraySpec, row: int) -> str:
        """Return the key of the shard that holds ``row``."""
        pack = row // self.layout.shard_rows[array.name]
        return f"streams/{self.name}/{shard.shard_key(array.name, 1 + len(array.shape), pack)}"


class Streams:
    """The streams of a root, each read once.

    Args:
        store: reads the root.
    """

    def __init__(self, store: HotStore) -> None:
        self.store = store
        self._known: dict[str, Stream | SpoolError] = {}

    def names(self) -> list[str]:
        """Return the names of the streams that are there; other folders are not Spool's."""
        return [name for name in stream_names(self.store.root) if is_stream_name(name)]

    def get(self, name: str) -> Stream | SpoolError:
        """Return a stream, or why it cannot be read."""
        if name not in self._known:
            try:
                self._known[name] = self._read(name)
            except SpoolError as error:
                self._known[name] = error
        return self._known[name]

    def _read(self, name: str) -> Stream:
        data = self.store.read(group_key(name))
        schema, layout = shard.parse_group(data, self.store.path(group_key(name)))
        if self._copy(name) not in (data, b""):
            raise IntegrityError(
                "zarr.json is not what its copy, the file lock, says: one of them was altered, and it is not known "
                "where the rows are; compare them and restore the wrong one",
                stream=name,
            )
        fields = {array.name: spec for spec in schema.fields for array in spec.arrays}
        return Stream(name, schema, layout, {array.name: array for array in schema.arrays}, fields)

    def _copy(self, name: str) -> bytes:
        try:
            return self.store.read(f"streams/{name}/lock")
        except SpoolError:
            return b""


def group_key(stream: str) -> str:
    """Return the key of a stream's metadata."""
    return f"streams/{stream}/zarr.json"
