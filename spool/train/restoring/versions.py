"""Which weights generated a token, and how far behind the current ones these are. From references alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spool.arguments import listed, refused
from spool.errors import InputError
from spool.model.refs import numbered

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spool.model.refs import Ref

NO_VERSION = -1
"""Stands for tokens that no weights generated, or of which nobody said which."""

_MOST = (1 << 63) - 1
_WANTED = "a version, or all of them, oldest first"


class VersionOrder(NamedTuple):
    """How the weight versions of a batch are numbered: newer ones higher.

    Attributes:
        numbers: by version.
        names: the versions by number, where they are not numbers themselves; None where they are.
        current: number of the current weights; None where nobody said which these are.
        told: whether the caller named all versions in their order.
    """

    numbers: dict[str, int]
    names: tuple[str, ...] | None
    current: int | None
    told: bool = False

    def number(self, version: str) -> int:
        """Return the number of a version.

        Raises:
            InputError: it is none of these.
        """
        found = self.numbers.get(version)
        if found is None:
            raise InputError(
                f"weight version {version!r} is none of those in version=: {', '.join(self.numbers)}; name them all, "
                "oldest first",
                version=version,
            )
        return found

    def newest(self, ref: Ref) -> int | None:
        """Return the number of a reference's newest version: as told, else as `Ref.version_span`; None for none."""
        if self.told:
            return max((self.number(span.version) for span in ref.versions), default=None)
        span = ref.version_span
        return None if span is None else self.number(span[1])


def version_order(refs: Iterable[Ref], version: str | int | Sequence[str] | None = None) -> VersionOrder:
    """Return how the weight versions of references are ordered: by number if all are numbers, else as they appear.

    Args:
        refs: the references of a batch.
        version: of the current weights; where versions are no numbers and it appears in no reference it is the newest.
            Or all versions there are, each once, oldest first, the current one last.

    Raises:
        InputError: ``version`` is neither, names one twice, or lacks one that a reference has.
    """
    found = dict.fromkeys(span.version for ref in refs for span in ref.versions)
    current = named(version)
    if isinstance(current, tuple):
        return _told(current, found)
    names = tuple(found if current is None or current in found else [*found, current])
    known = numbered(names)
    if known is not None:
        if all(number <= _MOST for number in known.values()):
            return VersionOrder(known, None, None if current is None else known[current])
        names = tuple(sorted(names, key=known.__getitem__))
    numbers = {name: number for number, name in enumerate(names)}
    return VersionOrder(numbers, names, None if current is None else numbers[current])


def named(version: object) -> str | tuple[str, ...] | None:
    """Return the current weights' version, or all versions, as references name them; None for None.

    Raises:
        InputError: it is neither, or names a version twice.
    """
    if version is None:
        return None
    if isinstance(version, str):
        return str(version)  # of numpy's texts, too, a plain one
    if isinstance(version, Integral) and not isinstance(version, bool):
        return _digits(int(version))
    names = tuple(map(str, listed("version", version, str, _WANTED)))
    if not names:
        raise refused("version", _WANTED, version)
    ((twice, times),) = Counter(names).most_common(1)
    if times > 1:
        raise InputError(
            f"version= names {twice!r:.80} {times} times: name each version once, oldest first, the current one last, "
            "also where these are older weights that are current again",
            argument="version", version=twice,
        )  # fmt: skip
    return names


def _digits(version: int) -> str:
    try:
        return str(version)
    except ValueError as error:
        raise InputError(
            f"version= is an integer that Python does not write out: {error}", argument="version"
        ) from error


def _told(names: tuple[str, ...], found: Iterable[str]) -> VersionOrder:
    order = VersionOrder({name: number for number, name in enumerate(names)}, names, len(names) - 1, told=True)
    for version in found:
        order.number(version)
    return order


def token_versions(ref: Ref, order: VersionOrder) -> NDArray[np.int64]:
    """Return the number of the version that generated each token, -1 for the others; int64 ``[T]``."""
    versions = np.full(ref.n_tokens, NO_VERSION, np.int64)
    for span in ref.versions:
        versions[span.start : span.stop] = order.number(span.version)
    return versions


def staleness(versions: NDArray[np.int64], order: VersionOrder) -> NDArray[np.int64]:
    """Return how far behind the current weights those of each token are; 0 for a token without a version.

    Args:
        versions: as `token_versions` returns them.
        order: with ``current``. Where versions are numbers the distance is their difference, else how many of the
            ordered versions are newer. It is negative for weights that are newer than the current ones.

    Raises:
        InputError: nobody said which weights are current.
    """
    if order.current is None:
        raise refused("version", "the version of the current weights", None)
    return np.where(versions == NO_VERSION, 0, order.current - versions)


def check_mask_versions(rule: object) -> None:
    """Refuse a rule that `masked_versions` does not know.

    Raises:
        InputError: it is neither a name nor a number of versions.
    """
    if rule not in ("all", "last") and (type(rule) is not int or not 0 <= rule <= _MOST):
        raise refused("mask_versions", "all, last, or how many versions behind a token may be", rule)


def masked_versions(
    ref: Ref, versions: NDArray[np.int64], order: VersionOrder, mask_versions: Any
) -> NDArray[np.bool_] | None:
    """Return which tokens are not trained because of the weights they come from; bool ``[T]``, None for none.

    Args:
        ref: the reference.
        versions: its tokens'.
        order: of the batch.
        mask_versions: ``all`` weights train; the segment's ``last`` ones; or those that are at most so far behind.
    """
    newest = order.newest(ref)
    if mask_versions == "all" or newest is None:
        return None
    old: NDArray[np.bool_]
    if mask_versions == "last":
        old = versions != newest
    else:
        old = (versions != NO_VERSION) & (staleness(versions, order) > mask_versions)
    return old
