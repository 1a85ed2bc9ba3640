"""Scenarios of encoding over real processes: each rank runs them all and saves what it got. Spawned by the tests."""

from __future__ import annotations

import os
import random
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from encoding import DIM, PATCH, Backbone, CopyToTensorRanks, Encoder, Store, segment, train

from spool.errors import SpoolError
from spool.train import Mesh, encode_once, plan, plan_units

N = 4


def references():
    """Sequences with a unit that any CP boundary of theirs cuts, a unit twice in one, and one in many."""
    return [
        segment("a", 5, [("x", 1, 19), ("y", 3, 3)]),
        segment("b", 12, [("x", 2, 19), ("x", 9, 19)]),
        segment("c", 7),
        segment("d", 4, [("z", 0, 11), ("y", 3, 3)]),
        segment("e", 2, [("x", 1, 19)]),
    ]


SCENARIOS = {
    "tp and cp": {"mesh": {"tp": 2, "cp": 2}},
    "tp and cp, contiguous": {"mesh": {"tp": 2, "cp": 2}, "plan": {"split": "contiguous"}},
    "tp and cp, partial": {"mesh": {"tp": 2, "cp": 2}, "units": {"tp_gradients": "partial"}},
    "dp and cp": {"mesh": {"dp": 2, "cp": 2}},
    "dp and cp, again": {"mesh": {"dp": 2, "cp": 2}},
    "dp and cp, averaged": {"mesh": {"dp": 2, "cp": 2}, "scale": 0.5},
    "recompute": {"mesh": {"dp": 2, "cp": 2}, "options": {"recompute": True, "max_rows": 12}},
    "batches": {"mesh": {"dp": 2, "cp": 2}, "units": {"encoders": [2]}, "options": {"max_rows": 12}},
    "dp": {"mesh": {"dp": 4}},
    "one encoder rank": {"mesh": {"dp": 2, "tp": 2}, "units": {"encoders": 1}},
    "encoders apart": {"mesh": {"dp": 2}, "units": {"encoders": [3, 2]}},
    "the backbone turned round": {"mesh": {"cp": 2}, "units": {"encoders": [0, 2], "backbone": [3, 1]}},
    "pipeline": {"mesh": {"dp": 2, "pp": 2, "num_layers": 2}},
    "frozen": {"mesh": {"dp": 2, "cp": 2}, "frozen": True},
    "no units": {
        "mesh": {"dp": 2, "cp": 2},
        "refs": [segment("t", 9), segment("u", 4)],
        "options": {"like": torch.empty(0, DIM, dtype=torch.float64)},
    },
}


def drawn(seed):
    """A scenario of random sequences, mesh, split, encoder ranks and options."""
    rng = random.Random(seed)
    rows = {f"u{number}": rng.randint(1, 15) for number in range(rng.randint(1, 6))}
    refs = []
    for number in range(rng.randint(1, 7)):
        n_tokens = rng.randint(1, 14)
        at = sorted(rng.sample(range(n_tokens), rng.randint(0, min(n_tokens, 4))))
        keys = [rng.choice(sorted(rows)) for _ in at]
        refs.append(segment(f"r{number}", n_tokens, [(key, to, rows[key]) for key, to in zip(keys, at, strict=True)]))
    dp, cp, tp = rng.choice([(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1), (1, 3, 1), (3, 1, 1), (1, 1, 4)])
    return {
        "mesh": {"dp": dp, "cp": cp, "tp": tp}, "refs": refs,
        "plan": {"split": rng.choice(["zigzag", "contiguous", "micro_batch"])},
        "units": {
            "encoders": sorted(rng.sample(range(N), rng.randint(1, N))),
            "backbone": rng.sample(range(N), dp * cp * tp),
            "tp_gradients": rng.choice(["replicated", "partial"]),
        },
        "options": {
            "recompute": rng.random() < 0.5, "max_rows": rng.choice([None, 4, 20]),
            "like": torch.empty(0, DIM, dtype=torch.float64),
        },
        "scale": rng.choice([1.0, 0.25]),
    }  # fmt: skip


SCENARIOS |= {f"drawn {seed}": drawn(seed) for seed in range(12)}


def made(name):
    """The references, backbone plan and plan of units of a scenario."""
    scenario = SCENARIOS[name]
    refs = scenario.get("refs") or references()
    planned = plan(refs, Mesh(**scenario["mesh"]), n_micro=2, **scenario.get("plan", {}))
    return refs, planned, plan_units(refs, planned, **scenario.get("units", {}))


def run(name, rank):
    scenario = SCENARIOS[name]
    refs, planned, units = made(name)
    mesh, place, store = planned.mesh, units.place_of(rank), Store(refs)
    encoder = Encoder().requires_grad_(not scenario.get("frozen", False)) if units.units_of(rank) else None
    group = tensor_group(units, mesh, rank)
    once = encode_once(encoder, units, load=store.load, timeout_s=60, **scenario.get("options", {}))
    backbone = None
    if place is not None and not place.pp:
        backbone = Backbone(mesh.tp, place.tp)
        partial = units.tp_gradients == "partial" or mesh.tp == 1
        enter = (lambda rows: rows) if partial else (lambda rows: CopyToTensorRanks.apply(rows, group))
        train(once, planned, place, backbone, enter)
    once.backward(scale=scenario.get("scale", 1.0))
    return {
        "place": place, "encoder": gradients(encoder), "backbone": gradients(backbone), "loaded": store.loaded,
        "stats": once.stats, "calls": encoder.calls if encoder else 0,
    }  # fmt: skip


def gradients(module):
    return None if module is None else [parameter.grad for parameter in module.parameters()]


def tensor_group(units, mesh, rank):
    """The group of this rank's TP ranks; all ranks make all of them, as torch wants it."""
    mine, groups = None, {}
    for number, process in enumerate(units.backbone):
        place = mesh.place(number)
        groups.setdefault((place.dp, place.cp, place.pp), []).append(process)
    for ranks in groups.values():
        group = dist.new_group(ranks) if mesh.tp > 1 else None
        mine = group if rank in ranks else mine
    return mine


class Wrong(Encoder):
    def one(self, unit):
        return super().one(unit)[:-1]


def fail_to_encode(rank):
    refs, _, units = made("dp")
    kind = Wrong if rank == 1 else Encoder
    encode_once(kind(), units, load=Store(refs).load, timeout_s=60)


def have_no_encoder(rank):
    refs, _, units = made("dp")
    encode_once(None if rank == 0 else Encoder(), units, load=Store(refs).load, timeout_s=60)


def load_nothing(rank):
    refs, _, units = made("dp")
    encode_once(Encoder(), units, load=Store(refs).load if rank else lambda keys: None, timeout_s=60)


def plan_differently(rank):
    refs, planned, units = made("dp")
    if rank == 2:
        units = plan_units(refs, planned, encoders=[1, 0])
    encode_once(Encoder(), units, load=Store(refs).load, timeout_s=60)


def encode_to_other_kinds(rank):
    refs, _, units = made("dp")
    encoder = Encoder().requires_grad_(rank != 0)
    encode_once(encoder, units, load=Store(refs).load, timeout_s=60)


def take_other_kinds(rank):
    refs, _, units = made("dp")
    like = torch.empty(0, DIM) if rank == 3 else None
    encode_once(Encoder(), units, load=Store(refs).load, like=like, timeout_s=60)


def forget_a_gradient(rank):
    refs, planned, units = made("dp")
    once = encode_once(Encoder(), units, load=Store(refs).load, timeout_s=60)
    if rank != 3:
        train(once, planned, units.place_of(rank), Backbone())
    once.backward()


def ask_where_nothing_is(rank):
    refs, _, units = made("encoders apart")
    once = encode_once(Encoder(), units, load=Store(refs).load, timeout_s=60)
    once.features(0)


def be_too_few(rank):
    refs, planned, units = made("dp")
    units = plan_units(refs, planned, encoders=[6])
    encode_once(Encoder(), units, load=Store(refs).load, timeout_s=60)


FAILING = {
    function.__name__: function
    for function in (
        fail_to_encode, have_no_encoder, load_nothing, plan_differently, encode_to_other_kinds, take_other_kinds,
        forget_a_gradient, ask_where_nothing_is, be_too_few,
    )
}  # fmt: skip


def in_a_group_of_two(rank):
    """Processes are numbered as in their group."""
    group, alone = dist.new_group([1, 3]), dist.new_group([0])
    refs = references()
    planned = plan(refs, Mesh(dp=2), n_micro=2)
    units = plan_units(refs, planned)
    if rank not in (1, 3):
        return refused(lambda: encode_once(Encoder(), units, load=Store(refs).load, group=alone))
    encoder, backbone, me = Encoder(), Backbone(), dist.get_rank(group)
    once = encode_once(encoder, units, load=Store(refs).load, group=group, timeout_s=60)
    train(once, planned, units.place_of(me), backbone)
    once.backward()
    return {"place": units.place_of(me), "encoder": gradients(encoder), "backbone": gradients(backbone)}


def features_of_two_bytes(rank):
    refs = [segment(f"s{number}", 3, [("x", 1, 5)]) for number in range(N)]
    units = plan_units(refs, plan(refs, Mesh(dp=N), n_micro=1), encoders=[2])
    given, seen = Store(refs).array("x") @ np.ones((PATCH, DIM)), []

    def encode(_):
        rows = torch.from_numpy(given).bfloat16().requires_grad_()
        out = rows * 1
        out.register_hook(lambda gradient: seen.append(gradient.float()))
        return out

    once = encode_once(encode if rank == 2 else None, units, load=Store(refs).load, timeout_s=60)
    features = once.features(0)
    for weight in (256, 1, 1):
        (features.float().sum() * weight).backward()
    once.backward()
    return {
        "features": features.detach(), "expected": torch.from_numpy(given).bfloat16(), "stats": once.stats,
        "gradient": seen[0] if seen else None,
    }  # fmt: skip


def refused(call):
    try:
        call()
    except SpoolError as error:
        return type(error).__name__, str(error)
    return None


def join(rank, n, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=n, timeout=timedelta(seconds=60)
    )


def run_all(rank, folder):
    join(rank, N, folder)
    found = {name: run(name, rank) for name in SCENARIOS}
    found |= {name: refused(lambda call=call: call(rank)) for name, call in FAILING.items()}
    found["features_of_two_bytes"] = features_of_two_bytes(rank)
    found["in a group of two"] = in_a_group_of_two(rank)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def die_or_sleep(rank, folder, where, how):
    """Rank 1 goes away in the middle of a mini-batch; rank 0 must hear of it."""
    join(rank, 2, folder)
    refs = references()
    units = plan_units(refs, plan(refs, Mesh(dp=2), n_micro=2))

    def leave():
        if rank == 1 and how == "die":
            os._exit(0)
        if rank == 1:
            time.sleep(8)

    def work():
        if where == "encode":
            leave()
        once = encode_once(Encoder(), units, load=Store(refs).load, timeout_s=3)
        train(once, units.plan, units.place_of(rank), Backbone())
        leave()
        once.backward()

    started = time.monotonic()
    said = refused(work)
    if rank == 0:
        torch.save((said, time.monotonic() - started), f"{folder}/said.pt")
    os._exit(0)
