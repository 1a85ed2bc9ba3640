"""``spool cat``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from spool.cli.common import arguments, find_refs, open_spool, parse_range, split_arguments, write_json

if TYPE_CHECKING:
    from spool.read.sample import Sample


@click.command("cat")
@arguments
@click.option("--field", "fields", multiple=True, help="A field; may be repeated. All where left out.")
@click.option("--tokens", help="Only these tokens, START:STOP.")
@click.option("--layers", help="Only these absolute layers, START:STOP.")
@click.option("--stored", is_flag=True, help="The stored, narrow dtype instead of the trainers'.")
@click.option("--format", "form", type=click.Choice(["json", "npz", "raw"]), default="json", show_default=True,
              help="npz: a NumPy archive; raw: one field's bytes, C order, little-endian.")  # fmt: skip
@click.option("--missing", type=int, help="The number that stands for rows that were never sent.")
@click.option("-o", "--output", type=click.File("wb"), help="Write there instead of to stdout.")
def command(
    args: tuple[str, ...],
    fields: tuple[str, ...],
    tokens: str | None,
    layers: str | None,
    stored: bool,
    form: str,
    missing: int | None,
    output: BinaryIO | None,
) -> None:
    """Print the arrays of sessions, steps or segments."""
    location, texts = split_arguments(args)
    if not texts:
        raise click.UsageError("name what to read: a session, SESSION:STEP or SESSION@VIEW/INDEX")
    wanted = parse_range(tokens, "--tokens")
    with open_spool(location) as sp:
        refs = find_refs(sp, texts)
        samples = sp.read(
            refs,
            fields=list(fields) or None,
            tokens=None if wanted is None else [wanted] * len(refs),
            layers=parse_range(layers, "--layers"),
            dtype="stored" if stored else "train",
            missing="error" if missing is None else missing,
        )
    if form == "json":
        write_json(
            [{"id": _id(sample), **{name: _plain(value) for name, value in sample.items()}} for sample in samples]
        )
        return
    target = output or sys.stdout.buffer
    if target.isatty():
        raise click.UsageError(f"--format {form} is binary: give -o FILE or redirect stdout")
    if form == "npz":
        _write_npz(samples, target)
    else:
        _write_raw(samples, target)


def _id(sample: Sample) -> str:
    return str(getattr(sample.ref, "id", sample.ref.session_id))


def _plain(value: Any) -> Any:
    from spool.formats.arrays import Ragged

    if isinstance(value, Ragged):
        return [
            value.values[low:high].tolist() for low, high in zip(value.offsets[:-1], value.offsets[1:], strict=True)
        ]
    return value.astype("float32").tolist() if value.dtype.kind == "V" else value.tolist()


def _write_npz(samples: list[Sample], target: BinaryIO) -> None:
    import numpy as np

    from spool.formats.arrays import Ragged

    parts: dict[str, Any] = {}
    for sample in samples:
        prefix = "" if len(samples) == 1 else f"{_id(sample)}/"
        for name, value in sample.items():
            if isinstance(value, Ragged):
                parts[f"{prefix}{name}.values"], parts[f"{prefix}{name}.offsets"] = value
            else:
                parts[f"{prefix}{name}"] = value
    np.savez(target, **parts)


def _write_raw(samples: list[Sample], target: BinaryIO) -> None:
    if len(samples) != 1 or len(samples[0]) != 1:
        raise click.UsageError("--format raw takes one reference and one --field")
    (value,) = samples[0].values()
    target.writelines(array.tobytes() for array in (value if isinstance(value, tuple) else (value,)))
