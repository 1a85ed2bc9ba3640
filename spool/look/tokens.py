"""The tokens of a reference, a window at a time: what they are, what is known of each, and its experts."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from spool.formats.arrays import Ragged
from spool.look.rows import Rows
from spool.look.vocabulary import LOOK_BACK, TokenText
from spool.model.fields import BUILT_IN, LOGPROBS, LOSS_MASK, TOKEN_IDS
from spool.model.refs import SegmentRef, Unit

if TYPE_CHECKING:
    from spool.handle import Spool
    from spool.look.vocabulary import Vocabulary
    from spool.model.refs import StepRef
    from spool.read.sample import Coverage, Sample

_SHOWN_VALUES = 16


class TokenRow(Struct, frozen=True):
    """One token.

    Attributes:
        position: in the reference.
        token_id: None where it was not stored.
        text: what the token stands for, where there is a vocabulary.
        step: index of the step that generated it; None for prompts and observations.
        mask: the loss mask.
        logprob: as recorded, NaN and infinities too; None where there is none: for tokens that were not generated, and
            where none was sent.
        version: of the weights that generated it.
        new_version: the generated token before was of another version.
        starts_response: the first generated token of the reference.
        unit: the multimodal unit that the token stands for.
    """

    position: int
    token_id: int | None
    text: TokenText | None
    step: int | None
    mask: bool
    logprob: float | None
    version: str | None
    new_version: bool
    starts_response: bool
    unit: Unit | None


class TokenExperts(Struct, frozen=True, eq=False):
    """The experts of one token.

    Attributes:
        layers: absolute numbers of the MoE layers [L].
        experts: [L, topk] of the token's first forward row, in the order they were sent; None where there are none.
        kept: bool [L, topk]: which of them were chosen in the row before as well; none where that was never sent.
        n_rows: forward rows of the token; 0 for the last one, which no forward has.
        is_gap: they were never sent.
    """

    layers: tuple[int, ...]
    experts: NDArray[Any] | None
    kept: NDArray[np.bool_] | None
    n_rows: int
    is_gap: bool


class Tokens:
    """Reads the tokens of one reference; safe from many threads.

    Args:
        sp: the spool.
        ref: a segment or step.
        vocabulary: for the text of tokens.

    Raises:
        ReleasedError, IntegrityError, StorageError: the schemas of its streams cannot be read.
    """

    def __init__(self, sp: Spool, ref: SegmentRef | StepRef, vocabulary: Vocabulary | None = None) -> None:
        self._sp, self.ref, self._vocabulary = sp, ref, vocabulary
        self._coverage: dict[str, Coverage] = sp.coverage([ref])[0]
        self._routing = Rows(sp, ref)
        self._units = {unit.position: unit for unit in ref.units}
        self._span_stops = [span.stop for span in ref.spans]
        self._version_stops = [span.stop for span in ref.versions]
        self._changes = frozenset(b.start for a, b in pairwise(ref.versions) if a.version != b.version)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the user's fields that the reference has."""
        return tuple(sorted(self._coverage.keys() - BUILT_IN))

    def rows(self, start: int, stop: int) -> list[TokenRow]:
        """Return the tokens ``[start, stop)``; nothing else is read, but for a few token ids in front.

        Raises:
            ReleasedError, IntegrityError, StorageError: they cannot be read.
        """
        ref = self.ref
        start, stop = max(start, 0), min(stop, ref.n_tokens)
        if stop <= start:
            return []
        first = max(start - LOOK_BACK, 0) if self._vocabulary is not None else start
        names = [name for name in (TOKEN_IDS.name, LOGPROBS.name) if name in self._coverage]
        tokens = slice(first, stop)
        sample = self._sp.read(ref, fields=[*names, LOSS_MASK.name], tokens=tokens, missing=0)
        ids = self._spread(sample, TOKEN_IDS.name, first, stop)
        texts = [None] * len(ids) if self._vocabulary is None else self._vocabulary.texts(ids)
        logprobs, mask = self._spread(sample, LOGPROBS.name, first, stop), sample[LOSS_MASK.name].tolist()
        return [
            self._row(first + n, ids[n], texts[n], mask[n] != 0, logprobs[n])
            for n in range(start - first, stop - first)
        ]

    def text(self, start: int, stop: int) -> str:
        """Return the text of the tokens ``[start, stop)``; nothing where there is no vocabulary, or no ids are stored.

        Raises:
            ReleasedError, IntegrityError, StorageError: they cannot be read.
        """
        start, stop = max(start, 0), min(stop, self.ref.n_tokens)
        if self._vocabulary is None or TOKEN_IDS.name not in self._coverage or stop <= start:
            return ""
        sample = self._sp.read(self.ref, fields=[TOKEN_IDS.name], tokens=slice(start, stop), missing=0)
        return self._vocabulary.text(self._spread(sample, TOKEN_IDS.name, start, stop))

    def _row(self, position: int, number: Any, text: TokenText | None, mask: bool, logprob: Any) -> TokenRow:
        ref = self.ref
        span = bisect_right(self._span_stops, position)
        step = ref.spans[span].step if span < len(ref.spans) and ref.spans[span].start <= position else None
        at = bisect_right(self._version_stops, position)
        version = ref.versions[at].version if at < len(ref.versions) and ref.versions[at].start <= position else None
        return TokenRow(
            position=position,
            token_id=number,
            text=text,
            step=step,
            mask=mask,
            logprob=None if step is None else logprob,
            version=version,
            new_version=position in self._changes,
            starts_response=position == ref.response_start,
            unit=self._units.get(position),
        )

    def _spread(self, sample: Sample, name: str, start: int, stop: int) -> list[Any]:
        """Return a field's value for each of the tokens ``[start, stop)``; None where there is none."""
        found: list[Any] = [None] * (stop - start)
        if name not in sample:
            return found
        values = sample[name].tolist()
        found[len(found) - len(values) :] = values
        for gap in self._coverage[name].gaps:
            low, high = max(gap[0], start), min(gap[1], stop)
            if low < high:
                found[low - start : high - start] = [None] * (high - low)
        return found

    def experts(self, token: int) -> TokenExperts:
        """Return the experts of one token; only its rows and that in front are read.

        Raises:
            ReleasedError, IntegrityError, StorageError: they cannot be read.
        """
        about = self._routing
        first = int(about.starts[token])
        n_rows = max(min(int(about.starts[token + 1]), about.n_rows) - first, 0)
        if not about.layers or not n_rows or not about.kept(first, first + 1)[0]:
            return TokenExperts(about.layers, None, None, n_rows, is_gap=n_rows > 0)
        # a unit in front may have any number of rows
        n_before = 1 if token and about.starts[token - 1] == first - 1 and about.kept(first - 1, first)[0] else 0
        rows = about.read(slice(token - n_before, token + 1))
        experts = rows[n_before].copy()
        kept = np.zeros(experts.shape, np.bool_)
        if n_before:
            kept = (experts[:, :, np.newaxis] == rows[0][:, np.newaxis, :]).any(axis=2) & (experts >= 0)
        return TokenExperts(about.layers, experts, kept, n_rows, is_gap=False)

    def values(self, token: int) -> dict[str, str]:
        """Return the user's fields at one token as text, each shortened.

        Raises:
            ReleasedError, IntegrityError, StorageError: they cannot be read.
        """
        return {name: self._text(name, token) for name in self.fields}

    def _text(self, name: str, token: int) -> str:
        about = self._coverage[name]
        align, position = about.spec.align, token
        if align == "forward":
            position = int(self._routing.starts[token])
        elif align == "step":
            position = self._step_number(token)
        absent = position < self.ref.response_start if align == "response" else position < 0
        if absent or (align == "forward" and position >= self._routing.n_rows):
            return "-"
        if any(low <= position < high for low, high in about.gaps):
            return "not sent"
        part = slice(token, token + 1)
        array = self._sp.read(self.ref, fields=[name], tokens=part, dtype="stored", missing=0)[name]
        row = position if align == "step" else 0
        if isinstance(array, Ragged):
            return _shortened(array.values[array.offsets[row] : array.offsets[row + 1]])
        return _shortened(array[row])

    def _step_number(self, token: int) -> int:
        """Return which of the reference's steps generated a token, from 0; -1 for none."""
        ref, span = self.ref, bisect_right(self._span_stops, token)
        if span >= len(ref.spans) or ref.spans[span].start > token:
            return -1
        return ref.steps.index(ref.spans[span].step) if isinstance(ref, SegmentRef) else 0

    def edges(self) -> NDArray[np.int64]:
        """Return the tokens before which the loss mask or the version changes, ascending; of payload it reads the mask.

        Raises:
            ReleasedError, IntegrityError, StorageError: it cannot be read.
        """
        mask = self._sp.read(self.ref, fields=[LOSS_MASK.name])[LOSS_MASK.name] != 0
        turns = np.flatnonzero(mask[1:] != mask[:-1]) + 1
        return np.union1d(turns, np.array(sorted(self._changes), np.int64)).astype(np.int64)


def _shortened(row: NDArray[Any]) -> str:
    values = np.asarray(row).reshape(-1)
    shown = " ".join(map(_number, values[:_SHOWN_VALUES]))
    return f"{shown} ... ({len(values)})" if len(values) > _SHOWN_VALUES else shown or "(none)"


def _number(value: Any) -> str:
    return str(value) if value.dtype.kind in "iub" else f"{float(value):.6g}"
