"""Where a spool is and how it behaves: the URI, its options, and the only reader of the environment."""

from __future__ import annotations

import os
import re
from typing import Literal, get_args, get_type_hints
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
from msgspec import Struct

from spool.errors import ConfigError
from spool.sizes import format_size, parse_size

Durability = Literal["process", "disk"]

LEAST_HOT_BYTES = 32 << 20
"""Room is granted to streams in pieces of 16 MiB; less than two cannot hold one stream."""


class Config(Struct, frozen=True, kw_only=True):
    """A parsed spool URI.

    Attributes:
        root: absolute path of the hot root.
        hot_bytes: limit of the hot tier over all processes; None for the disk's own.
        fields: names of the fields that are stored; None for all that are sent.
        durability: ``process`` survives a killed process, ``disk`` a lost machine (fdatasync of every append).
        direct: use O_DIRECT where the file system allows it.
        append_timeout_s: how long an append waits for room.
        session_idle_s: an open session without an append for so long ends as ``timeout``; None for never.
        pack_age_s: a pack rolls at the first append after this age; None for by size only.
        page_cache_bytes: page cache that buffered reads may leave behind.
        reuse_bytes: memory of large results that are gone, kept for the next read.
        max_open_files: files a reader keeps open.
        threads: threads of the async twins and of large reads; None for a default by CPU count.
    """

    root: str
    hot_bytes: int | None = None
    fields: tuple[str, ...] | None = None
    durability: Durability = "process"
    direct: bool = True
    append_timeout_s: float = 60.0
    session_idle_s: float | None = None
    pack_age_s: float | None = None
    page_cache_bytes: int = 64 << 20
    reuse_bytes: int = 512 << 20
    max_open_files: int = 256
    threads: int | None = None

    @property
    def url(self) -> str:
        """The root as a URL, a hint in references."""
        return f"file://{self.root}"


OPTIONS: tuple[str, ...] = tuple(name for name in Config.__struct_fields__ if name != "root")
"""Names of the options a URI may carry."""


def default_location() -> str | None:
    """Return ``$SPOOL_URI``, or None."""
    return os.environ.get("SPOOL_URI") or None


def search_roots() -> tuple[str, ...]:
    """Return the local roots named in ``$SPOOL_ROOTS`` (separated by ``:``)."""
    return tuple(part for part in os.environ.get("SPOOL_ROOTS", "").split(os.pathsep) if part)


def parse_uri(uri: str | os.PathLike[str] | None) -> Config:
    """Parse ``file:///path?option=value&...`` or a plain path.

    Args:
        uri: the location; None for ``$SPOOL_URI``. A path whose first part has a colon begins with ``./``.

    Raises:
        ConfigError: no location, an unknown scheme or option, a value that does not parse.
    """
    text = default_location() if uri is None else uri
    if text is None:
        raise ConfigError("no spool given: pass a URI such as file:///nvme/spool, or set SPOOL_URI")
    if isinstance(text, os.PathLike):
        text = os.fspath(text)
    if not isinstance(text, str):
        raise ConfigError(f"a spool is named by a URI or a path, got {type(text).__name__} {text!r:.80}")
    path, query = _split(text)
    _check_path(path)
    options = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in OPTIONS:
            hint = "; this version has no cold tier" if name == "spill" else ""
            raise ConfigError(f"unknown option {name!r} of {path!r}; known: {', '.join(OPTIONS)}{hint}", option=name)
        if name in options:
            raise ConfigError(f"option {name!r} of {path!r} stands twice", option=name)
        options[name] = _option(name, value)
    config = Config(root=os.path.abspath(path), **options)  # type: ignore[arg-type]
    if config.hot_bytes is not None and config.hot_bytes < LEAST_HOT_BYTES:
        raise ConfigError(
            f"hot_bytes={config.hot_bytes} is less than a stream takes at once ({format_size(LEAST_HOT_BYTES)})",
            option="hot_bytes",
        )
    return config


def _split(text: str) -> tuple[str, str]:
    """Return path and query. Errors quote no more than a scheme or a host: what stands around them may be a secret."""
    scheme = _SCHEME.match(text)
    if scheme is None:
        path, _, query = text.partition("?")
        return os.path.expanduser(path), query
    if scheme[2] is None:
        raise ConfigError(
            f"{scheme[1]}: begins neither a URI nor a path; write file:///path for a directory, and ./{scheme[1]}:... "
            "for one whose name has a colon"
        )
    if _CONTROL.search(text):
        raise ConfigError("a spool URI holds no newlines and other control characters")
    try:
        parts = urlsplit(text)
    except ValueError:
        raise ConfigError("this is no URI: its host cannot be read; write file:///path") from None
    if parts.scheme != "file":
        raise ConfigError(f"a hot root is a local directory (file:///path), not {parts.scheme}://")
    if parts.username or parts.password:
        raise ConfigError("a spool URI carries no credentials")
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(f"the URI names the host {parts.netloc!r}; write file:///path with three slashes")
    if parts.fragment:
        raise ConfigError("a spool URI has no fragment; write %23 for a # in the path")
    try:
        return unquote(parts.path, errors="strict"), parts.query
    except UnicodeDecodeError as error:
        raise ConfigError(f"the escapes in {parts.path!r} are not UTF-8 ({error})") from error


def _check_path(path: str) -> None:
    """Refuse a path that references could not carry, or that nobody means."""
    if not path:
        raise ConfigError("the location is empty; pass a URI such as file:///nvme/spool, or None for SPOOL_URI")
    if _CONTROL.search(path):
        raise ConfigError(f"{path!r} holds a newline or another control character; was it read from a file?")
    if any("\ud800" <= char <= "\udfff" for char in path):
        raise ConfigError(f"{path!r} is not UTF-8, and references carry the root as text; rename the directory")


_TYPES = get_type_hints(Config)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def _option(name: str, value: str) -> object:
    try:
        if name.endswith("_bytes"):
            size = parse_size(value)
            if not 0 < size < 1 << 63:
                raise ConfigError(f"{size} is not in (0, 2**63)")
            return size
        if name == "fields":
            return tuple(part for part in value.split(",") if part)
        if name == "direct":
            return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
        number = msgspec.convert(value, _TYPES[name], strict=False)
    except (msgspec.ValidationError, KeyError, ValueError, OverflowError) as error:
        hint: object = "true or false" if name == "direct" else error
        if name == "durability":
            hint = f"one of {', '.join(get_args(Durability))}"
        raise ConfigError(f"option {name}={value!r:.80} is not valid ({hint})", option=name) from error
    if isinstance(number, int | float) and not number > 0:
        raise ConfigError(f"option {name}={value!r} must be positive", option=name)
    return number
