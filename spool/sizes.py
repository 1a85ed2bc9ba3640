"""Byte sizes, durations and times as people write them: ``"64MiB"`` <-> 67108864, ``"7d"`` -> 604800.0."""

from __future__ import annotations

import re
import time

from spool.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40, "PIB": 1 << 50,
          "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int) -> int:
    """Return the number of bytes that ``text`` names.

    Args:
        text: bytes, or a number with a unit (``KiB`` ... ``PiB`` binary, ``KB`` ... ``PB`` decimal).

    Raises:
        ConfigError: ``text`` is not a size.
    """
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{text!r} is not a size; write for example 64MiB, 1.5GiB or 1000000", value=text)
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


_DURATIONS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhdw]?)\s*")


def parse_duration(text: str) -> float:
    """Return the seconds that ``text`` names: a number with ``s``, ``m``, ``h``, ``d``, ``w`` or nothing (seconds).

    Raises:
        ConfigError: ``text`` is not a duration.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a duration; write for example 90s, 12h or 7d", value=text)
    return float(match[1]) * _DURATIONS[match[2]]


def format_size(n_bytes: int) -> str:
    """Return ``n_bytes`` for people: three significant digits and a binary unit."""
    value, units = float(n_bytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return (
        f"{n_bytes} B" if units[0] == "B" else f"{value:.3g} {units[0]}" if value < 1000 else f"{value:.0f} {units[0]}"
    )


def format_time(at: float) -> str:
    """Return a time, in seconds since the epoch, as ``2026-01-31 12:00:00 UTC``."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
