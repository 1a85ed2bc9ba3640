"""The identity of a spool: ``spool.json`` in its roots."""

from __future__ import annotations

import glob
import os
import secrets
import time
from contextlib import suppress
from typing import Literal, NamedTuple
from urllib.parse import quote

import msgspec
import xxhash
from msgspec import Struct

from spool.config import Config
from spool.errors import ConfigError, IntegrityError, NotFoundError, SpoolError, StorageError, moved_away, replaced
from spool.formats.shard import group_key, parse_attributes
from spool.observe import Observer, Retried, tell
from spool.stores.local import check_hot_root, create_atomic, map_os_error, read_file, write_atomic
from spool.stores.objects import Objects, open_objects
from spool.stores.objects import Observer as RequestObserver

FORMAT = 1

_COLD = ("manifests/", "facts/", "gone/", "units/", "streams/")
"""What a cold root is made of."""


class Identity(Struct, frozen=True):
    """Content of ``spool.json``.

    Attributes:
        format: version of the layout on disk.
        id: 16 hexadecimal digits; references carry it. All roots of a spool have the same.
        created: seconds since the epoch; None in a store where all makers must write the same bytes.
        tier: of the root it lies in.
        spill: of a hot root, the URL of its cold root; None where it has none.
    """

    format: int
    id: str
    created: float | None = None
    tier: Literal["hot", "cold"] = "hot"
    spill: str | None = None


class Place(NamedTuple):
    """Where a spool was found.

    Attributes:
        config: as it was opened, completed by what the hot root says of its cold one.
        identity: of the root that was opened.
        objects: the cold root; None where there is none.
    """

    config: Config
    identity: Identity
    objects: Objects | None


def find(config: Config, *, create: bool, join: bool, observer: Observer | None = None) -> Place:
    """Return the spool at a location, made where there is none if ``create`` says so; a cold root is never made alone.

    With ``join`` a hot root that is there is joined to the cold root it is opened with, which is made then.

    A hot root knows its cold one: a process that opens it without ``spill=`` finds evicted packs all the same.

    Raises:
        NotFoundError: there is no spool.
        IntegrityError: a root's ``spool.json`` is lost, or torn.
        ConfigError: the file system cannot hold a hot root, or hot and cold root do not belong together.
        StorageError: a root cannot be reached or written.
    """
    hot = read_identity(config.root) if config.root is not None and os.path.isdir(config.root) else None
    if hot is not None and hot.tier == "cold":
        if config.spill is not None:
            raise ConfigError(
                f"{config.root} is a cold root and spills nowhere: leave spill= out, or put a hot root in front",
                option="spill",
            )
        config = msgspec.structs.replace(config, root=None, spill=f"file://{quote(str(config.root))}")
    elif hot is not None and config.spill is None:
        config = msgspec.structs.replace(config, spill=hot.spill)
    objects = None if config.spill is None else open_cold(config, config.spill, observer)
    if config.root is None:
        assert objects is not None
        identity = read_cold_identity(objects)
    else:
        identity = make_identity(config.root, objects) if create or (join and hot is not None) else hot
    if identity is None:
        raise NotFoundError(f"there is no spool at {config.url} (no spool.json)", root=config.root or config.url)
    return Place(config, identity, objects)


def open_cold(config: Config, url: str, observer: Observer | None = None) -> Objects:
    """Return the objects of a cold root, with the bounds of ``config``; ``observer`` is told of retries.

    Raises:
        ConfigError: the URL is malformed, or its client is not installed.
    """
    return open_objects(
        url,
        concurrency=config.cold_concurrency,
        deadline_s=config.cold_deadline_s,
        verify=config.verify_upload,
        observer=None if observer is None else _retries(observer),
    )


def _retries(observer: Observer) -> RequestObserver:
    def told(kind: str, key: str, _n_bytes: int, _seconds: float) -> None:
        if kind == "retry":
            tell(observer, Retried(key))

    return told


def read_identity(root: str) -> Identity | None:
    """Return the identity of the root at path ``root``, or None where there is none.

    Raises:
        IntegrityError: ``spool.json`` is torn, or of a newer version.
    """
    path = os.path.join(root, "spool.json")
    try:
        return _parse(read_file(path), path)
    except NotFoundError:
        return None


def check_there(root: str, spool_id: str) -> None:
    """Check that a hot root that was opened is still the one at ``root``.

    Raises:
        StorageError: it was moved or removed.
        ReplacedError: another spool's is there.
    """
    found = read_identity(root)
    if found is None:
        raise moved_away(root)
    if found.id != spool_id:
        raise replaced(root)


class Standing:
    """Notices that another spool is where one was opened; that costs a `stat` as long as nothing changes.

    Args:
        root: the hot root; None where there is none, and nothing is noticed.
        spool_id: of the spool that was opened.
    """

    def __init__(self, root: str | None, spool_id: str) -> None:
        self._root, self._id = root, spool_id
        self._mark: tuple[int, ...] | None = None

    def check(self) -> None:
        """Check that no other spool is there; one that is away, or damaged, is told by who reads it.

        Raises:
            ReplacedError: another one is.
        """
        if self._root is None:
            return
        try:
            found = os.stat(os.path.join(self._root, "spool.json"))
            mark = found.st_dev, found.st_ino, found.st_ctime_ns  # numbers of files are given out again
            identity = None if mark == self._mark else read_identity(self._root)
        except (OSError, SpoolError):
            return
        if identity is not None and identity.id != self._id:
            raise replaced(self._root)
        self._mark = mark


def read_cold_identity(objects: Objects) -> Identity | None:
    """Return the identity of a cold root, or None where there is none.

    Raises:
        IntegrityError: ``spool.json`` is torn, of a newer version, or of a hot root.
        StorageError: the cold root cannot be reached.
    """
    try:
        data = objects.get("spool.json")
    except NotFoundError:
        return None
    where = f"{objects.url}/spool.json"
    identity = _parse(data, where)
    if identity.tier != "cold":
        raise IntegrityError(f"{where} is that of a hot root; spill to another place", file=where)
    return identity


def created_at(place: Place) -> float | None:
    """Return when a root was made, seconds since the epoch.

    Where all makers write the same bytes, and so no time, it is when the store took them.

    Raises:
        StorageError: the cold root cannot be reached.
    """
    if place.identity.created is not None or place.objects is None or place.identity.tier != "cold":
        return place.identity.created
    found = place.objects.info("spool.json")
    return None if found is None else found.modified


def _parse(data: bytes, where: str) -> Identity:
    try:
        identity = msgspec.json.decode(data, type=Identity)
    except msgspec.DecodeError as error:
        raise IntegrityError(
            f"{where} is torn ({error}); it holds format, id and created: the id stands in every reference",
            file=where,
        ) from error
    if identity.format > FORMAT:
        raise IntegrityError(
            f"{where} has format {identity.format}, this Spool reads up to {FORMAT}: upgrade", file=where
        )
    return identity


def make_identity(root: str, cold: Objects | None = None) -> Identity:
    """Create the hot root at ``root`` unless another process does first, joined to a cold root; return its identity.

    A cold root that is not there yet is made too. It is asked only until the hot root is joined to it.

    Raises:
        ConfigError: the file system cannot hold a hot root, or the two roots belong to different spools.
        IntegrityError: a spool is in one of them, but its ``spool.json`` is lost.
        StorageError: one cannot be written.
    """
    check_hot_root(root)
    if not os.path.exists(os.path.join(root, "spool.json")):
        _check_not_inside(root)
    try:
        os.makedirs(os.path.join(root, "streams"), exist_ok=True)
    except OSError as error:
        raise map_os_error(error, what="make a spool at", path=root) from error
    known = read_identity(root)
    if known is None and _has_records(root):
        known = read_identity(root)  # another process may have been making it
        if known is None:
            raise IntegrityError(
                f"{root} holds a spool, but its spool.json is lost, and a new one would have another id, which no "
                "reference finds: `spool recover` restores it from the streams; else write it by hand, the id stands "
                "in every reference and in spool.json of the cold root",
                file=os.path.join(root, "spool.json"),
            )
    if known is not None and (cold is None or known.spill == cold.url):
        return known
    if known is not None and known.spill is not None and cold is not None:
        raise ConfigError(
            f"{root} spills to {known.spill}, where packs of it may be by now, and not to {cold.url}; "
            "open it with the same spill=, or take another hot root",
            option="spill",
        )
    spool_id = secrets.token_hex(8) if cold is None else _make_cold_identity(cold, root, known).id
    created = time.time() if known is None else known.created
    made = Identity(FORMAT, spool_id, created, spill=None if cold is None else cold.url)
    if known is None:
        return _create(root, made)
    write_atomic(os.path.join(root, "spool.json"), msgspec.json.encode(made))
    return made


def _check_not_inside(root: str) -> None:
    """Refuse to make a spool among another one's files.

    Raises:
        ConfigError: a folder above is the root of one.
    """
    above = os.path.dirname(root)
    while above != os.path.dirname(above):
        if os.path.exists(os.path.join(above, "spool.json")):
            raise ConfigError(f"{root} lies inside the spool at {above}: take a folder outside of it", root=above)
        above = os.path.dirname(above)


def _has_records(root: str) -> bool:
    return bool(_streams(root)) or os.path.exists(os.path.join(root, "catalog.sqlite"))


def _streams(root: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(os.path.join(root, "streams")) if not name.startswith("."))
    except OSError:
        return []


def restore_identity(root: str, *, dry_run: bool = False) -> Identity | None:
    """Write a lost ``spool.json`` again, from the id that streams keep; None where it is there, or no spool is.

    The cold root is the one that packs were brought over to, where their markers agree on it; else it has none.

    Raises:
        IntegrityError: no stream keeps an id, as those of earlier versions, or they differ; or the file is torn.
        StorageError: it cannot be written.
    """
    if read_identity(root) is not None or not _has_records(root):
        return None
    found: dict[str, float] = {}
    for name in _streams(root):
        try:
            facts = parse_attributes(read_file(os.path.join(root, "streams", name, "zarr.json")))
        except SpoolError:
            continue
        if isinstance(facts.get("id"), str):
            found.setdefault(facts["id"], float(facts.get("created", 0.0)))
    if len(found) != 1:
        raise IntegrityError(
            f"{root}/spool.json is lost, and its streams say {', '.join(found) or 'nothing'} of the spool's id: write "
            "it by hand, the id stands in every reference and in spool.json of the cold root",
            file=os.path.join(root, "spool.json"), ids=list(found),
        )  # fmt: skip
    ((spool_id, created),) = found.items()
    urls = _cold_roots(root)
    restored = Identity(FORMAT, spool_id, created, spill=urls.pop() if len(urls) == 1 else None)
    return restored if dry_run else _create(root, restored)


def restore_cold_identity(root: str, config: Config, *, dry_run: bool = False) -> str | None:
    """Write a lost ``spool.json`` of the cold root of a hot one again; return its URL, None where nothing is to do.

    Only where streams of the hot root are in there: else it may not be mounted, or be another place.

    Raises:
        StorageError: the cold root cannot be reached or written.
    """
    hot = read_identity(root)
    url = config.spill if hot is None else hot.spill
    if hot is None or url is None:
        return None
    objects = open_cold(config, url)
    if read_cold_identity(objects) is not None or not _has_streams_of(objects, root):
        return None
    if not dry_run:
        objects.create("spool.json", msgspec.json.encode(Identity(FORMAT, hot.id, tier="cold")))
    return url


def _has_streams_of(cold: Objects, root: str) -> bool:
    return any(cold.info(group_key(name)) is not None for name in _streams(root))


class _Marker(Struct):
    root: str | None = None


def _cold_roots(root: str) -> set[str]:
    """Return the URLs of cold roots that the markers of spilled packs name."""
    found = set[str | None]()
    for path in glob.iglob(f"{glob.escape(root)}/streams/*/records/*.cold"):
        with suppress(SpoolError, msgspec.DecodeError):
            found.add(msgspec.json.decode(read_file(path), type=_Marker).root)
    return {url for url in found if url is not None}


def _make_cold_identity(cold: Objects, root: str, hot: Identity | None) -> Identity:
    """Create the cold root unless it is there; return its identity.

    Two nodes may do so at once. Where the store has no exclusive creation, what is written follows from the URL alone:
    both write the same, unless one brings the id of a hot root that was there before: then the last one's counts.

    Raises:
        ConfigError: it is another spool's than the hot root.
        IntegrityError: a spool is there, but its ``spool.json`` is lost.
    """
    known = read_cold_identity(cold)
    if known is None and _is_used(cold) and (hot is None or not _has_streams_of(cold, root)):
        known = read_cold_identity(cold)  # another node may have been making it
        if known is None:
            raise IntegrityError(
                f"{cold.url} holds a spool, but its spool.json is lost, and a new one would have another id, which "
                "locks out the nodes that know it: `spool recover` on one of them restores it; else write it by hand, "
                "the id stands in every reference and in spool.json of their hot roots. Where what is there is no "
                "spool's, take another prefix",
                file=f"{cold.url}/spool.json",
            )
    if known is None:
        exclusive = cold.creates_exclusively()
        drawn = secrets.token_hex(8) if exclusive else xxhash.xxh3_64_hexdigest(cold.url.encode())
        created = time.time() if exclusive else None
        made = Identity(FORMAT, drawn if hot is None else hot.id, created, tier="cold")
        cold.create("spool.json", msgspec.json.encode(made))
        known = read_cold_identity(cold)
    if known is None:
        raise StorageError(f"{cold.url}/spool.json vanished while it was made; is another process deleting the spool?")
    return _same(known, hot, cold.url)


def _is_used(cold: Objects) -> bool:
    """Whether something of a spool is there; streams last, as they are the most."""
    return any(cold.list(prefix) for prefix in _COLD)


def _same(known: Identity, hot: Identity | None, url: str) -> Identity:
    if hot is not None and hot.id != known.id:
        raise ConfigError(
            f"the hot root belongs to spool {hot.id}, the cold root {url} to {known.id}: take another hot or cold root",
            option="spill",
        )
    return known


def _create(root: str, made: Identity) -> Identity:
    """Write ``made`` at ``root`` unless another process was first; return what is there."""
    try:
        os.makedirs(os.path.join(root, "streams"), exist_ok=True)
    except OSError as error:
        raise map_os_error(error, what="make a spool at", path=root) from error
    create_atomic(os.path.join(root, "spool.json"), msgspec.json.encode(made))
    identity = read_identity(root)
    if identity is None:
        raise StorageError(f"{root}/spool.json vanished while it was made; is another process deleting the spool?")
    return identity
