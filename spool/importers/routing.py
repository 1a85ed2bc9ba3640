"""Recorded router decisions: ``.npz`` files with the tokens, turns, logprobs and experts of a conversation."""

from __future__ import annotations

import json
import logging
import os
import re
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from spool.errors import InputError, PayloadError
from spool.importers.base import ImportedRun, ImportedStep, given
from spool.importers.detect import ROUTING, UnknownFormError
from spool.model.moe import MoEShape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from spool.importers.base import Origin

_log = logging.getLogger(__name__)

_NEEDED = ("token_ids", "routed_experts", "turn_role", "turn_content_start", "turn_content_end")
_ROWS = (*_NEEDED, "logprobs", "turn_start", "turn_end", "assistant_mask")
_FOLDER = re.compile(r"(\d+)L_(\d+)E")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOPK = ("num_experts_per_tok", "moe_topk", "moe_top_k")


def parse_routing(path: str, origin: Origin) -> ImportedRun:
    """Read one conversation; the content of every assistant turn is a step.

    A step's prompt is all tokens before the content, so each extends the one before it by the marks and turns between;
    it brings the forward rows that the steps before it did not bring. Tokens behind the last assistant turn belong to
    no step; ``n_tokens_dropped`` counts them, in the metadata, too.

    The model's shape comes from ``<folder>.config.json`` beside the file's folder or ``config.json`` in it, else from
    the folder's name (``..._12L_256E``), else, with a warning, from the largest id.

    Raises:
        UnknownFormError: the file holds other arrays.
        InputError: it cannot be read, or its parts do not fit each other.
    """
    arrays = _load(path, origin)
    tokens, rows = arrays["token_ids"], arrays["routed_experts"]
    turns = _turns(arrays, origin)
    experts, experts_from = _shape_of(path, rows, origin)
    logprobs = arrays.get("logprobs")
    made: list[ImportedStep] = []
    known = 0
    for start, stop in turns:
        first = max(known - 1, 0)
        made.append(
            ImportedStep(
                step_id=str(len(made)),
                prompt_token_ids=tokens[:start],
                response_token_ids=tokens[start:stop],
                logprobs=None if logprobs is None else logprobs[start:stop],
                routed_experts=rows[first : max(stop - 1, 0)],
                routed_experts_start=first,
            )
        )
        known = stop
    roles, ends = arrays["turn_role"], arrays.get("turn_end")
    cut = ends is not None and len(ends) and roles[-1] == "assistant" and ends[-1] == arrays["turn_content_end"][-1]
    facts = {name: array.item() for name, array in arrays.items() if name not in _ROWS and array.ndim == 0}
    dropped = len(tokens) - known
    return ImportedRun(
        session_id=origin.session_id,
        source=ROUTING,
        steps=tuple(made),
        outcome="truncated" if cut else "completed",
        facts=given(recorded_from=facts.pop("source", None)),
        experts=experts,
        metadata={**facts, "experts_from": experts_from, "n_tokens_dropped": dropped},
        n_tokens_dropped=dropped,
    )


def _load(path: str, origin: Origin) -> dict[str, NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in _NEEDED if name not in file.files]
            if missing:
                raise UnknownFormError(
                    f"{origin.session_id} is an .npz file of {', '.join(file.files) or 'nothing'}; a routing "
                    f"archive has {', '.join(_NEEDED)}",
                    plain="routed_experts" not in file.files, where=origin.session_id,
                )  # fmt: skip
            arrays = {name: file[name] for name in file.files}
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{origin.session_id} is a damaged .npz file: {error}", where=origin.session_id) from error
    n_tokens = len(arrays["token_ids"]) if arrays["token_ids"].ndim == 1 else -1
    n_turns = len(arrays["turn_role"]) if arrays["turn_role"].ndim == 1 else -1
    lengths = {
        "token_ids": n_tokens, "logprobs": n_tokens, "assistant_mask": n_tokens,
        "turn_role": n_turns, "turn_start": n_turns, "turn_content_start": n_turns, "turn_content_end": n_turns,
        "turn_end": n_turns,
    }  # fmt: skip
    for name, expected in lengths.items():
        if name in arrays and arrays[name].shape != (expected,):
            raise PayloadError(
                f"{origin.session_id}: {name} has shape {arrays[name].shape}, expected ({expected},)",
                field=name, expected=[expected], got=list(arrays[name].shape),
            )  # fmt: skip
    rows = arrays["routed_experts"]
    if rows.ndim != 3 or len(rows) not in (max(n_tokens - 1, 0), n_tokens):
        raise PayloadError(
            f"{origin.session_id}: routed_experts has shape {rows.shape}, expected [{n_tokens - 1}, layers, topk]",
            field="routed_experts", expected=n_tokens - 1, got=list(rows.shape),
        )  # fmt: skip
    return arrays


def _turns(arrays: Mapping[str, NDArray[Any]], origin: Origin) -> list[tuple[int, int]]:
    """Return the content of every assistant turn as token range; the mask, if there is one, must say the same."""
    said = arrays["turn_role"] == "assistant"
    starts, stops = arrays["turn_content_start"][said], arrays["turn_content_end"][said]
    n_tokens = len(arrays["token_ids"])
    edges = np.stack((starts, stops), axis=1).astype(np.int64).ravel()
    if edges.size and (edges[0] < 0 or edges[-1] > n_tokens or (np.diff(edges) < 0).any()):
        raise InputError(
            f"{origin.session_id}: assistant turns do not ascend within {n_tokens} tokens: {edges.tolist()}"
        )
    mask = arrays.get("assistant_mask")
    if mask is not None:
        steps = np.zeros(n_tokens + 1, np.int64)
        np.add.at(steps, edges[::2], 1)
        np.add.at(steps, edges[1::2], -1)
        differs = np.flatnonzero(steps.cumsum()[:-1] != mask)
        if differs.size:
            raise InputError(f"{origin.session_id}: assistant_mask and the turns disagree at token {differs[0]}")
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def _shape_of(path: str, rows: NDArray[Any], origin: Origin) -> tuple[MoEShape, str]:
    layers, topk = rows.shape[1:]
    folder = os.path.dirname(path)
    named = _FOLDER.search(os.path.basename(folder))
    found = _config(folder)
    if found is not None:
        shape, source = moe_shape(*found), os.path.basename(found[1])
    elif named is not None:
        shape, source = MoEShape(int(named[1]), int(named[2]), topk), "folder name"
    else:
        largest = int(rows.max()) if rows.size else topk - 1
        shape, source = MoEShape(layers, max(largest + 1, topk), topk), "largest id"
        _log.warning(
            "%s: no config.json tells the number of experts; taking %d from the largest id",
            origin.session_id,
            largest + 1,
        )
    if layers not in (shape.num_layers, shape.stored_layers) or topk != shape.topk:
        raise InputError(
            f"{origin.session_id}: routed_experts has {layers} layers x {topk} experts, but {source} says "
            f"{shape.num_layers} x {shape.topk}",
            expected=[shape.num_layers, shape.topk], got=[layers, topk],
        )  # fmt: skip
    return shape, source


def _config(folder: str) -> tuple[dict[str, Any], str] | None:
    for path in (f"{folder}.config.json", os.path.join(folder, "config.json")):
        if os.path.exists(path):
            try:
                with open(path, encoding="utf-8") as file:
                    config = json.load(file)
            except (OSError, ValueError) as error:
                raise InputError(f"{path} cannot be read: {error}", path=path) from error
            if isinstance(config, dict):
                return config, path
    return None


def moe_shape(config: Mapping[str, Any], path: str) -> MoEShape:
    """Return the routing shape that a model's ``config.json`` describes.

    Args:
        config: as parsed; the text part of a multimodal one.
        path: names it in errors.

    Raises:
        InputError: it does not describe an MoE model.
    """
    text = config.get("text_config")
    if isinstance(text, dict):
        config = text
    layers = config.get("num_hidden_layers")
    experts = next((config[name] for name in _EXPERTS if config.get(name)), None)
    topk = next((config[name] for name in _TOPK if config.get(name)), None)
    if not isinstance(layers, int) or not isinstance(experts, int) or not isinstance(topk, int):
        raise InputError(
            f"{path} does not say num_hidden_layers, {_EXPERTS[0]} and {_TOPK[0]}: it has {layers}, {experts}, {topk}",
            path=path,
        )
    dense = set(config.get("mlp_only_layers") or ()) | set(range(config.get("first_k_dense_replace") or 0))
    every = config.get("decoder_sparse_step") or 1
    moe = tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % every == 0)
    return MoEShape(layers, experts, topk, None if len(moe) == layers else moe)
