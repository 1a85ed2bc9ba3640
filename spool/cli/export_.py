"""``spool export``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import click

from spool.cli.output import json_option, say, write_json
from spool.cli.places import find_refs, is_location, open_spool
from spool.cli.progress import Progress
from spool.config import default_location
from spool.errors import NotFoundError
from spool.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spool.export import Exported


@click.command("export")
@click.argument("args", nargs=-1, metavar="[LOCATION] [REF]...")
@click.option("-o", "--output", "path", required=True, help="The new folder; nothing may be there.")
@click.option("--format", "form", type=click.Choice(["parquet", "spool"]), default="parquet", show_default=True,
              help="parquet: a row for each segment; spool: whole sessions, in a spool of their own.")  # fmt: skip
@click.option("--where", help="Export the segments that a filter finds; see ls --where.")
@click.option("--all", "everything", is_flag=True, help="Export all segments.")
@click.option("--view", type=click.Choice(["lineage", "timeline"]), help="With --where or --all: of this view.")
@click.option("--dtype", type=click.Choice(["stored", "train"]), default="stored", show_default=True,
              help="Of arrays in Parquet: as narrow as stored, or as trainers take them.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only say what would be written.")
@json_option
def command(
    args: tuple[str, ...],
    path: str,
    form: Literal["parquet", "spool"],
    where: str | None,
    everything: bool,
    view: Literal["lineage", "timeline"] | None,
    dtype: Literal["stored", "train"],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write segments into a new folder, as Parquet or as a spool of its own.

    A session stands for its final segments. Data comes from whichever tier has it. Rows that were never sent are null
    in Parquet. A spool keeps ids, late facts, late arrays and every stored byte, and reads with no other root; nothing
    in it is released.

    Where nothing is found nothing is written, and the exit code is 3. An export that fails, or is killed, leaves
    nothing under the name of the folder.
    """
    location = args[0] if args and is_location(args[0]) else None
    texts = list(args if location is None else args[1:])
    if location is None and default_location() is None:
        raise click.UsageError("no LOCATION given, and SPOOL_URI is not set")
    if bool(texts) + (where is not None) + everything != 1:
        raise click.UsageError("say what to export in one way: references, or --where FILTER, or --all")
    with open_spool(location) as sp, Progress("exported") as progress:
        refs = find_refs(sp, texts) if texts else list(sp.segments(where, view))
        if not refs:
            raise NotFoundError(f"{_asked(texts, where)} in {sp.config.url} to export; nothing was written")
        made = sp.export(refs, path, form, dtype=dtype, dry_run=dry_run, progress=progress.update)
    _print(made, as_json=as_json)


def _asked(texts: Sequence[str], where: str | None) -> str:
    if texts:
        return f"{', '.join(map(repr, texts))}: there are no segments"
    return "there are no segments" if where is None else f"there are no segments with {where}"


def _print(made: Exported, *, as_json: bool) -> None:
    import msgspec

    if as_json:
        write_json(msgspec.to_builtins(made))
        return
    what = f"{made.n_segments} segments of {made.n_sessions} sessions, {format_size(made.n_bytes)} of arrays"
    if made.file_bytes is None:
        say(f"{what} would be written to {made.path}")
    else:
        say(f"{what} are in {made.path}, {format_size(made.file_bytes)}")
