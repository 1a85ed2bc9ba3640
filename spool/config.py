"""Where a spool is and how it behaves: the URI, its options, and the only reader of the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Literal, get_args, get_type_hints
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

import msgspec
from msgspec import Struct

from spool.errors import ConfigError
from spool.sizes import format_size, parse_duration, parse_size

Durability = Literal["process", "disk"]
SpillWhen = Literal["sealed", "pressure"]
VerifyUpload = Literal["size", "always"]

LEAST_HOT_BYTES = 32 << 20
"""Room is granted to streams in pieces of 16 MiB; less than two cannot hold one stream."""


class Retention(Struct, frozen=True):
    """Which sealed packs may be deleted.

    Attributes:
        released: those whose sessions are all over and released.
        age_s: those that were sealed longer ago; None for none.
    """

    released: bool = True
    age_s: float | None = None


class Config(Struct, frozen=True, kw_only=True):
    """A parsed spool URI.

    Attributes:
        root: absolute path of the hot root; None where the location is a cold root.
        spill: URL of the cold root; None where there is none.
        hot_bytes: limit of the hot tier over all processes; None for the disk's own.
        fields: names of the fields that are stored; None for all that are sent.
        durability: ``process`` survives a killed process, ``disk`` a lost machine (fdatasync of every append).
        direct: use O_DIRECT where the file system allows it.
        append_timeout_s: how long an append waits for room.
        session_idle_s: an open session without an append for so long ends as ``timeout``; None for never.
        pack_age_s: a pack rolls at the first append after this age; None for by size only.
        page_cache_bytes: page cache that buffered reads may leave behind; 0 for none.
        reuse_bytes: memory of large results that are gone, kept for the next read; 0 for none.
        max_open_files: files a reader keeps open.
        threads: threads of the async twins and of large reads; None for a default by CPU count.
        spill_when: packs go to the cold root once ``sealed``, or under ``pressure`` (and when published) only.
        verify_upload: an upload's ``size`` is read back, or (``always``) every byte.
        retention: which sealed packs may be deleted: ``keep`` none, ``released`` those that nobody needs any more,
            ``age=7d`` those older; ``released,age=7d`` either.
        units_age_s: a multimodal unit that no live session names may be deleted when it was last put or named so long
            ago; with ``retention=keep`` none is.
        publish_interval_s: publishing rolls a stream at most once in so long.
        grace_s: how long readers may finish before a deleted pack's objects leave the cold root.
        cold_concurrency: requests to the cold root at a time.
        cold_deadline_s: how long a request to the cold root is tried again.
    """

    root: str | None
    spill: str | None = None
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
    spill_when: SpillWhen = "sealed"
    verify_upload: VerifyUpload = "size"
    retention: Retention = Retention()
    units_age_s: float = 604_800.0
    publish_interval_s: float = 1.0
    grace_s: float = 60.0
    cold_concurrency: int = 16
    cold_deadline_s: float = 60.0

    @property
    def url(self) -> str:
        """The root that was opened, as a URL."""
        return f"file://{self.root}" if self.root is not None else str(self.spill)

    @property
    def uri(self) -> str:
        """The location with its options, as `parse_uri` takes it."""
        values = {name: getattr(self, name) for name in OPTIONS if not (name == "spill" and self.root is None)}
        options = {name: _text(value) for name, value in values.items() if value != _DEFAULTS[name]}
        place = str(self.spill) if self.root is None else f"file://{quote(self.root)}"
        return f"{place}?{urlencode(options)}" if options else place

    @property
    def urls(self) -> tuple[str, ...]:
        """Where the spool's bytes are, hot root first; hints in references."""
        hot = () if self.root is None else (f"file://{self.root}",)
        return hot if self.spill is None else (*hot, self.spill)


OPTIONS: tuple[str, ...] = tuple(name for name in Config.__struct_fields__ if name != "root")
"""Names of the options a URI may carry."""


_DEFAULTS = dict(zip(OPTIONS, Config.__struct_defaults__, strict=True))


def _text(value: object) -> str:
    """Return the value of an option as a URI carries it."""
    if isinstance(value, Retention):
        parts = [*(["released"] if value.released else []), *([] if value.age_s is None else [f"age={value.age_s!r}s"])]
        return ",".join(parts) or "keep"
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def default_location() -> str | None:
    """Return ``$SPOOL_URI``, or None."""
    return os.environ.get("SPOOL_URI") or None


def search_roots() -> tuple[str, ...]:
    """Return the local roots named in ``$SPOOL_ROOTS`` (separated by ``:``)."""
    return tuple(part for part in os.environ.get("SPOOL_ROOTS", "").split(os.pathsep) if part)


def kill_point() -> tuple[str, int] | None:
    """Return the named point at which this process is to die, and when: the first time it is reached, the second ...

    ``$SPOOL_KILL_AT`` names it, for tests of crashes: ``evict.shard``, or ``evict.shard:3`` for the third time.

    Raises:
        ConfigError: the number is none.
    """
    text = os.environ.get("SPOOL_KILL_AT")
    if not text:
        return None
    point, _, nth = text.partition(":")
    if nth and not (nth.isdecimal() and int(nth)):
        raise ConfigError(f"SPOOL_KILL_AT={text!r} is not valid: write a point and a number from 1 on: evict.shard:3")
    return point, int(nth or 1)


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
    place, _, query = text.partition("?")
    where = _where(place)
    options: dict[str, object] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in OPTIONS:
            raise ConfigError(f"unknown option {name!r} of a spool; known: {', '.join(OPTIONS)}", option=name)
        if name in options:
            raise ConfigError(f"option {name!r} stands twice", option=name)
        options[name] = _option(name, value)
    if where["root"] is None and "spill" in options:
        raise ConfigError("a cold root cannot spill; put the hot root in front: file:///nvme/spool?spill=s3://...")
    config = Config(**{**where, **options})  # type: ignore[arg-type]
    _check_apart(config)
    if config.hot_bytes is not None and config.hot_bytes < LEAST_HOT_BYTES:
        raise ConfigError(
            f"hot_bytes={config.hot_bytes} is less than a stream takes at once ({format_size(LEAST_HOT_BYTES)})",
            option="hot_bytes",
        )
    return config


def _where(place: str) -> dict[str, str | None]:
    """Return ``root`` or ``spill`` of a location. Errors quote a scheme or a host at most: the rest may be secret."""
    scheme = _SCHEME.match(place)
    if scheme is not None and scheme[2] is None:
        raise ConfigError(
            f"{scheme[1]}: begins neither a URI nor a path; write file:///path for a directory, and ./{scheme[1]}:... "
            "for one whose name has a colon"
        )
    if scheme is not None and scheme[1].lower() != "file":
        return {"root": None, "spill": cold_url(place)}
    return {"root": _local_path(place)}


def _parse_url(url: str) -> SplitResult:
    if _CONTROL.search(url):
        raise ConfigError("a spool URI holds no newlines and other control characters")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError("this is no URI: its host cannot be read; write file:///path") from None
    if "@" in unquote(parts.netloc):
        raise ConfigError(
            "a spool URI carries no credentials; put them where the object store's client looks for them "
            "(AWS_ACCESS_KEY_ID and the like, or ~/.aws/credentials)"
        )
    if parts.fragment:
        raise ConfigError("a spool URI has no fragment; write %23 for a # in the path")
    return parts


def _local_path(place: str) -> str:
    """Return the absolute path that ``file:///path`` or a plain path names."""
    if _SCHEME.match(place) is None:
        path = os.path.expanduser(place)
    else:
        parts = _parse_url(place)
        if parts.netloc not in ("", "localhost"):
            raise ConfigError(f"the URI names the host {parts.netloc!r}; write file:///path with three slashes")
        try:
            path = unquote(parts.path, errors="strict")
        except UnicodeDecodeError as error:
            raise ConfigError(f"the escapes in {parts.path!r} are not UTF-8 ({error})") from error
    _check_path(path)
    return os.path.abspath(path)


def cold_url(text: str) -> str:
    """Return the URL of a cold root in one form: no trailing slash, ``file://`` for a plain path.

    Raises:
        ConfigError: it is no URL, carries credentials, or names what does not outlive a process.
    """
    scheme = _SCHEME.match(text)
    if scheme is None or scheme[1].lower() == "file":
        return f"file://{quote(_local_path(text))}"
    parts = _parse_url(text)
    if parts.scheme == "memory":
        raise ConfigError("a cold root outlives the process, memory:// does not", option="spill")
    if not scheme[2] or parts.query or not (parts.netloc or parts.path.strip("/")):
        raise ConfigError("this is not a cold root; write for example s3://bucket/prefix", option="spill")
    return text.rstrip("/")


def _check_apart(config: Config) -> None:
    """Refuse a cold root inside the hot one, or around it."""
    if config.root is None or config.spill is None or not config.spill.startswith("file://"):
        return
    hot, cold = os.path.realpath(config.root), os.path.realpath(_local_path(config.spill))
    if os.path.commonpath([hot, cold]) in (hot, cold):
        raise ConfigError(f"spill={config.spill} lies inside the hot root {config.root}, or around it", option="spill")


def _check_path(path: str) -> None:
    """Refuse a path that references could not carry, or that nobody means."""
    if not path:
        raise ConfigError("the location is empty; pass a URI such as file:///nvme/spool, or None for SPOOL_URI")
    if _CONTROL.search(path):
        raise ConfigError(f"{path!r} holds a newline or another control character; was it read from a file?")
    if any("\ud800" <= char <= "\udfff" for char in path):
        raise ConfigError(f"{path!r} is not UTF-8, and references carry the root as text; rename the directory")


_TYPES = get_type_hints(Config)
_CHOICES = ("durability", "spill_when", "verify_upload")
_MAY_BE_OFF = ("page_cache_bytes", "reuse_bytes")

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def _option(name: str, value: str) -> object:
    if name in _PARSERS:
        return _PARSERS[name](value)
    try:
        if name.endswith("_bytes"):
            size, least = parse_size(value), 0 if name in _MAY_BE_OFF else 1
            if not least <= size < 1 << 63:
                raise ConfigError(f"{size} is not in [{least}, 2**63)")
            return size
        if name == "fields":
            return tuple(part for part in value.split(",") if part)
        if name == "direct":
            return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
        number = msgspec.convert(value, _TYPES[name], strict=False)
    except (msgspec.ValidationError, KeyError, ValueError, OverflowError) as error:
        hint: object = "true or false" if name == "direct" else error
        if name in _CHOICES:
            hint = f"one of {', '.join(map(str, get_args(_TYPES[name])))}"
        raise ConfigError(f"option {name}={value!r:.80} is not valid ({hint})", option=name) from error
    if isinstance(number, int | float) and not number > 0:
        raise ConfigError(f"option {name}={value!r} must be positive", option=name)
    return number


def _retention(value: str) -> Retention:
    released, age_s = False, None
    parts = [part.strip() for part in value.split(",")]
    try:
        for part in parts:
            name, _, age = part.partition("=")
            if name == "age":
                age_s = parse_duration(age)
                if not age_s or age.strip()[-1:].isdecimal():
                    raise ConfigError("an age has a unit: 90s, 12h, 7d")
            elif part == "released":
                released = True
            elif part != "keep" or len(parts) > 1:
                raise ConfigError(f"{part!r} is not a rule")
    except ConfigError as error:
        raise ConfigError(
            f"option retention={value!r:.80} is not valid ({error}): write keep, released, age=7d or released,age=7d",
            option="retention",
        ) from error
    return Retention(released, age_s)


def _spill(value: str) -> str:
    if _SCHEME.match(value) is None and not value.startswith("/"):
        raise ConfigError(
            "spill= takes a URL such as s3://bucket/prefix or file:///mnt/shared/run7, or an absolute path",
            option="spill",
        )
    return cold_url(value)


_PARSERS: dict[str, Callable[[str], object]] = {"spill": _spill, "retention": _retention}
