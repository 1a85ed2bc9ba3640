"""The identity of a spool: ``spool.json`` in its root."""

from __future__ import annotations

import os
import secrets
import time

import msgspec
from msgspec import Struct

from spool.errors import IntegrityError, NotFoundError, StorageError
from spool.stores.local import check_hot_root, map_os_error, read_file, write_atomic

FORMAT = 1


class Identity(Struct, frozen=True):
    """Content of ``spool.json``.

    Attributes:
        format: version of the layout on disk.
        id: 16 hexadecimal digits; references carry it.
        created: seconds since the epoch.
    """

    format: int
    id: str
    created: float


def read_identity(root: str) -> Identity | None:
    """Return the identity of the spool at ``root``, or None where there is none.

    Raises:
        IntegrityError: ``spool.json`` is torn, or of a newer version.
    """
    path = os.path.join(root, "spool.json")
    try:
        data = read_file(path)
    except NotFoundError:
        return None
    try:
        identity = msgspec.json.decode(data, type=Identity)
    except msgspec.DecodeError as error:
        raise IntegrityError(
            f"{path} is torn ({error}); it holds format, id and created: the id stands in every reference",
            file=path,
        ) from error
    if identity.format > FORMAT:
        raise IntegrityError(
            f"{path} has format {identity.format}, this Spool reads up to {FORMAT}: upgrade", file=path
        )
    return identity


def make_identity(root: str) -> Identity:
    """Create the spool at ``root`` unless another process does first; return its identity.

    Raises:
        ConfigError: the file system cannot hold a hot root.
        StorageError: it cannot be written.
    """
    try:
        os.makedirs(os.path.join(root, "streams"), exist_ok=True)
    except OSError as error:
        raise map_os_error(error, what="make a spool at", path=root) from error
    check_hot_root(root)
    known = read_identity(root)
    if known is not None:
        return known
    made = Identity(FORMAT, secrets.token_hex(8), time.time())
    draft = os.path.join(root, f".spool-{made.id}.json")
    write_atomic(draft, msgspec.json.encode(made))
    try:
        os.link(draft, os.path.join(root, "spool.json"))
    except FileExistsError:
        pass
    except OSError as error:
        raise map_os_error(error, what="make a spool at", path=root) from error
    finally:
        os.unlink(draft)
    identity = read_identity(root)
    if identity is None:
        raise StorageError(f"{root}/spool.json vanished while it was made; is another process deleting the spool?")
    return identity
