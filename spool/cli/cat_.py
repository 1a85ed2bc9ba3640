"""``spool cat``."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from spool.cli.exits import Exit
from spool.cli.output import say, to_json
from spool.cli.places import find_refs, open_spool, parse_range, reference_arguments, split_arguments
from spool.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from spool.handle import Spool
    from spool.model.refs import SegmentRef, StepRef
    from spool.read.sample import Sample


@click.command("cat")
@reference_arguments
@click.option("--field", "fields", multiple=True, help="A field; may be repeated. All where left out.")
@click.option("--tokens", help="Only these tokens, START:STOP; negative ones count from the end.")
@click.option("--layers", help="Only these absolute layers, START:STOP.")
@click.option("--stored", is_flag=True, help="The stored, narrow dtype instead of the trainers'.")
@click.option("--missing", type=int, help="The number that stands for rows that were never sent.")
@click.option("--format", "form", type=click.Choice(["json", "npz", "raw"]), default="json", show_default=True,
              help="npz: a NumPy archive; raw: one field's bytes, C order, little-endian.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option("-o", "--output", help="Write to this file instead of to stdout.")
def command(
    args: tuple[str, ...],
    fields: tuple[str, ...],
    tokens: str | None,
    layers: str | None,
    stored: bool,
    missing: int | None,
    form: str,
    as_json: bool,
    output: str | None,
) -> int:
    """Print the arrays of sessions, steps or segments.

    JSON is an array with the fields of each reference; NaN and infinities are text in it. In an archive of several
    references names begin with the number of theirs (0/token_ids), and "refs" lists them. bfloat16 is written as its
    bits, ragged fields as values and offsets.

    A field with rows that were never sent is left out, stderr says so, and the exit code is 1; where --field names it,
    nothing is printed. --missing says what stands for such rows.
    """
    location, texts = split_arguments(args, "print")
    chosen, chosen_layers = parse_range(tokens, "--tokens"), parse_range(layers, "--layers")
    if as_json and form != "json":
        raise click.UsageError(f"--json and --format {form} exclude each other")
    if form != "json" and output is None and sys.stdout.isatty():
        raise click.UsageError(f"--format {form} is binary: give -o FILE, or redirect stdout")
    left_out: list[str] = []
    with open_spool(location) as sp:
        refs = find_refs(sp, texts)
        if form == "raw" and (len(refs) != 1 or len(fields) != 1):
            raise click.UsageError(
                f"--format raw takes one reference and one --field, got {len(refs)} and {len(fields)}"
            )
        options: dict[str, Any] = {
            "layers": chosen_layers,
            "dtype": "stored" if stored else "train",
            "missing": "error" if missing is None else missing,
        }
        if fields:
            samples = sp.read(refs, fields=fields, tokens=None if chosen is None else [chosen] * len(refs), **options)
        else:
            samples = [_without_gaps(sp, ref, left_out, tokens=chosen, **options) for ref in refs]
    if output is None:
        _WRITE[form](samples, sys.stdout.buffer)
    else:
        try:
            with open(output, "wb") as target:
                _WRITE[form](samples, target)
        except OSError as error:
            raise StorageError(f"cannot write {output!r}: {error.strerror or error}") from error
    for gap in left_out:
        say(f"spool: left out: {gap}; --missing NUMBER prints it all the same")
    return Exit.FAILED if left_out else Exit.OK


def _without_gaps(sp: Spool, ref: StepRef | SegmentRef, left_out: list[str], **options: Any) -> Sample:
    """Read all fields of a reference but those with missing rows; add to ``left_out`` what is wrong with these."""
    from spool.errors import GapError
    from spool.read.lookup import names_of

    names = names_of(ref, None)
    while True:
        try:
            return sp.read(ref, fields=names, **options)
        except GapError as error:
            names.remove(str(error.details["field"]))
            left_out.append(str(error).partition("; leave it out")[0])


def _id(sample: Sample) -> str:
    return str(getattr(sample.ref, "id", sample.ref.session_id))


def _write_json(samples: Sequence[Sample], target: BinaryIO) -> None:
    target.write(b"[")
    for number, sample in enumerate(samples):
        fields = {name: _listed(value) for name, value in sample.items()}
        target.write((",\n " if number else "").encode() + to_json({"id": _id(sample), "fields": fields}).encode())
    target.write(b"]\n")


def _listed(value: Any) -> Any:
    from spool.formats.arrays import Ragged

    if isinstance(value, Ragged):
        return [_listed(value.values[low:high]) for low, high in pairwise(value.offsets)]
    return value.astype("float32").tolist() if value.dtype.kind == "V" else value.tolist()


def _write_npz(samples: Sequence[Sample], target: BinaryIO) -> None:
    import numpy as np

    parts: dict[str, Any] = {}
    for number, sample in enumerate(samples):
        prefix = "" if len(samples) == 1 else f"{number}/"
        for name, array in _arrays(sample):
            parts[prefix + name] = array
    if len(samples) != 1:
        parts["refs"] = np.array([_id(sample) for sample in samples], np.str_)
    np.savez(target, allow_pickle=False, **parts)


def _arrays(sample: Sample) -> Iterator[tuple[str, Any]]:
    from spool.formats.arrays import Ragged

    for name, value in sample.items():
        if isinstance(value, Ragged):
            yield f"{name}.values", _bits(value.values)
            yield f"{name}.offsets", value.offsets
        else:
            yield name, _bits(value)


def _bits(array: Any) -> Any:
    return array.view(f"u{array.itemsize}") if array.dtype.kind == "V" else array


def _write_raw(samples: Sequence[Sample], target: BinaryIO) -> None:
    ((name, array), *more) = _arrays(samples[0])
    if more:
        raise click.UsageError(f"{name.rpartition('.')[0]} is ragged: --format raw takes plain arrays, npz takes all")
    target.write(array.data.cast("B") if array.size else b"")


_WRITE = {"json": _write_json, "npz": _write_npz, "raw": _write_raw}
