"""`restore`: a batch of references as the arrays that a trainer takes, read in one pass."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from spool.arguments import instance, integer, names, one_of, optional, refused
from spool.errors import InputError
from spool.model.fields import ROUTED_EXPERTS
from spool.model.refs import Ref
from spool.read.fetch import Verify
from spool.train.planning.ranks import RankSlice, rank_of
from spool.train.restoring import layouts
from spool.train.restoring.entries import Entry, Lengths, check_drop, entries_of, kept
from spool.train.restoring.fields import expert_spec
from spool.train.restoring.gaps import Missing
from spool.train.restoring.handles import handle
from spool.train.restoring.layouts import VERSIONS, Layout
from spool.train.restoring.lazy import LazyRouting
from spool.train.restoring.reading import Rules, make_plan, read_batch
from spool.train.restoring.tensors import Framework, converter
from spool.train.restoring.versions import VersionOrder, check_mask_versions, version_order

if TYPE_CHECKING:
    from spool.handle import Spool
    from spool.model.moe import MoEShape


def restore(
    sp: Spool | str | os.PathLike[str],
    refs: Ref | Sequence[Ref | None],
    layout: Layout = "slime",
    *,
    fields: Sequence[str] | None = None,
    lengths: Lengths | None = None,
    experts: MoEShape | str | None = None,
    rank_slice: RankSlice | None = None,
    framework: Framework = "numpy",
    device: Any = None,
    missing: Missing = "error",
    version: str | int | Sequence[str] | None = None,
    mask_versions: Literal["all", "last"] | int = "all",
    drop: Sequence[str] = (),
    max_staleness: int | None = None,
    lazy: bool = False,
    verify: Verify = "whole",
) -> dict[str, Any]:
    """Return a batch in the form of a trainer: one read, in which rows that references share are fetched once.

    Every array is writable, C-contiguous, and shares memory with no other. Of the response region are loss masks,
    log probabilities (float32, 0.0 on observations), weight versions and staleness, but for ``nested`` and ``packed``,
    which have the masks and versions of all tokens. Routing has a row for each token but the last, int32, absolute
    layers.

    ========== ======================================================================================================
    layout     what is returned
    ========== ======================================================================================================
    ``slime``  lists by ``tokens``, ``loss_masks``, ``rollout_log_probs``, ``rollout_routed_experts``; with
               ``total_lengths``, ``response_lengths``, ``truncated``, and ``sample_indices`` and ``rewards`` where all
               references know theirs
    ``miles``  the same; a row of routing that is missing is -1 with ``missing="mask"``
    ``verl``   ``input_ids``, ``prompts``, ``responses``, ``response_mask``, ``position_ids``, ``attention_mask``,
               ``rollout_log_probs``, ``routed_experts`` (uint8 or int16); jagged nested tensors, with numpy lists
    ``nested`` the fields by their own names, jagged nested tensors, with numpy lists
    ``packed`` the fields by their own names, one array each, a row a token (of routing a row of the forward, the last
               one filled), ``cu_seqlens``, ``cu_rows``, ``max_seqlen``, ``position_ids``
    ========== ======================================================================================================

    Fields with any number of values a row are `Ragged` in all. All have ``kept``: which of ``refs`` are in the batch;
    ``weight_versions``: int64, -1 for none, with ``version_names`` by number where versions are no numbers; and with
    ``version`` also ``staleness``.

    Args:
        sp: an open spool, or its URI: that is opened once a process.
        refs: references of one spool; None for a sample that failed: all is 0, its mask too.
        layout: whose form.
        fields: names, as `Spool.read` takes them, and ``weight_versions`` or ``staleness``; all that any reference has
            where None.
        lengths: where ``refs`` has None ``(n_tokens, response_length)``, else None.
        experts: the routing shape, needed only where no reference has routing.
        rank_slice: the tokens and layers of one rank; sequences are counted in tokens, not in rows of units. Lengths
            stay those of whole sequences.
        framework: ``numpy`` or ``torch``.
        device: of torch: stored, narrow bytes are copied there, and widened there. Where None tensors are on the CPU.
        missing: rows that were never sent: ``error``; ``arange``, consecutive experts stand for missing routing;
            ``mask``, that too, 0 for other fields, and tokens are not trained that have no row, or that the forward
            predicted of which there is none.
        version: of the current weights, for ``staleness``; or all versions, oldest first, where they are no numbers.
        mask_versions: tokens of ``all`` weights train, those of a segment's ``last`` ones, or those that are at most so
            many versions behind ``version``.
        drop: segments to leave out, by outcome, or as ``superseded``, ``nonfinite`` (log probabilities) or
            ``untrained``: those of which no token can train (``trainable_tokens`` is 0).
        max_staleness: segments to leave out too: whose oldest weights are further behind ``version``.
        lazy: routing is a `LazyRouting` that reads a layer when asked; rows that are missing are consecutive experts
            in it, in all layouts.
        verify: as in `Spool.read`.

    Raises:
        InputError: an argument does not fit; nothing was read.
        GapError: rows were never sent for which nothing may stand.
        NotFoundError, ReleasedError, IntegrityError, StorageError: as `Spool.read`.
    """
    convert = converter(framework, device)
    rank = rank_of(rank_slice)
    _check_choices(layout, missing, mask_versions, lazy)
    shape, asked = expert_spec(experts), optional(names, "fields", fields)
    entries, reasons = entries_of(refs, lengths), check_drop(drop)
    order = version_order([entry.ref for entry in entries], version)
    _check_current(order, mask_versions, optional(integer, "max_staleness", max_staleness))
    entries = kept(entries, reasons, max_staleness, order)
    spool = handle(sp)
    form = layouts.FORMS[layout]
    plan = make_plan(spool, entries, asked, shape, missing, order, packed=form.joined == "packed")
    routing = None
    if lazy and ROUTED_EXPERTS in plan.specs:
        routing = _lazy(
            spool, entries, rank, missing, experts=experts, framework=framework, device=device, verify=verify
        )
        plan = plan.without(ROUTED_EXPERTS)
    ids, narrow = missing != "mask" or form.lacking == "consecutive", device is not None or form.reads_narrow(framework)
    rules = Rules(rank, order, missing, mask_versions, ids, narrow, verify)
    batch = read_batch(spool, entries, plan, rules)
    made = layouts.formed(batch, layout, convert, as_torch=framework == "torch")
    if routing is not None:
        made[form.names.get(ROUTED_EXPERTS, ROUTED_EXPERTS)] = routing
    if VERSIONS.name in batch.columns and order.names is not None:
        made["version_names"] = list(order.names)
    return made


def _check_choices(layout: object, missing: object, mask_versions: object, lazy: object) -> None:
    one_of("layout", layout, get_args(Layout))
    one_of("missing", missing, get_args(Missing))
    check_mask_versions(mask_versions)
    instance("lazy", lazy, bool, "True or False")


def _check_current(order: VersionOrder, mask_versions: object, max_staleness: int | None) -> None:
    if max_staleness is not None and max_staleness < 0:
        raise refused("max_staleness", "a number of versions, at least 0", max_staleness)
    if order.current is None and (max_staleness is not None or isinstance(mask_versions, int)):
        name = "mask_versions=" if max_staleness is None else "max_staleness="
        raise InputError(f"{name} counts from the current weights; say which these are (version=)", argument="version")


def _lazy(spool: Spool, entries: Sequence[Entry], rank: RankSlice, missing: Missing, **options: Any) -> LazyRouting:
    return LazyRouting(
        spool,
        [None if entry.failed else entry.ref for entry in entries],
        lengths=[(entry.ref.n_tokens, entry.ref.response_length) if entry.failed else None for entry in entries],
        rank_slice=rank,
        missing="error" if missing == "error" else "arange",
        **options,
    )
