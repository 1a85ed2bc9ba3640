"""Text that is safe to print, and numbers and times as people read them."""

from __future__ import annotations

import re
import time
import unicodedata

_PICTURE = "\u2600-\u27bf\U0001f000-\U0001faff"
# a joiner inside of an emoji is part of it, anywhere else it hides
_SUSPECT = re.compile(f"(?!(?<=[{_PICTURE}\ufe0f])\u200d[{_PICTURE}])[^\\x20-\\x7e]")
_UNITS = "KMGTPE"
_UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""Letters, marks and symbols of which nothing is drawn."""

_NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def one_line(text: str) -> str:
    """Return ``text`` as one line for a terminal or a tab-separated file.

    Control characters, escape sequences, bidirectional and other invisible marks, and lone surrogates are shown as
    escapes.
    """
    return _SUSPECT.sub(_shown, text)


def each_shown(text: str) -> list[str]:
    """Return what `one_line` shows of each character; that depends on those beside it."""
    shown = list(text)
    for match in _SUSPECT.finditer(text):
        shown[match.start()] = _shown(match)
    return shown


def safe_text(text: str) -> str:
    """Return ``text`` for a terminal with its lines and tabs kept; else as `one_line`."""
    return _SUSPECT.sub(lambda match: match[0] if match[0] in "\n\t" else _shown(match), text)


def json_text(text: str) -> str:
    """Return JSON text in which no character has an effect on a terminal; it says the same."""
    return _SUSPECT.sub(_in_json, text)


def _is_plain(char: str) -> bool:
    return (char.isprintable() and char not in _UNSEEN) or unicodedata.category(char) == "Zs"


def _shown(match: re.Match[str]) -> str:
    char = match[0]
    return char if _is_plain(char) else _NAMED.get(char) or ascii(char)[1:-1]


def _in_json(match: re.Match[str]) -> str:
    char = match[0]
    # a line end is layout here: inside of JSON strings it is escaped already
    if char == "\n" or _is_plain(char):
        return char
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def count(value: int) -> str:
    """Return a number with its thousands apart."""
    return f"{value:,}"


def iso_time(seconds: float) -> str:
    """Return seconds since the epoch as UTC time; as they are where no calendar has them."""
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g}"


def ago(seconds: float) -> str:
    """Return an age in its largest unit: ``12s``, ``5m``, ``3h``, ``2d``."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length_s:
            return f"{int(seconds // length_s)}{unit}"
    return f"{max(int(seconds), 0)}s"


def short(value: int) -> str:
    """Return a number in at most five characters: ``9,999``, ``12.3K``, ``4.56M``."""
    if value < 10_000:
        return count(value)
    power = min((len(str(value)) - 1) // 3, len(_UNITS))
    number = value / 1000**power
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f}{_UNITS[power - 1]}"


def shortened(text: str, width: int) -> str:
    """Return one line that takes at most ``width`` cells of a terminal; dots end what was cut."""
    if len(text) <= width and text.isascii():
        return text
    cells = [_n_cells(char) for char in text[: width + 1]]
    if len(text) <= width and sum(cells) <= width:
        return text
    room, kept = width - 3, 0
    for n in cells:
        room -= n
        if room < 0:
            break
        kept += 1
    return text[:kept] + "..."


def _n_cells(char: str) -> int:
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
