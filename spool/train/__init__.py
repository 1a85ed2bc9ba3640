"""The trainer's side: from references to what a trainer takes.

::

    batch = spool.train.restore(sp, refs, layout="slime", framework="torch")

`select` and `plan` say what each rank of a mesh trains, and `connect` feeds it micro-batch by micro-batch, as one
process a place reads them for all of its ranks. `restore` gives whole batches, `LazyRouting` the routing of one
layer of a micro-batch at a time, `token_versions` and `staleness` how old each token's weights are. `SegmentDataset`
replays a recorded run. Torch is imported where a call asks for tensors, and nowhere else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spool.train.batches import restore
    from spool.train.dataset import SegmentDataset
    from spool.train.delivery.connecting import connect
    from spool.train.delivery.feed import Feed, FeedStats
    from spool.train.delivery.micro import Micro
    from spool.train.lazy import LazyRouting, RoutedLayer
    from spool.train.planner import Item, Mesh, Place, Plan, plan, plan_from_json, plans
    from spool.train.ranks import RankSlice
    from spool.train.selecting import select
    from spool.train.versions import VersionOrder, staleness, token_versions, version_order

_HOME = {
    "Feed": "spool.train.delivery.feed",
    "FeedStats": "spool.train.delivery.feed",
    "Micro": "spool.train.delivery.micro",
    "connect": "spool.train.delivery.connecting",
    "Item": "spool.train.planner",
    "LazyRouting": "spool.train.lazy",
    "Mesh": "spool.train.planner",
    "Place": "spool.train.planner",
    "Plan": "spool.train.planner",
    "RankSlice": "spool.train.ranks",
    "RoutedLayer": "spool.train.lazy",
    "SegmentDataset": "spool.train.dataset",
    "VersionOrder": "spool.train.versions",
    "plan": "spool.train.planner",
    "plan_from_json": "spool.train.planner",
    "plans": "spool.train.planner",
    "restore": "spool.train.batches",
    "select": "spool.train.selecting",
    "staleness": "spool.train.versions",
    "token_versions": "spool.train.versions",
    "version_order": "spool.train.versions",
}

__all__ = [
    "Feed",
    "FeedStats",
    "Item",
    "LazyRouting",
    "Mesh",
    "Micro",
    "Place",
    "Plan",
    "RankSlice",
    "RoutedLayer",
    "SegmentDataset",
    "VersionOrder",
    "connect",
    "plan",
    "plan_from_json",
    "plans",
    "restore",
    "select",
    "staleness",
    "token_versions",
    "version_order",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'spool.train' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
