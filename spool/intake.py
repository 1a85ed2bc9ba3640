"""What an engine sent, checked and made ready to store: the arguments of `Session.append` as arrays and row sources.

Nothing here has a side effect: a refused step leaves the session as it was.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash
from msgspec import Struct
from numpy.typing import NDArray

from spool.arguments import MAX_TEXT_BYTES
from spool.errors import InputError, PayloadError
from spool.formats import arrays, experts, messages, values
from spool.formats.masks import pack_cleared
from spool.model.fields import LOGPROBS, LOSS_MASK, ROUTED_EXPERTS, TOKEN_IDS, FieldSpec, Layout, Schema, numpy_dtype
from spool.model.refs import StepRef, Unit, VersionSpan
from spool.model.rows import MOST
from spool.rollout.coverage import Range
from spool.write.stream import Rows

Store = Callable[[NDArray[Any], NDArray[Any]], None]
"""``store(dst, src)``: narrow source rows into stored rows."""

HASH_ROWS = 4096

_PARENT = (str, int, StepRef, type(None))


class Source(Struct, frozen=True):
    """One field's rows as the caller sent them.

    Attributes:
        spec: the field.
        pieces: ``(position, rows)``, ascending, never overlapping; views of the caller's arrays.
        store: narrows rows of a piece into stored rows.
        ends: for a ragged field, the end offset of each row, uint64; ``pieces`` then holds the values.
    """

    spec: FieldSpec
    pieces: tuple[tuple[int, NDArray[Any]], ...]
    store: Store
    ends: NDArray[np.uint64] | None = None

    @property
    def given(self) -> tuple[Range, ...]:
        """Positions that rows were sent for."""
        if self.ends is not None:
            return (Range(self.pieces[0][0], len(self.ends)),)
        return tuple([Range(position, len(rows)) for position, rows in self.pieces])

    def rows(self, ranges: Sequence[Range]) -> dict[str, Rows]:
        """Return what to write, by stored array, for the positions in ``ranges``, which must have been given."""
        name, shape = self.spec.name, self.spec.shape
        if self.ends is None:
            return {name: _rows(self._slices(ranges), self.store)}
        start, joined = self.pieces[0][0], self.pieces[0][1].reshape(-1, *shape)
        ends: list[NDArray[Any]] = []
        values: list[NDArray[Any]] = []
        n_values = 0
        for wanted in ranges:  # what lies between two of them is there already
            first, stop = wanted.position - start, wanted.stop - start
            low, high = int(self.ends[first - 1]) if first else 0, int(self.ends[stop - 1]) if stop else 0
            ends.append(self.ends[first:stop] - np.uint64(low) + np.uint64(n_values))
            values.append(joined[low:high])
            n_values += high - low
        return {f"{name}.offsets": _rows(ends, np.copyto), f"{name}.values": _rows(values, self.store)}

    def _slices(self, ranges: Iterable[Range]) -> list[NDArray[Any]]:
        slices = []
        for wanted in ranges:
            stop = wanted.position + wanted.n
            for position, rows in self.pieces:
                low, high = max(wanted.position, position), min(stop, position + len(rows))
                if low < high:
                    slices.append(rows[low - position : high - position])
        return slices

    def digest(self) -> bytes:
        """Return a digest of positions and stored values, whatever dtype they were sent in."""
        digest = xxhash.xxh3_128()
        for position, rows in self.pieces:
            digest.update(f"{self.spec.name} {position} {len(rows)};".encode())
            for first in range(0, len(rows), HASH_ROWS):
                part = rows[first : first + HASH_ROWS]
                stored = np.empty((len(part), *self.spec.shape), numpy_dtype(self.spec.dtype))
                self.store(stored, part)
                digest.update(stored.reshape(-1).view(np.uint8).data)  # bytes: bfloat16 has no buffer of its own
        if self.ends is not None:
            digest.update(self.ends.data)
        return digest.digest()


def _rows(slices: Sequence[NDArray[Any]], store: Store) -> Rows:
    """Return a row source over ``slices`` one after the other."""

    def fill(dst: NDArray[Any], first: int) -> None:
        done = 0
        for part in slices:
            if first >= len(part):
                first -= len(part)
                continue
            n = min(len(part) - first, len(dst) - done)
            store(dst[done : done + n], part[first : first + n])
            done, first = done + n, 0
            if done == len(dst):
                return

    return Rows(sum(map(len, slices)), fill)


class StepInput(Struct, frozen=True, kw_only=True):
    """The arguments of `Session.append`, which documents them."""

    prompt_token_ids: Any = None
    response_token_ids: Any = None
    logprobs: Any = None
    loss_mask: Any = None
    routed_experts: Any = None
    routed_experts_start: int = 0
    weight_version: Any = None
    messages: Sequence[Any] | None = None
    tools: Sequence[Any] | None = None
    finish_reason: str | None = None
    step_id: str | None = None
    parent: str | int | StepRef | None = None
    units: Sequence[Any] = ()
    fields: Mapping[str, Any] | None = None
    metadata: Mapping[str, Any] | None = None


class Intake(Struct, frozen=True):
    """One step, checked.

    Attributes:
        prompt, response: int32 token ids; both empty for a step of messages only.
        n_rows: rows of the forward over both, units expanded.
        sources: rows by field.
        versions: weight versions of the response, absolute positions, tiling it; empty where unknown.
        units: multimodal units of the prompt by position.
        n_nonfinite: NaN and infinite logprobs.
        messages: the full list, one JSON text a message.
        tools: tool schemas as JSON, or nothing.
        cleared: which response tokens the stored loss mask clears; nothing where none.
    """

    prompt: NDArray[np.int32]
    response: NDArray[np.int32]
    n_rows: int
    sources: dict[str, Source]
    versions: tuple[VersionSpan, ...]
    units: tuple[Unit, ...]
    n_nonfinite: int
    messages: tuple[bytes, ...]
    tools: bytes
    cleared: bytes = b""

    def signature(self, *others: Any) -> bytes:
        """Return a digest of the whole content and of ``others``, 16 bytes: equal for an append of the same step again.

        Args:
            others: what a step consists of besides.

        Raises:
            InputError: it holds what no record can: text with a lone surrogate, an object, a huge integer.
        """
        sources = {name: self.sources[name].digest() for name in sorted(self.sources)}
        tokens = (self.prompt.tobytes(), self.response.tobytes())
        whole = (tokens, sources, self.versions, self.units, self.messages, self.tools, others)
        try:
            return xxhash.xxh3_128_digest(msgspec.msgpack.encode(whole))
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(f"the step cannot be recorded: {error}; pass JSON-able facts") from error


def take(schema: Schema, step: StepInput, *, prefer: str, what: str) -> Intake:
    """Check one append against ``schema`` and return it as an `Intake`.

    Args:
        schema: the session's fields; a declared field that the spool does not store is not among them.
        step: the arguments of the append.
        prefer: which of two chunks of this call that overlap is kept, ``first`` or ``last``.
        what: how errors name the step, e.g. ``step 3 of session 'u1'``.

    Raises:
        PayloadError: an array does not fit; names field, step, token, layer and value.
        InputError: another argument does not fit.
    """
    prompt = _token_ids(step.prompt_token_ids, f"prompt_token_ids of {what}")
    response = _token_ids(step.response_token_ids, f"response_token_ids of {what}")
    n_prompt, n_tokens = len(prompt), len(prompt) + len(response)
    units = _units(step.units, n_prompt, what)
    n_rows = n_tokens + sum(unit.n_rows - 1 for unit in units)
    if n_rows >= MOST:
        raise InputError(
            f"{what} has {n_rows} rows, {n_tokens} tokens and what its units expand to: a step has fewer than {MOST}",
            step=what, got=n_rows,
        )  # fmt: skip
    sources: dict[str, Source] = {}
    if n_tokens:
        parts = ((0, prompt), (n_prompt, response))
        sources["token_ids"] = Source(TOKEN_IDS, tuple(part for part in parts if len(part[1])), np.copyto)
    n_nonfinite, cleared = 0, b""
    if step.logprobs is not None:
        probs = arrays.as_floats(step.logprobs, what=f"logprobs of {what}")
        _check_count("logprobs", len(probs), len(response), what)
        n_nonfinite = arrays.count_nonfinite(probs)
        sources["logprobs"] = Source(LOGPROBS, ((n_prompt, probs),), np.copyto)
    if step.loss_mask is not None:
        mask = _loss_mask(step.loss_mask, n_prompt, len(response), what)
        if not mask.all() and LOSS_MASK.name in schema:
            cleared = pack_cleared(mask)
            sources["loss_mask"] = Source(LOSS_MASK, ((n_prompt, mask),), np.copyto)
    if step.routed_experts is not None and ROUTED_EXPERTS in schema:
        start = step.routed_experts_start
        sources[ROUTED_EXPERTS] = _forward(schema[ROUTED_EXPERTS], step.routed_experts, n_rows, start, what, prefer)
    for name, value in (step.fields or {}).items():
        if name in schema:
            sources[name] = _user_field(schema[name], value, (n_prompt, n_tokens, n_rows), what, prefer)
    versions = _versions(step.weight_version, n_prompt, n_tokens, what)
    return Intake(
        prompt=prompt,
        response=response,
        n_rows=n_rows,
        sources={name: source for name, source in sources.items() if name in schema and source.pieces},
        versions=versions or _chunk_versions(step.routed_experts, (n_prompt, n_tokens, n_rows), what),
        units=units,
        n_nonfinite=n_nonfinite,
        messages=_messages(step.messages, what),
        tools=messages.encode_message(list(step.tools), what=f"tools of {what}") if step.tools else b"",
        cleared=cleared,
    )


def check_plain(step: StepInput, what: str) -> None:
    """Refuse arguments that are not of their types, which a record could not hold."""
    for name in ("finish_reason", "step_id"):
        value = getattr(step, name)
        if value is not None and not isinstance(value, str):
            raise InputError(
                f"{name} of {what} must be text, got {value!r:.80}; engines' forms go through spool.engines"
            )
    if step.step_id == "":
        raise InputError(f"step_id of {what} is empty: leave it out, or give the step a name of its own")
    if isinstance(step.parent, bool) or not isinstance(step.parent, _PARENT):
        raise InputError(f"parent of {what} must be a step's id, index or reference, got {step.parent!r:.80}")
    tools = step.tools
    if tools is not None and (isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Iterable)):
        raise InputError(f"tools of {what} must be a list of tool schemas, got {tools!r:.80}")
    for name in ("fields", "metadata"):
        value = getattr(step, name)
        if value is not None and not isinstance(value, Mapping):
            raise InputError(f"{name} of {what} must be a mapping, got {value!r:.80}")
    start = step.routed_experts_start
    if isinstance(start, bool) or not isinstance(start, int | np.integer):
        raise InputError(f"routed_experts_start of {what} must be an integer, got {start!r:.80}")


def _messages(given: Any, what: str) -> tuple[bytes, ...]:
    if given is None:
        return ()
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise InputError(f"messages of {what} must be a list of chat messages, got {type(given).__name__}")
    found = list(given)
    for i, message in enumerate(found):
        if not isinstance(message, Mapping) and not hasattr(message, "model_dump"):
            raise InputError(f"message {i} of {what} must be a mapping with role and content, got {message!r:.80}")
    return tuple(messages.encode_message(message, what=f"message {i} of {what}") for i, message in enumerate(found))


def _token_ids(value: Any, what: str) -> NDArray[np.int32]:
    return arrays.as_token_ids(() if value is None else value, what=what)


def _check_count(field: str, got: int, expected: int, what: str) -> None:
    if got != expected:
        raise PayloadError(
            f"{field} of {what} has {got} entries for {expected} response tokens; send one a response token",
            field=field, expected=expected, got=got, step=what,
        )  # fmt: skip


def _loss_mask(value: Any, n_prompt: int, n_response: int, what: str) -> NDArray[np.uint8]:
    """Return the response's mask; one over the whole step is taken where it is 0 on the prompt."""
    mask = arrays.as_array(value, what=f"loss_mask of {what}")
    if mask.ndim != 1 or mask.dtype.kind not in "biuf":
        raise PayloadError(f"loss_mask of {what} must be one-dimensional 0/1 numbers, got {mask.dtype} {mask.shape}")
    if len(mask) == n_prompt + n_response and n_prompt and not mask[:n_prompt].any():
        mask = mask[n_prompt:]
    _check_count("loss_mask", len(mask), n_response, what)
    ones = mask == 1
    wrong = np.flatnonzero(~ones & (mask != 0))
    if len(wrong):
        raise PayloadError(
            f"loss_mask of {what} has {mask[wrong[0]]!r} at response token {wrong[0]}; only 0 and 1 are allowed",
            field="loss_mask", step=what, token=int(wrong[0]),
        )  # fmt: skip
    cleared: NDArray[np.uint8] = ones.astype(np.uint8)
    return cleared


def _forward(spec: FieldSpec, payload: Any, n_rows: int, start: int, what: str, prefer: str) -> Source:
    pieces = experts.pieces(payload, spec, n_rows=n_rows, start=start, what=what)
    return Source(spec, _disjoint(pieces, prefer), lambda dst, src: experts.store(dst, src, spec))


def _is_chunks(payload: Any) -> bool:
    return isinstance(payload, list | tuple) and bool(payload) and all(isinstance(p, experts.Chunk) for p in payload)


def _disjoint(pieces: Sequence[tuple[int, NDArray[Any]]], prefer: str) -> tuple[tuple[int, NDArray[Any]], ...]:
    """Return the pieces ascending; where chunks of one call overlap, the preferred one stays whole."""
    if len(pieces) < 2:
        return tuple(pieces)
    kept: list[tuple[int, NDArray[Any]]] = []
    for position, rows in pieces[:: 1 if prefer == "first" else -1]:
        holes = [(position, position + len(rows))]
        for other, taken in kept:
            holes = [
                part
                for low, high in holes
                for part in ((low, min(high, other)), (max(low, other + len(taken)), high))
                if part[0] < part[1]
            ]
        kept.extend((low, rows[low - position : high - position]) for low, high in holes)
    return tuple(sorted(kept, key=lambda piece: piece[0]))


def _user_field(spec: FieldSpec, value: Any, lengths: tuple[int, int, int], what: str, prefer: str) -> Source:
    n_prompt, n_tokens, n_rows = lengths
    if spec.align == "forward" and not spec.ragged:
        return _forward(spec, value, n_rows, 0, what, prefer)
    first, count = {
        "token": (0, n_tokens),
        "response": (n_prompt, n_tokens - n_prompt),
        "forward": (0, max(n_rows - 1, 0)),
        "step": (0, 1),
    }[spec.align]
    if spec.ragged:
        return _ragged(spec, value, first, count, what)
    rows = arrays.as_array(value, what=f"{spec.name} of {what}")
    if spec.align == "step":
        rows = rows[None]
    if rows.ndim == 0 or len(rows) != count:
        got = rows.shape[0] if rows.ndim else "a scalar"
        raise PayloadError(
            f"{spec.name} of {what} has {got} rows, expected {count} ({spec.align}-aligned)",
            field=spec.name, expected=count, got=got, step=what,
        )  # fmt: skip
    values.check_values(rows, spec, what=what, position=first)
    return Source(spec, ((first, rows),) if count else (), lambda dst, src: experts.store(dst, src, spec))


def _ragged(spec: FieldSpec, value: Any, first: int, count: int, what: str) -> Source:
    if spec.align == "step":
        value = [value]
    joined, ends = arrays.ragged(value, spec, what=what, position=first)
    if len(ends) != count:
        raise PayloadError(
            f"{spec.name} of {what} has {len(ends)} rows, expected {count} ({spec.align}-aligned)",
            field=spec.name, expected=count, got=len(ends), step=what,
        )  # fmt: skip
    return Source(spec, ((first, joined),), arrays.copy_rows, ends)


def _units(units: Sequence[Any], n_prompt: int, what: str) -> tuple[Unit, ...]:
    try:
        named = [Unit(str(key), int(at), int(n)) for key, at, n in units]
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"units of {what} must be (key, position, n_rows) each, got {units!r}") from error
    if not named:
        return ()
    placed = tuple(sorted(named, key=lambda unit: unit.position))
    for unit in placed:
        if not 0 <= unit.position < n_prompt or not 1 <= unit.n_rows < MOST or not unit.key:
            raise InputError(
                f"unit {unit.key!r:.80} of {what} must lie in the prompt's {n_prompt} tokens and expand to at least "
                f"one row, and fewer than {MOST}"
            )
    if len({unit.position for unit in placed}) < len(placed):
        raise InputError(f"two units of {what} share a token: {placed}")
    return placed


def _versions(given: Any, n_prompt: int, n_tokens: int, what: str) -> tuple[VersionSpan, ...]:
    """Return the spans of ``given``: one version, or ``(version, start, stop)`` that tile the response."""
    if given is None:
        return ()
    if isinstance(given, str | int) and not isinstance(given, bool):
        return (VersionSpan(_version(given, what), n_prompt, n_tokens),) if n_tokens > n_prompt else ()
    try:
        named = [(v, operator.index(start), operator.index(stop)) for v, start, stop in given if v is not None]
    except (TypeError, ValueError) as error:
        raise InputError(
            f"weight_version of {what} must be one version, or (version, start, stop) spans, got {given!r:.80}"
        ) from error
    spans = [(_version(v, what), start, stop) for v, start, stop in named]
    _check_tiling(spans, n_tokens - n_prompt, what)
    return tuple(VersionSpan(v, n_prompt + start, n_prompt + stop) for v, start, stop in spans if stop > start)


def _version(given: Any, what: str) -> str:
    """Return a weight version as text, which an index takes as it is."""
    try:
        found = str(given)
    except ValueError:  # Python writes no number with thousands of digits
        found = "0" * (MAX_TEXT_BYTES + 1)
    if len(found.encode(errors="surrogatepass")) > MAX_TEXT_BYTES:
        raise InputError(
            f"weight_version of {what} must be at most {MAX_TEXT_BYTES} bytes of text, got {found[:40]!r}...: "
            "a step's number, or a hash, is enough",
            argument="weight_version",
        )
    return found


def _check_tiling(spans: Sequence[tuple[str, int, int]], n: int, what: str) -> None:
    """Refuse version spans that are not ``[0, n)`` cut into pieces, in order."""
    at = 0
    for number, (version, start, stop) in enumerate(spans):
        if number and start < at:
            other, low, high = spans[number - 1]
            raise PayloadError(
                f"weight_version spans of {what} overlap: {other!r} has response tokens [{low}, {high}) and "
                f"{version!r} has [{start}, {stop}); every generated token has one version",
                field="weight_version", step=what, token=start,
            )  # fmt: skip
        if start != at or stop < start:
            break
        at = stop
    else:
        if at == n:
            return
    raise PayloadError(
        f"weight_version spans of {what} cover {at} of {n} response tokens in order; "
        "every generated token needs one version",
        field="weight_version", expected=n, got=at, step=what,
    )  # fmt: skip


def _chunk_versions(payload: Any, lengths: tuple[int, int, int], what: str) -> tuple[VersionSpan, ...]:
    """Return the versions that chunks imply: row p generated the token behind it, the earliest chunk first."""
    if not _is_chunks(payload) or any(chunk.weight_version is None for chunk in payload):
        return ()
    at, n_tokens, n_rows = lengths
    chunks = sorted(payload, key=lambda chunk: chunk.start)
    expanded = n_rows - n_tokens  # rows that units stand for beyond their tokens, all of them in the prompt
    spans = []
    for chunk, after in zip(chunks, [*chunks[1:], None], strict=True):
        rows_end = chunk.start + len(chunk.rows)
        stop = n_tokens if after is None else min(rows_end, after.start) + 1 - expanded
        if stop > at:
            spans.append(VersionSpan(_version(chunk.weight_version, what), at, min(stop, n_tokens)))
            at = stop
    return tuple(spans)


def check_ragged(source: Source, sizes: Layout, what: str) -> None:
    """Refuse a ragged field of one step that a shard cannot hold: its rows and values stay together.

    Raises:
        PayloadError: it cannot.
    """
    if source.ends is None:
        return
    name, n_rows, n_values = source.spec.name, len(source.ends), len(source.pieces[0][1])
    max_rows, max_values = sizes.shard_rows[f"{name}.offsets"], sizes.shard_rows[f"{name}.values"]
    if n_rows > max_rows or n_values > max_values:
        raise PayloadError(
            f"{name} of {what} has {n_rows} rows with {n_values} values; one step holds at most {max_rows} "
            f"and {max_values}",
            field=name, step=what, got=[n_rows, n_values], expected=[max_rows, max_values],
        )  # fmt: skip


def json_facts(facts: Mapping[str, Any] | None, what: str) -> dict[str, Any]:
    """Return a copy of JSON-able ``facts``, as an event can hold it.

    Raises:
        InputError: one cannot be recorded; names it, and ``what`` it is in.
    """
    if not facts:
        return {}
    try:
        return _recordable(dict(facts), what)
    except InputError:
        for name, value in facts.items():
            _recordable({name: value}, f"{name!r:.80} in {what}")
        raise


def _recordable(facts: dict[str, Any], what: str) -> dict[str, Any]:
    text = messages.encode_message(facts, what=what)
    copy: dict[str, Any] = messages.decode_messages(b"[" + text + b"]")[0]
    try:
        msgspec.msgpack.encode(copy)
    except (ValueError, OverflowError) as error:
        raise InputError(
            f"{what} cannot be recorded: {error}; pass text without lone surrogates, and integers of 64 bits"
        ) from error
    return copy


def content_key(data: bytes) -> str:
    """Return the key under which content is stored once: 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)
