"""Files and folders -> records -> runs. Reads one file at a time, JSONL one line at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import BinaryIO

from spool.engines.members import Json
from spool.errors import InputError, NotFoundError, SpoolError, StorageError
from spool.importers.base import Failure, Ignored, ImportedRun, Origin
from spool.importers.detect import FORMS, ROUTING, UnknownFormError, form_of, parse
from spool.importers.routing import parse_routing

SUFFIXES = (".json", ".jsonl", ".npz", ".traj")
"""Names that a folder is searched for; content decides what they are."""

_ZIP_MAGIC = b"PK\x03\x04"


def read_runs(path: str | os.PathLike[str], *, form: str | None = None) -> Iterator[ImportedRun | Failure | Ignored]:
    """Parse every run under ``path``, in the order of the names.

    Args:
        path: a file, or a folder that is searched with all its folders.
        form: one of `FORMS`, where content shall not decide.

    Yields:
        Runs; failures: one bad run of many, or a file of a folder that is damaged or cannot be read; and the files of a
        folder that hold something else than runs, whatever it is.

    Raises:
        NotFoundError: there is no such file.
        InputError: the file, if it is one, is of no known form, or cannot be parsed; or there is no such form.
        StorageError: the file, if it is one, cannot be read.
    """
    if form is not None and form not in FORMS:
        raise InputError(f"no form is called {form!r}; known forms: {', '.join(FORMS)}", got=form)
    full = os.path.realpath(path)
    if not os.path.exists(full):
        raise NotFoundError(f"there is no file or folder {os.fspath(path)!r} to import", path=os.fspath(path))
    if os.path.isdir(full):
        yield from _read_folder(full, form)
    else:
        yield from _read_file(full, Origin(_name(full, os.path.dirname(full)), full), form)


def _read_folder(root: str, form: str | None) -> Iterator[ImportedRun | Failure | Ignored]:
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in folders:
            path = os.path.join(folder, name)
            if os.path.islink(path):
                yield Ignored(_name(path, root), "a link to a folder, which is not followed; import its target itself")
        for name in sorted(names):
            path = os.path.join(folder, name)
            where = _name(path, root)
            if not name.lower().endswith(SUFFIXES):
                yield Ignored(where, f"not one of {', '.join(SUFFIXES)}")
                continue
            if not os.path.isfile(path):  # a pipe would be waited for, a device read without end
                yield Ignored(where, "not a file")
                continue
            try:
                yield from _read_file(path, Origin(where, path), form)
            except UnknownFormError as error:
                yield Ignored(where, str(error)) if error.plain else Failure(where, error)
            except SpoolError as error:
                yield Failure(where, error)


def _name(path: str, root: str) -> str:
    """Return a file's name below ``root``, that folder's name first; bytes that are no UTF-8 become escapes."""
    name = os.path.join(os.path.basename(root), os.path.relpath(path, root)).replace(os.sep, "/")
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _read_file(path: str, origin: Origin, form: str | None) -> Iterator[ImportedRun | Failure]:
    try:
        with open(path, "rb") as file:
            head = file.read(len(_ZIP_MAGIC))
            if head == _ZIP_MAGIC:
                if form not in (None, ROUTING):
                    raise InputError(f"{origin.session_id} is a zip file; form {form} is JSON", where=origin.session_id)
                yield parse_routing(path, origin)
                return
            file.seek(0)
            if form == ROUTING:
                raise InputError(f"{origin.session_id} is no .npz file", where=origin.session_id, form=form)
            lines = _lines(file, path)
            if lines is None:
                file.seek(0)
                yield from _from_document(_document(file.read(), origin), origin, form)
            else:
                yield from _from_lines(lines, origin, form)
    except OSError as error:
        if isinstance(error, SpoolError):
            raise
        raise StorageError(f"cannot read {path}: {error.strerror}", path=path) from error


def _text(data: bytes) -> str:
    """Return bytes as text; a lone surrogate that was written as if it were a character stays one."""
    return data.decode("utf-8-sig", "surrogatepass")


def _lines(file: BinaryIO, path: str) -> Iterator[tuple[int, bytes]] | None:
    """Return the numbered lines of JSONL, or None where the whole file is one document."""
    numbered = ((number, line) for number, line in enumerate(file, 1) if line.strip())
    first = next(numbered, None)
    by_name = path.lower().endswith(".jsonl")
    if first is None:
        return iter(()) if by_name else None
    second = next(numbered, None)
    if not by_name:
        try:
            json.loads(_text(first[1]))
        except (ValueError, RecursionError):
            return None
        if second is None:
            return None

    def every() -> Iterator[tuple[int, bytes]]:
        yield first
        if second is not None:
            yield second
        yield from numbered

    return every()


def _document(data: bytes, origin: Origin) -> Json:
    try:
        return json.loads(_text(data))
    except (ValueError, RecursionError) as error:
        raise UnknownFormError(
            f"{origin.session_id} is neither an .npz file nor JSON ({error})", where=origin.session_id
        ) from error


def _from_document(document: Json, origin: Origin, form: str | None) -> Iterator[ImportedRun | Failure]:
    if form_of(document) is not None or (form is not None and not isinstance(document, list)):
        yield parse(document, origin, form)
        return
    if not isinstance(document, list):
        keys = f"an object with {', '.join(list(document)[:5])}" if isinstance(document, dict) else "a scalar"
        raise UnknownFormError(f"{origin.session_id} is not a run, but {keys}", plain=True, where=origin.session_id)
    if form is None and not any(form_of(item) for item in document):
        kind = type(document[0]).__name__ if document else "nothing"
        raise UnknownFormError(
            f"{origin.session_id} is a list of {kind}, none of them a run", plain=True, where=origin.session_id
        )
    for item, record in enumerate(document):
        yield _one(record, _item(origin, item), form)


def _from_lines(
    lines: Iterator[tuple[int, bytes]], origin: Origin, form: str | None
) -> Iterator[ImportedRun | Failure]:
    strange: list[Failure] = []
    known = False
    for found in _each_line(lines, origin, form):
        if not known and isinstance(found, Failure) and isinstance(found.error, UnknownFormError):
            strange.append(found)
            continue
        if not known:
            known = True
            yield from strange
        yield found
    if strange and not known:
        raise UnknownFormError(
            f"{origin.session_id} is {len(strange)} lines of JSON, none of them a run",
            plain=True, where=origin.session_id,
        )  # fmt: skip


def _each_line(lines: Iterator[tuple[int, bytes]], origin: Origin, form: str | None) -> Iterator[ImportedRun | Failure]:
    for item, (number, line) in enumerate(lines):
        one = _item(origin, item)
        try:
            record = json.loads(_text(line))
        except (ValueError, RecursionError) as error:
            yield Failure(
                one.session_id, InputError(f"line {number} of {origin.session_id} is not JSON: {error}", line=number)
            )
            continue
        yield _one(record, one, form)


def _item(origin: Origin, item: int) -> Origin:
    return Origin(f"{origin.session_id}#{item}", origin.path, item)


def _one(record: Json, origin: Origin, form: str | None) -> ImportedRun | Failure:
    try:
        return parse(record, origin, form)
    except InputError as error:
        return Failure(origin.session_id, error)
