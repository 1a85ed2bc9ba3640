"""Whose pack it is: of two copies of one hot root, the one whose records are in the cold root first."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from spool.errors import IntegrityError, StorageError
from spool.formats import manifest, records
from spool.formats.manifest import listed
from spool.logs.keys import MANIFESTS, gone_key, is_rollup, parse_manifest_key, records_key
from spool.logs.streams import records_path
from spool.sizes import format_time
from spool.stores.local import read_file
from spool.stores.objects import Objects

CLAIM_S = 900.0
"""Records that no manifest lists so long after they were put are of a copy that died: another's take their place."""

log = logging.getLogger("spool.spiller")


class Claims:
    """What a hot root claims in a cold one: a pack is claimed by its records, which are created where none are.

    Args:
        root: the hot root.
        objects: the cold root.
    """

    def __init__(self, root: str, objects: Objects) -> None:
        self._root = root
        self._objects = objects
        self._claimed: dict[tuple[str, int], float] = {}

    def forget(self, name: str, pack: int) -> None:
        """A manifest lists the pack now."""
        self._claimed.pop((name, pack), None)

    def claim(self, name: str, pack: int, table: bytes) -> None:
        """Put a pack's records, from which all else of it follows, unless another pack of the same name is there.

        Raises:
            IntegrityError: one is, or was: a hot root was copied, and both copies are in use.
        """
        key = records_key(name, pack)
        found = self._objects.info(key)
        if found is None:
            self._check_not_deleted(name, pack)
        with no_word_on_packs():
            if found is None:
                self._objects.create(key, table)
            there = self._objects.get(key)
        modified = time.time() if found is None else found.modified
        if there != table:
            self._check_replaceable(name, pack, table, there, modified)
        if there != table or modified < time.time() - CLAIM_S / 2:  # own ones too: their age says whether one lives
            with no_word_on_packs():
                self._objects.put(key, table)
                there = self._objects.get(key)
        if there != table:
            raise self._rival(name, pack, "put just now")
        self._claimed[name, pack] = time.monotonic()

    def renew(self, name: str, pack: int) -> None:
        """Claim a pack again that takes long to send: another copy takes this one for dead, or did; see `claim`."""
        if time.monotonic() - self._claimed[name, pack] > CLAIM_S / 2:
            self.insist(name, pack)

    def insist(self, name: str, pack: int) -> None:
        """See to it that a pack's records are the ones here: a machine may have stood still with no clock to tell."""
        self.claim(name, pack, read_file(records_path(self._root, name, pack)))

    def _check_not_deleted(self, name: str, pack: int) -> None:
        """Raise `IntegrityError` where a pack of this name was deleted: nobody would see this one."""
        key = gone_key(name, pack)
        if self._objects.info(key) is not None:
            raise IntegrityError(
                f"{self._url(key)} says that pack {pack} of stream {name} is deleted, and it is not deleted here: two "
                "copies of one hot root are in use, and the other one's pack was deleted. What is here stays: "
                "`spool export` what only it has, and take this copy out of use",
                stream=name, file=self._url(key),
            )  # fmt: skip

    def _check_replaceable(self, name: str, pack: int, table: bytes, there: bytes, modified: float) -> None:
        """Raise `IntegrityError` where records that are ``there``, since ``modified``, are another copy's to keep."""
        url = self._url(records_key(name, pack))
        try:
            records.decode(there)
        except IntegrityError as error:
            listing = self._listing(name, pack, strict=False)
            if listing is not None and listing != listed(records.decode(table)):
                raise self._rival(name, pack, f"damaged ({error}), and a manifest lists them") from error
            log.warning("%s is damaged and is put again: %s", url, error)
            return
        if self._listing(name, pack, strict=True) is not None:
            raise self._rival(name, pack, "and a manifest lists them")
        if modified > time.time() - CLAIM_S:
            raise self._rival(
                name,
                pack,
                f"which no manifest lists yet; if none does {CLAIM_S / 60:.0f} minutes after they were put, these here "
                "take their place",
            )
        log.warning("%s holds records that no manifest lists since %s: they are replaced", url, format_time(modified))

    def _rival(self, name: str, pack: int, what: str) -> IntegrityError:
        url = self._url(records_key(name, pack))
        return IntegrityError(
            f"{url} holds other records than pack {pack} of stream {name} here, {what}: two copies of one hot root are "
            "in use. What is there stays, and so does what is here: take this copy out of use, or if it is the one to "
            "keep, `spool export` what only it has",
            stream=name, file=url,
        )  # fmt: skip

    def _listing(self, name: str, pack: int, *, strict: bool) -> list[bytes] | None:
        """Return the events of a pack as a manifest lists them; None where none does.

        Raises:
            IntegrityError: a manifest that may list it is damaged, and ``strict``.
            NotFoundError: one was rolled up just now.
        """
        keys = [found.key for found in self._objects.list(MANIFESTS)]
        for key in keys:
            if is_rollup(key) or parse_manifest_key(key) == (name, pack):
                with _unless_damaged(strict, self._url(key)):
                    for entry, events in manifest.decode(self._objects.get(key)):
                        if (entry.stream, entry.pack) == (name, pack):
                            return events
        return None

    def _url(self, key: str) -> str:
        return f"{self._objects.url}/{key}"


@contextmanager
def no_word_on_packs() -> Iterator[None]:
    """Turn what is wrong with bytes of the cold root into a failure of the cold root: the pack may be as it was."""
    try:
        yield
    except IntegrityError as error:
        raise StorageError(str(error), **error.details) from error


@contextmanager
def _unless_damaged(strict: bool, url: str) -> Iterator[None]:
    """Pass over an object that is damaged; raise, with its URL, where ``strict``."""
    try:
        yield
    except IntegrityError as error:
        if strict:
            raise IntegrityError(f"{url}: {error}", **error.details) from error
