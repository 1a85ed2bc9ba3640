"""The trainer's side: from references to what a trainer takes.

::

    batch = spool.train.restore(sp, refs, layout="slime", framework="torch")

`select` and `plan` say what each rank of a mesh trains, and `connect` feeds it micro-batch by micro-batch, as one
process a place reads them for all of its ranks. `restore` gives whole batches, `LazyRouting` the routing of one
layer of a micro-batch at a time, `token_versions` and `staleness` how old each token's weights are. `SegmentDataset`
replays a recorded run. `plan_units` and `encode_once` have each multimodal unit encoded once a mini-batch. Torch is
imported where a call asks for tensors, and nowhere else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spool.train.delivery.connecting import connect
    from spool.train.delivery.feed import Feed, FeedStats
    from spool.train.delivery.micro import Micro
    from spool.train.planning.carried import plan_from_json
    from spool.train.planning.planner import Item, Mesh, Place, Plan, plan, plans
    from spool.train.planning.ranks import RankSlice
    from spool.train.replay.dataset import SegmentDataset
    from spool.train.restoring.batches import restore
    from spool.train.restoring.lazy import LazyRouting
    from spool.train.restoring.routed import RoutedLayer
    from spool.train.restoring.selecting import select
    from spool.train.restoring.versions import VersionOrder, staleness, token_versions, version_order
    from spool.train.units.index import UnitIndex, unit_index
    from spool.train.units.once import EncodeOnce, EncodeStats, encode_once
    from spool.train.units.plan import UnitPlan, plan_units, unit_plan_from_json

_HOME = {
    "EncodeOnce": "spool.train.units.once",
    "EncodeStats": "spool.train.units.once",
    "Feed": "spool.train.delivery.feed",
    "FeedStats": "spool.train.delivery.feed",
    "Item": "spool.train.planning.planner",
    "LazyRouting": "spool.train.restoring.lazy",
    "Mesh": "spool.train.planning.planner",
    "Micro": "spool.train.delivery.micro",
    "Place": "spool.train.planning.planner",
    "Plan": "spool.train.planning.planner",
    "RankSlice": "spool.train.planning.ranks",
    "RoutedLayer": "spool.train.restoring.routed",
    "SegmentDataset": "spool.train.replay.dataset",
    "UnitIndex": "spool.train.units.index",
    "UnitPlan": "spool.train.units.plan",
    "VersionOrder": "spool.train.restoring.versions",
    "connect": "spool.train.delivery.connecting",
    "encode_once": "spool.train.units.once",
    "plan": "spool.train.planning.planner",
    "plan_from_json": "spool.train.planning.carried",
    "plan_units": "spool.train.units.plan",
    "plans": "spool.train.planning.planner",
    "restore": "spool.train.restoring.batches",
    "select": "spool.train.restoring.selecting",
    "staleness": "spool.train.restoring.versions",
    "token_versions": "spool.train.restoring.versions",
    "unit_index": "spool.train.units.index",
    "unit_plan_from_json": "spool.train.units.plan",
    "version_order": "spool.train.restoring.versions",
}

__all__ = [
    "EncodeOnce",
    "EncodeStats",
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
    "UnitIndex",
    "UnitPlan",
    "VersionOrder",
    "connect",
    "encode_once",
    "plan",
    "plan_from_json",
    "plan_units",
    "plans",
    "restore",
    "select",
    "staleness",
    "token_versions",
    "unit_index",
    "unit_plan_from_json",
    "version_order",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'spool.train' has no attribute {name!r}")
    try:
        value = getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"spool.train.{name} needs torch: pip install 'spool-store[torch]'", name="torch") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
