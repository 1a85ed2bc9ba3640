"""What can be seen of a stream from outside: its files, its size, whether its writer lives."""

from __future__ import annotations

import fcntl
import os


def stream_names(root: str) -> list[str]:
    """Return the names of a root's streams, sorted; half-made ones (``.new-...``) are none."""
    try:
        with os.scandir(f"{root}/streams") as entries:
            return sorted(entry.name for entry in entries if entry.name[0] != "." and entry.is_dir())
    except FileNotFoundError:
        return []


def log_path(root: str, stream: str, pack: int) -> str:
    """Return where the commit log of a pack lies until it is sealed."""
    return f"{root}/streams/{stream}/records/{pack}.log"


def records_path(root: str, stream: str, pack: int) -> str:
    """Return where the records of a sealed pack lie."""
    return f"{root}/streams/{stream}/records/{pack}.arrow"


def is_live(root: str, stream: str) -> bool:
    """Whether a process holds the stream's lock, this one included."""
    try:
        fd = os.open(f"{root}/streams/{stream}/lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def measure(root: str, stream: str) -> int:
    """Return the bytes that a stream's files take on disk."""
    total = 0
    for folder, _, files in os.walk(f"{root}/streams/{stream}"):
        for name in files:
            try:
                total += os.lstat(f"{folder}/{name}").st_blocks * 512
            except FileNotFoundError:
                continue
    return total
