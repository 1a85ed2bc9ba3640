"""What can be seen of a stream from outside: its files, its size, whether its writer lives."""

from __future__ import annotations

import os

from spool import locks
from spool.stores.local import map_os_error


def stream_names(root: str) -> list[str]:
    """Return the names of a root's streams, sorted; half-made ones (``.new-...``) are none.

    Raises:
        StorageError: they cannot be listed.
    """
    try:
        with os.scandir(f"{root}/streams") as entries:
            return sorted(entry.name for entry in entries if entry.name[0] != "." and entry.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise map_os_error(error, what="list", path=f"{root}/streams") from error


def log_path(root: str, stream: str, pack: int) -> str:
    """Return where the commit log of a pack lies until it is sealed."""
    return f"{root}/streams/{stream}/records/{pack}.log"


def records_path(root: str, stream: str, pack: int) -> str:
    """Return where the records of a sealed pack lie."""
    return f"{root}/streams/{stream}/records/{pack}.arrow"


def is_live(root: str, stream: str) -> bool:
    """Whether a process holds the stream's lock, this one included.

    Raises:
        StorageError: the lock file cannot be looked at.
    """
    path = f"{root}/streams/{stream}/lock"
    try:
        return locks.is_taken(path)
    except OSError as error:
        raise map_os_error(error, what="open", path=path) from error


def measure(root: str, stream: str) -> int:
    """Return the bytes that a stream's files take on disk."""
    walked = os.walk(f"{root}/streams/{stream}")
    return sum(disk_bytes(f"{folder}/{name}") for folder, _, files in walked for name in files)


def disk_bytes(path: str) -> int:
    """Return what a file takes on disk; 0 where there is none."""
    try:
        return os.lstat(path).st_blocks * 512
    except FileNotFoundError:
        return 0
