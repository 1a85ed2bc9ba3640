"""One model invocation as an engine reported it, and how its parts are read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from spool.engines.members import Json, Members, as_count, as_members, refused
from spool.engines.wires import decode_routing
from spool.errors import InputError, PayloadError
from spool.formats.arrays import as_floats
from spool.model.moe import MoEShape, as_shape

Response: TypeAlias = Mapping[str, Any] | str | bytes
WeightVersion: TypeAlias = str | tuple[tuple[str, int, int], ...]

_QUOTED = 300  # characters of what is no response that an error shows


class EngineStep(Struct, frozen=True, kw_only=True, eq=False):
    """Keyword arguments of `Session.append`: ``session.append(**step)``.

    What is None is left out. Add your own with ``{**step, "messages": messages}``.

    Attributes:
        prompt_token_ids, response_token_ids: int32, one dimension.
        logprobs: float32, one a response token.
        routed_experts: ``[rows, layers, topk]`` in the dtype it was sent in; not yet checked against the tokens.
        routed_experts_start: forward row that row 0 stands for, as asked for or as the payload says.
        weight_version: a version, or ``(version, start, stop)`` spans over the response tokens.
        finish_reason: as the engine gave it.
        metadata: what else is worth keeping: ``cached_tokens``, ``finish_message``.
    """

    prompt_token_ids: NDArray[np.int32] | None = None
    response_token_ids: NDArray[np.int32] | None = None
    logprobs: NDArray[np.float32] | None = None
    routed_experts: NDArray[Any] | None = None
    routed_experts_start: int = 0
    weight_version: WeightVersion | None = None
    finish_reason: str | None = None
    metadata: dict[str, Any] | None = None

    def keys(self) -> tuple[str, ...]:
        """Return the names of the arguments that are set."""
        return tuple(name for name in self.__struct_fields__ if getattr(self, name) is not None)

    def __getitem__(self, name: str) -> Json:
        if name not in self.__struct_fields__:
            raise KeyError(name)
        return getattr(self, name)


def make_step(
    *,
    prompt: NDArray[np.int32] | None,
    response: NDArray[np.int32],
    logprobs: object,
    routing: object,
    routing_dtype: str | None,
    start: int,
    experts: MoEShape | None,
    version: WeightVersion | None,
    finish_reason: str | None,
    metadata: Mapping[str, Any],
) -> EngineStep:
    """Convert what a reader found in a response.

    Args:
        prompt: token ids, or None where the response does not hold them and the caller gave none.
        response: token ids.
        logprobs: of the response, or None.
        routing: payload in any form of `decode_routing`, or None.
        routing_dtype: what the response says about it.
        start: forward row the caller asked for.
        experts: the model's shape.
        version: of the response.
        finish_reason: as given.
        metadata: entries that are None are dropped.

    Raises:
        PayloadError: a part does not fit.
        InputError: there are no prompt ids.
    """
    if prompt is None:
        raise InputError("the response does not hold the prompt's token ids: pass prompt_token_ids=")
    rows = None
    if routing is not None:
        rows, said = decode_routing(routing, experts=experts, dtype=routing_dtype)
        start = start if said is None else said
        if not len(rows) and (finish_reason == "abort" or not len(response)):
            rows = None
    kept = {key: value for key, value in metadata.items() if value is not None}
    return EngineStep(
        prompt_token_ids=prompt,
        response_token_ids=response,
        logprobs=None if logprobs is None else as_floats(logprobs, what="logprobs"),
        routed_experts=rows,
        routed_experts_start=0 if rows is None else start,
        weight_version=_version_of(version, len(response)),
        finish_reason=finish_reason,
        metadata=kept or None,
    )


class Asked(NamedTuple):
    """What the caller of a reader says beside the response.

    Attributes:
        request: the members of the request's body.
        start: forward row that routing was asked for from.
        experts: the model's shape.
    """

    request: Members
    start: int
    experts: MoEShape | None


def as_asked(request: object, start: object, experts: object, *, start_key: str) -> Asked:
    """Check the arguments that all readers have.

    Args:
        request: the request's body, or None.
        start: as the caller gave it.
        experts: the model's shape, its name, or None.
        start_key: what the engine calls the start in a request, where the caller gave none.

    Raises:
        InputError: one of them is of another type.
        NotFoundError: no model of that name is known.
    """
    shape, body = as_shape(experts), as_members(request, "request")
    return Asked(body, as_count(start, "routed_experts_start") or body.count(start_key) or 0, shape)


def as_response(response: Response) -> Members:
    """Return the members of a response; JSON text is parsed, base64 stays one string.

    Raises:
        InputError: it is neither a mapping nor JSON text of one; quotes how it begins.
        PayloadError: it is what a server says instead of a response; quotes that.
    """
    value: Any = response
    if isinstance(response, (str, bytes)):
        try:
            value = msgspec.json.decode(response)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            # Python servers write NaN, -Infinity and lone surrogates, which strict JSON has not.
            try:
                value = json.loads(response)
            except (ValueError, RecursionError) as error:
                head = response[:_QUOTED]
                shown = head.decode("utf-8", "replace") if isinstance(head, bytes) else head
                raise InputError(f"the response is not JSON ({error}); it begins {shown!r}", got=shown) from error
    if isinstance(value, list | tuple):
        raise InputError(f"got a list of {len(value)} responses; pass one of them at a time")
    if not isinstance(value, Mapping):
        raise InputError(f"a response is a mapping or its JSON text, got {type(value).__name__}")
    said = _server_error(value)
    if said is not None:
        raise PayloadError(f"the server sent an error instead of a response: {said}", field="error", got=said)
    return Members(value)


def _server_error(body: Mapping[str, Any]) -> str | None:
    """Return the error that a body is, whichever way a server or proxy words it; None where it is a response."""
    if body.get("choices") or body.get("meta_info"):
        return None
    error = body.get("error") or next((body[key] for key in ("message", "detail") if _is_words(body.get(key))), None)
    if isinstance(error, Mapping):
        error = error.get("message") or error
    return None if not error else str(error)[:_QUOTED]


def _is_words(value: object) -> bool:
    # the message of a choice is an object, and the details of a refused request are a list of them
    return isinstance(value, str) or (isinstance(value, list) and bool(value) and isinstance(value[0], Mapping))


def reason(given: Json, path: str) -> tuple[str | None, str | None]:
    """Return a finish reason and its message: engines send a string, an object with ``type``, or null.

    Raises:
        PayloadError: it is something else.
    """
    if given is None or isinstance(given, str):
        return given, None
    if not isinstance(given, Mapping):
        raise refused(path, "a string or an object with type", given)
    found = as_members(given, path)
    return found.text("type"), found.text("message")


def version(holders: Sequence[Members]) -> WeightVersion | None:
    """Return the weight version that the first holder says, or its ``weight_versions`` spans where one has them.

    Raises:
        PayloadError: either is malformed.
    """
    spans = next((found for found in (holder.list("weight_versions") for holder in holders) if found is not None), ())
    single = next((found for found in map(_single, holders) if found is not None), None)
    return tuple(span for each in spans if (span := _span(each))[2] > span[1]) or single


def _single(holder: Members) -> str | None:
    return _name(holder.get("weight_version"), holder.at("weight_version"))


def _span(value: Json) -> tuple[str, int, int]:
    span = as_members(value, "weight_versions[]")
    name, start, stop = _name(span.get("version"), span.at("version")), span.count("start"), span.count("end")
    if name is None or start is None or stop is None or start > stop:
        raise PayloadError(f"weight_versions: {value!r:.80} is not {{version, start, end}}", field="weight_versions")
    return name, start, stop


def _name(value: Json, path: str) -> str | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, str | int)):
        raise refused(path, "a string or an integer", value)
    return None if value is None else str(value)


def _version_of(found: WeightVersion | None, n_response: int) -> WeightVersion | None:
    if not isinstance(found, tuple):
        return found
    edges = [0, *(stop for _, _, stop in found)]
    if edges[-1] != n_response or any(start != edge for (_, start, _), edge in zip(found, edges, strict=False)):
        raise PayloadError(
            f"weight_versions {list(found)} do not tile the {n_response} response tokens",
            field="weight_versions", expected=n_response, got=list(found),
        )  # fmt: skip
    return found if len(found) > 1 else found[0][0]
