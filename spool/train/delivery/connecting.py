"""`connect`: the arguments of a feed, checked where they come in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal, get_args

from spool.arguments import instance, integer, names, one_of, refused, seconds, size, text
from spool.config import parse_uri
from spool.handle import Spool
from spool.read.fetch import Verify
from spool.train.delivery.feed import Feed
from spool.train.delivery.join import digest_of, join
from spool.train.delivery.memory import ran_out
from spool.train.delivery.staging import stager
from spool.train.delivery.work import Settings
from spool.train.planning.planner import Mesh, Place
from spool.train.restoring.fields import expert_spec
from spool.train.restoring.gaps import Missing
from spool.train.restoring.tensors import Framework
from spool.train.restoring.versions import check_mask_versions

if TYPE_CHECKING:
    from spool.model.moe import MoEShape
    from spool.train.delivery.transport import Join


def connect(
    uri: str | os.PathLike[str] | Spool | None,
    mesh: Mesh,
    place: Place | int,
    *,
    fields: Sequence[str] | None = None,
    name: str = "",
    n_ranks: int | None = None,
    chunk: int = 0,
    depth: int = 2,
    memory_bytes: int | str | None = None,
    dtype: Literal["stored", "train"] = "stored",
    framework: Framework = "torch",
    device: Any = None,
    missing: Missing = "error",
    mask_versions: Literal["all", "last"] | int = "all",
    experts: MoEShape | str | None = None,
    pad_token_id: int = 0,
    verify: Verify = "whole",
    join_timeout_s: float = 60.0,
    timeout_s: float = 600.0,
    joined: Join = join,
) -> Feed:
    """Take part in the feed of a place: its micro-batches are read once for all of its tensor-parallel ranks.

    The first rank that comes starts a process that reads, shared by all ranks of the place on this machine: it reads
    their context-parallel slice of each micro-batch, of the layers of their pipeline stage, in order and ahead of them,
    and puts it together in memory that all of them map. It ends with them. When it, a rank, or reading fails, all ranks
    are told of that first cause within seconds, and the feed gives nothing more.

    Args:
        uri: of the spool; ``$SPOOL_URI`` where None.
        mesh: of the trainer.
        place: where this rank stands on it, or its global rank.
        fields: names, ``loss_mask``, ``weight_versions`` and ``staleness`` among them; all that any reference of a
            mini-batch has where None. Ragged fields and those of steps are refused.
        name: of the job, where several with the same spool, mesh and place run on this machine.
        n_ranks: ranks of this place on this machine; ``mesh.tp`` where None.
        chunk: of the stage's model chunks, with a virtual pipeline: a feed each.
        depth: micro-batches in memory at a time, those that ranks still hold included; at least 2, so that one is made
            while another is used.
        memory_bytes: most that they may take together; what the machine, or its container, has free where None.
        dtype: ``stored``: narrow, widened where it is used (`Micro.read`); or ``train``, int32 experts.
        framework: ``torch`` or ``numpy``.
        device: of torch: a thread copies the next micro-batch there while the present one is used; from pinned memory,
            on a stream of its own, where it is CUDA's.
        missing, mask_versions, experts, verify: as `restore` takes them.
        pad_token_id: stands in ``token_ids`` for padding.
        join_timeout_s: how long ranks may take to come.
        timeout_s: how long a planned micro-batch may take to come, and the process that reads may say nothing.
        joined: how this rank comes to the process that reads: over a socket of this machine; `spool.integrations.ray`
            has another way.

    Raises:
        InputError: an argument does not fit.
        RankError: the process that reads cannot be started.
        CapacityError: this process may start no more threads, or has no memory for that.
    """
    where = instance("mesh", mesh, Mesh, "a Mesh, as Mesh(dp=8, cp=2, tp=4)").place(place)
    mesh.layers(where.pp, chunk)  # raises where there are none
    settings = Settings(
        uri=uri.config.uri if isinstance(uri, Spool) else parse_uri(uri).uri,
        n_ranks=mesh.tp if n_ranks is None else integer("n_ranks", n_ranks),
        mesh=mesh,
        fields=None if fields is None else tuple(names("fields", fields)),
        depth=integer("depth", depth),
        memory_bytes=None if memory_bytes is None else size("memory_bytes", memory_bytes, least=1),
        dtype=dtype, missing=missing, mask_versions=mask_versions, verify=verify, experts=experts,
        pad_token_id=integer("pad_token_id", pad_token_id),
        join_timeout_s=seconds("join_timeout_s", join_timeout_s),
    )  # fmt: skip
    _check(settings)
    if not 1 <= settings.n_ranks <= mesh.tp:
        raise refused("n_ranks", f"at least 1, and at most tp={mesh.tp}", settings.n_ranks)
    stage, timeout_s = stager(framework, device), _positive("timeout_s", timeout_s)
    digest = digest_of(text("name", name), settings.uri, (where.dp, where.cp, where.pp, chunk))
    ahead = settings.depth if device is None else 1
    try:
        return Feed(
            joined(digest, settings), mesh=mesh, place=where, chunk=chunk, settings=settings, stage=stage, ahead=ahead,
            timeout_s=timeout_s,
        )  # fmt: skip
    except (RuntimeError, MemoryError, OSError) as error:
        if (short := ran_out(error, "this rank")) is None:
            raise
        raise short from error


def _check(settings: Settings) -> None:
    if not 0 <= settings.pad_token_id < 1 << 31:
        raise refused("pad_token_id", "a token id, of 31 bits", settings.pad_token_id)
    if not isfinite(_positive("join_timeout_s", settings.join_timeout_s)):
        raise refused("join_timeout_s", "a number of seconds", settings.join_timeout_s)
    if settings.depth < 2:
        raise refused("depth", "at least 2: one micro-batch is made while another is used", settings.depth)
    one_of("dtype", settings.dtype, ("stored", "train"))
    one_of("missing", settings.missing, get_args(Missing))
    one_of("verify", settings.verify, get_args(Verify))
    check_mask_versions(settings.mask_versions)
    expert_spec(settings.experts)


def _positive(name: str, value: object) -> float:
    if not seconds(name, value):
        raise refused(name, "seconds, more than 0", value)
    return seconds(name, value)
