"""Replay: a dataset is what a plain loop over the segments reads; each comes once an epoch, and resuming is exact."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from itertools import chain, islice, permutations, zip_longest
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import session
from replaying import WHERE, Environment, facts, packed, record, record_run
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import spool
from spool.errors import InputError
from spool.importers import read_runs
from spool.importers.base import ImportedRun
from spool.importers.record import record_run as record_imported
from spool.model.fields import FieldSpec
from spool.model.refs import Extent, SegmentRef
from spool.spiller.evict import evict
from spool.train.replay import stream
from spool.train.replay.dataset import SegmentDataset
from spool.train.replay.order import Rules, epoch_of, units_of
from spool.train.replay.prefetch import read_ahead
from spool.train.replay.snapshot import snapshot_of
from spool.train.replay.stream import Batch, Batches, Share

EXAMPLE = Path(__file__).parents[1] / "examples" / "replay_moe.py"

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*set_vital.*is deprecated")


@pytest.fixture(scope="module", params=["hot", "s3"])
def run(request, tmp_path_factory):
    """A recorded run: where it is read from, the environment that takes, and its segments with what a loop reads."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        cold = f"file://{folder}/cold"
        if request.param == "s3":
            for name, value in request.getfixturevalue("s3_server").environment().items():
                patch.setenv(name, value)
            cold = f"s3://spool/{folder.name}"
        uri = f"file://{folder}/hot" + ("" if request.param == "hot" else f"?spill={cold}&publish_interval_s=0.1")
        with spool.open(uri) as sp:
            record_run(sp)
            refs = list(sp.segments(where=WHERE))
            samples = sp.read(refs)
            if request.param != "hot":
                sp.publish(refs, timeout_s=120)
        if request.param != "hot":
            shutil.rmtree(folder / "hot", ignore_errors=True)
        yield SimpleNamespace(uri=uri if request.param == "hot" else cold, refs=refs, samples=samples)


@pytest.fixture
def hot(tmp_path):
    """An open hot root with a recorded run."""
    with spool.open(f"file://{tmp_path}/hot") as sp:
        record_run(sp)
        yield sp


def same(got, want):
    """Compare arrays or tensors with arrays, bit for bit."""
    if isinstance(want, spool.Ragged):
        assert all(same(*pair) for pair in zip(got, want, strict=True))
    elif isinstance(got, torch.Tensor):
        assert str(got.dtype).removeprefix("torch.") == want.dtype.name
        got = got.view(torch.int16).numpy().view(want.dtype) if got.dtype == torch.bfloat16 else got.numpy()
    if not isinstance(want, spool.Ragged):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        assert got.tobytes() == want.tobytes()
    return True


# -- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_segments_are_those_that_a_plain_loop_reads(run, framework):
    with SegmentDataset(run.uri, where=WHERE, framework=framework) as dataset:
        assert len(dataset) == len(run.refs) == 13
        assert [dataset.ref(i) for i in range(13)] == run.refs
        assert dataset.n_rows.tolist() == [ref.n_rows for ref in run.refs]
        batch = dataset.__getitems__([5, 0, 5])
        for got, number in [*zip(batch, (5, 0, 5), strict=True), (dataset[np.int64(3)], 3), (dataset[-1], 12)]:
            want = run.samples[number]
            assert got.ref == want.ref
            assert got.keys() == want.keys()
            assert all(same(got[name], want[name]) for name in want)
    with pytest.raises(IndexError, match="13 of 13"):
        dataset[13]


@pytest.mark.parametrize("max_tokens", [1, 90, 10_000])
def test_batches_are_packed_row_by_row(run, max_tokens):
    dataset = SegmentDataset(run.uri, where=WHERE, framework="numpy")
    by_id = {sample.ref.id: sample for sample in run.samples}
    seen = []
    for batch in dataset.batches(max_tokens=max_tokens):
        want, ragged = packed([by_id[ref.id] for ref in batch.refs])
        assert batch.keys() == want.keys() | ragged.keys()
        for name, value in want.items():
            assert batch[name].shape == value.shape, name
            assert (batch[name] == value).all(), name
            assert batch[name].flags.writeable
            assert batch[name].flags.c_contiguous
        for name, rows in ragged.items():
            assert [part.tolist() for part in np.split(batch[name].values, batch[name].offsets[1:-1])] == rows
        assert batch["cu_seqlens"].dtype == np.int32
        assert batch["token_ids"].dtype == np.int32
        assert batch["routed_experts"].dtype == np.int32
        assert batch["parent"].dtype == np.int64
        seen += batch.refs
    assert seen == run.refs
    tensors = next(iter(SegmentDataset(run.uri, where=WHERE).batches(max_tokens=max_tokens)))
    whole = next(iter(dataset.batches(max_tokens=max_tokens)))
    assert all(same(tensors[name], whole[name]) for name in whole)
    assert tensors["value"].dtype == torch.bfloat16


def test_fields_layers_and_dtype_are_those_of_read(hot):
    uri, more = hot.config.uri, {"where": WHERE, "framework": "numpy", "layers": slice(1, 3)}
    dataset = SegmentDataset(uri, fields=["routed_experts", "logprobs"], dtype="stored", **more)
    want = hot.read(dataset.ref(2), fields=["routed_experts"], layers=slice(1, 3), dtype="stored")["routed_experts"]
    assert dataset[2].keys() == {"routed_experts", "logprobs"}
    assert same(dataset[2]["routed_experts"], want)
    with pytest.raises(InputError, match=r"fill=-1 does not fit routed_experts as uint16.*dtype='train'"):
        next(iter(dataset.batches()))
    batch = list(dataset.batches(fill=300))[2]
    assert batch["routed_experts"].dtype == np.uint16
    assert (batch["routed_experts"][:-1] == want).all()
    assert (batch["routed_experts"][-1] == 300).all()


def test_another_view_is_made_when_it_is_asked_for(hot):
    with SegmentDataset(hot.config.uri, view="timeline", where="reward > 0.5", framework="numpy") as dataset:
        refs = list(hot.segments(view="timeline", where="reward > 0.5"))
        assert len(refs) > 20
        assert [dataset.ref(i) for i in range(len(dataset))] == refs
        assert [ref for batch in dataset.batches(max_tokens=100) for ref in batch.refs] == refs


def test_an_item_that_is_written_to_changes_no_other(hot):
    dataset = SegmentDataset(hot.config.uri, where=WHERE)
    item, other = dataset[0], SegmentDataset(hot.config.uri, where=WHERE)[0]
    before = item["loss_mask"].clone()
    item["loss_mask"].mul_(0)
    assert before.any()
    assert torch.equal(dataset[0]["loss_mask"], before)
    assert torch.equal(other["loss_mask"], before)
    first, again = (next(iter(dataset.batches())) for _ in range(2))
    first["loss_mask"].mul_(0)
    assert torch.equal(again["loss_mask"], before)


def test_a_batch_is_one_read_and_shared_rows_are_read_once(hot, monkeypatch):
    with hot.session("tree", experts=None) as session:
        for response in ([5, 6], [7, 8], [9]):
            session.append(prompt_token_ids=range(1000), response_token_ids=response)
        session.finalize(view="timeline", outcome="completed")
    events, calls, read = [], [], spool.Spool.read
    monkeypatch.setattr(
        spool.Spool, "read", lambda self, refs, **more: calls.append(len(refs)) or read(self, refs, **more)
    )
    dataset = SegmentDataset(hot.config.uri, where="session_id = 'tree'", fields=["token_ids"])
    dataset._opened = os.getpid(), spool.open(hot.config.uri, observer=events.append)
    assert [len(sample["token_ids"]) for sample in dataset.__getitems__([0, 1, 2])] == [1002, 1002, 1001]
    list(dataset.batches(max_tokens=4000))
    assert calls == [3, 3]
    fetched = [event.fetched_bytes for event in events if type(event).__name__ == "Read"]
    assert all(sum(found.values()) < 4 * 1100 for found in fetched)


def test_recorded_trajectories_come_back(shared_data, sp):
    for imported in islice((x for x in read_runs(shared_data / "trajectories") if isinstance(x, ImportedRun)), 12):
        record_imported(imported, sp)
    refs = list(sp.segments())
    dataset = SegmentDataset(sp.config.uri, order="shuffled", seed=3, fields=["token_ids", "loss_mask"])
    got = {}
    for batch in dataset.batches(max_tokens=4096, buffer=5):
        for ref, start, stop in zip(batch.refs, batch["cu_seqlens"], batch["cu_seqlens"][1:], strict=False):
            got[ref.id] = batch["token_ids"][start:stop].tolist()
    assert got == {ref.id: sample["token_ids"].tolist() for ref, sample in zip(refs, sp.read(refs), strict=True)}


def test_real_routing_comes_back(shared_data, sp):
    path = min((shared_data / "routing" / "B_8L_384E").glob("*.npz"))
    with np.load(path) as arrays:
        tokens, experts = arrays["token_ids"], arrays["routed_experts"]
    session = sp.session("real", experts=spool.MoEShape(8, 384, 8))
    session.append(prompt_token_ids=tokens[:4000], response_token_ids=tokens[4000:], routed_experts=experts)
    session.finalize(outcome="completed")
    (batch,) = SegmentDataset(sp.config.uri).batches(max_tokens=100, oversize="alone")
    assert (batch["routed_experts"][:-1].numpy() == experts).all()
    assert batch["cu_seqlens"].tolist() == [0, len(tokens)]


# -- which segments, once each -----------------------------------------------------------------------------------------


def fake_ref(number, n_rows, group):
    return SegmentRef(
        spool_id="x",
        session_id=f"s{number}",
        view="lineage",
        n_tokens=n_rows,
        n_rows=n_rows,
        group_id=group,
        steps=(0,),
    )


class FakeDataset:
    """Segments of which there is nothing to read."""

    def __init__(self, rows, groups=None):
        groups = [None] * len(rows) if groups is None else groups
        self.refs = [fake_ref(i, n, group) for i, (n, group) in enumerate(zip(rows, groups, strict=True))]
        self.snapshot = snapshot_of(self.refs)

    def __len__(self):
        return len(self.refs)

    def ref(self, number):
        return self.refs[number]

    def packs(self, fill):
        return lambda refs: ({}, ())


class Workers:
    """A DataLoader in this process: copies of the batches that take turns."""

    def __init__(self, patch):
        self._patch = patch

    def __call__(self, batches, n):
        found = []
        for worker in range(n):
            self._patch.setattr(stream, "_worker", lambda worker=worker: (worker, n))
            found.append(iter(copy.copy(batches)))
        self._patch.setattr(stream, "_worker", lambda: (0, 1))
        return [batch for turn in zip_longest(*found) for batch in turn if batch is not None]


@pytest.fixture
def workers(monkeypatch):
    return Workers(monkeypatch)


RULES = st.builds(
    Rules,
    order=st.sampled_from(["recorded", "shuffled"]),
    seed=st.integers(0, 5),
    buffer=st.none() | st.integers(1, 8),
    batch_by=st.sampled_from(["segment", "group"]),
    max_tokens=st.none() | st.integers(1, 60),
    batch_size=st.integers(1, 5),
)
SEGMENTS = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([None, "a", "b", "c"])), max_size=24)


def ids(batches):
    return [[ref.session_id for ref in batch.refs] for batch in batches]


@settings(max_examples=75)
@given(SEGMENTS, RULES, st.integers(1, 4), st.data())
def test_every_segment_comes_once_and_resuming_is_exact(segments, rules, world_size, data):
    dataset = FakeDataset(*([list(x) for x in zip(*segments, strict=True)] if segments else [[]]))
    with pytest.MonkeyPatch.context() as patch:
        workers, seen = Workers(patch), []
        for rank in range(world_size):
            batches = Batches(dataset, rules, Share(rank, world_size, "uneven"), "alone", -1, 0)
            n_batches, whole = len(batches), list(batches)
            assert len(whole) == n_batches
            fresh = Batches(dataset, rules, Share(rank, world_size, "uneven"), "alone", -1, 0)
            assert ids(workers(fresh, data.draw(st.integers(1, 4)))) == ids(whole)
            for at in range(len(whole)):
                fresh.load_state_dict(json.loads(json.dumps(whole[at].state)))
                assert ids(workers(fresh, 1 + at % 4)) == ids(whole[at + 1 :])
            seen += whole
        assert Counter(chain.from_iterable(ids(seen))) == Counter(ref.session_id for ref in dataset.refs)
        check_batches(dataset, rules, seen)


def check_batches(dataset, rules, batches):
    unit = (lambda ref: ref.group_id or ref.id) if rules.batch_by == "group" else (lambda ref: ref.id)
    homes = {}
    for number, batch in enumerate(batches):
        own = {unit(ref) for ref in batch.refs}
        assert len(own) <= rules.batch_size
        assert all(homes.setdefault(name, number) == number for name in own)
        if rules.max_tokens is not None and len(own) > 1:
            assert sum(ref.n_rows for ref in batch.refs) <= rules.max_tokens


@given(st.integers(0, 30), RULES, st.integers(0, 3))
def test_an_epoch_follows_from_its_seed_and_number(n, rules, epoch):
    units = units_of(np.full(n, 3), np.arange(n), "segment")
    one, again = (epoch_of(units, rules, epoch) for _ in range(2))
    assert one.order.tolist() == again.order.tolist()
    assert sorted(one.order.tolist()) == list(range(n))
    if rules.buffer is not None and rules.order == "shuffled":
        assert all(index < at + rules.buffer for at, index in enumerate(one.order.tolist()))
    if n > 12 and rules.order == "shuffled" and rules.buffer is None:
        assert one.order.tolist() != epoch_of(units, rules, epoch + 1).order.tolist()


@pytest.mark.parametrize("max_tokens", [1 << 40, 1 << 62, (1 << 63) - 1])
@pytest.mark.parametrize(("batch_size", "sizes"), [(4, [4, 4, 2]), (None, [10])])
def test_the_largest_max_tokens_limits_nothing(max_tokens, batch_size, sizes):
    rules = Rules(
        order="recorded", seed=0, buffer=None, batch_by="segment", max_tokens=max_tokens, batch_size=batch_size
    )
    epoch = epoch_of(units_of(np.full(10, 3), np.arange(10), "segment"), rules, 0)
    assert [len(epoch.batch(number)) for number in range(len(epoch))] == sizes


@pytest.mark.parametrize(("ends", "sizes"), [("uneven", [4, 3, 3]), ("repeat", [4, 4, 4]), ("drop", [3, 3, 3])])
def test_uneven_ends(ends, sizes, workers):
    dataset, rules = (
        FakeDataset([1] * 10),
        Rules(order="shuffled", seed=1, buffer=None, batch_by="segment", max_tokens=None, batch_size=1),
    )
    ranks = [Batches(dataset, rules, Share(rank, 3, ends), "alone", -1, 0) for rank in range(3)]
    assert [len(batches) for batches in ranks] == sizes
    found = [ids(workers(batches, 2)) for batches in ranks]
    assert [len(rank) for rank in found] == sizes
    counts = Counter(chain.from_iterable(chain.from_iterable(found)))
    assert (len(counts), max(counts.values())) == {"uneven": (10, 1), "repeat": (10, 2), "drop": (9, 1)}[ends]


def test_another_number_of_ranks_goes_on_where_all_were(workers):
    dataset = FakeDataset([1] * 23)
    rules = Rules(order="shuffled", seed=1, buffer=None, batch_by="segment", max_tokens=None, batch_size=2)
    ranks = [list(Batches(dataset, rules, Share(rank, 2, "uneven"), "alone", -1, 0))[:3] for rank in range(2)]
    rest = []
    for rank in range(3):
        batches = Batches(dataset, rules, Share(rank, 3, "uneven"), "alone", -1, 0)
        batches.load_state_dict(ranks[rank % 2][-1].state)
        rest += ids(workers(batches, 2))
    assert sorted(chain(*rest, *ids(ranks[0]), *ids(ranks[1]))) == sorted(ref.session_id for ref in dataset.refs)


def test_a_ragged_response_field_of_a_segment_without_a_response(open_spool):
    spec = FieldSpec(name="kept_ids", dtype="int32", align="response", ragged=True)
    sp = open_spool(fields=[spec])
    for number, response in enumerate(([7], [])):
        s = session(sp, f"s{number}")
        s.append(
            prompt_token_ids=[1, 99, 2], response_token_ids=response, units=[("image", 1, 4)],
            fields={"kept_ids": [[5, 6]] * len(response)},
        )  # fmt: skip
        s.finalize(trailing="keep")
    with SegmentDataset(sp.config.uri, framework="numpy", fields=["kept_ids"], missing=0) as dataset:
        (batch,) = dataset.batches(batch_size=2)
    assert batch["kept_ids"].values.tolist() == [5, 6]
    assert np.diff(batch["kept_ids"].offsets).sum() == 2


def test_epochs_and_iterations_that_were_left():
    dataset = FakeDataset([1] * 9)
    rules = Rules(order="shuffled", seed=1, buffer=None, batch_by="segment", max_tokens=None, batch_size=1)
    batches = Batches(dataset, rules, Share(0, 1, "uneven"), "alone", -1, 0)
    zero = ids(islice(batches, 4))
    one = ids(batches)  # the next, though the first was left
    assert batches.epoch == 1
    assert one[:4] != zero
    assert batches.state_dict()["epoch"] == 2
    assert batches.state_dict()["position"] == 0
    batches.set_epoch(0)
    assert ids(batches)[:4] == zero
    state = next(islice(batches, 3, None)).state
    assert state["epoch"] == 1
    batches.load_state_dict(state)
    batches.set_epoch(state["epoch"])
    assert ids(batches) == one[4:]
    assert batches.epoch == 1
    next(iter(batches))
    assert batches.epoch == 2


# -- processes ---------------------------------------------------------------------------------------------------------


def test_workers_that_live_on_stay_together_when_an_epoch_is_left(run):
    dataset = SegmentDataset(run.uri, where=WHERE, order="shuffled", seed=5)
    loader = DataLoader(dataset.batches(batch_size=2), batch_size=None, num_workers=2, persistent_workers=True)
    next(iter(loader))
    for _ in range(2):
        seen = [ref.id for batch in loader for ref in batch.refs]
        assert sorted(seen) == sorted(ref.id for ref in run.refs)
    del loader


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_two_ranks_of_two_workers_over_three_epochs(run, context):
    dataset = SegmentDataset(run.uri, where=WHERE, order="shuffled", seed=5)
    assert len(dataset[0]) == 10  # the handle is open here, and the workers must not use it
    orders, ranks = [], range(2 if context == "fork" else 1)
    loaders = [
        DataLoader(
            dataset.batches(max_tokens=60, rank=rank, world_size=2),
            batch_size=None, num_workers=2, persistent_workers=True, multiprocessing_context=context,
            worker_init_fn=Environment(),
        )
        for rank in ranks
    ]  # fmt: skip
    for epoch in range(3 if context == "fork" else 1):
        found = [[facts(batch) for batch in loader] for loader in loaders]
        plain = dataset.batches(max_tokens=60, rank=0, world_size=1)
        plain.set_epoch(epoch)
        want = [facts(batch) for batch in plain]
        assert found == [want[0::2], want[1::2]][: len(ranks)]
        orders.append(json.dumps(want))
    assert len(set(orders)) == len(orders)


def test_one_segment_is_remote_and_one_is_local(tmp_path, s3_root):
    with spool.open(f"file://{tmp_path}/hot?spill={s3_root}&publish_interval_s=0.1") as sp:
        sp.publish(record(sp, "remote", seed=1), timeout_s=120)
        for row in sp._catalog.packs.rows("spilled"):
            evict(sp.config.root, sp._catalog, row.stream, row.pack)
        record(sp, "local", seed=2)
        dataset = SegmentDataset(sp.config.uri)
        want = [facts(batch) for batch in dataset.batches()]
        assert [names for names, *_ in want] == [["remote@lineage/0"], ["local@lineage/0"]]
        loader = DataLoader(
            dataset.batches(), batch_size=None, num_workers=2, multiprocessing_context="spawn",
            worker_init_fn=Environment(),
        )  # fmt: skip
        assert [facts(batch) for batch in loader] == want


def test_batches_through_a_loader_keep_what_they_say(hot):
    dataset = SegmentDataset(hot.config.uri, where=WHERE)
    (first, *_) = DataLoader(dataset.batches(batch_size=2), batch_size=None, num_workers=1)
    assert type(first) is Batch
    assert [ref.id for ref in first.refs] == [dataset.ref(0).id, dataset.ref(1).id]
    assert first.state["position"] == 1
    first["loss_mask"].mul_(0)


@pytest.mark.parametrize("n_workers", [0, 1, 2])
def test_resume_at_every_position_with_other_workers(hot, n_workers):
    dataset = SegmentDataset(hot.config.uri, where=WHERE, order="shuffled", seed=2)
    whole = list(DataLoader(dataset.batches(max_tokens=60), batch_size=None, num_workers=n_workers))
    want = [facts(batch) for batch in whole]
    for at in range(len(whole)):
        batches = dataset.batches(max_tokens=60)
        batches.load_state_dict(whole[at].state)
        loader = DataLoader(batches, batch_size=None, num_workers=(n_workers + 1 + at % 2) % 3)
        assert [facts(batch) for batch in loader] == want[at + 1 :]


@pytest.mark.parametrize(("n_workers", "every"), [(0, 1), (2, 1), (2, 3), (3, 2)])
def test_resume_through_a_stateful_loader(hot, n_workers, every):
    dataset = SegmentDataset(hot.config.uri, where=WHERE, order="shuffled", seed=2)

    def loader():
        return StatefulDataLoader(
            dataset.batches(max_tokens=60), batch_size=None, num_workers=n_workers,
            persistent_workers=n_workers > 0, snapshot_every_n_steps=every,
        )  # fmt: skip

    one = loader()
    epochs = [[facts(batch) for batch in one] for _ in range(2)]
    assert epochs[0] != epochs[1]
    for at in range(1, len(epochs[0]) + 1):
        stopped = loader()
        assert [facts(batch) for batch in islice(stopped, at)] == epochs[0][:at]
        state = pickle.loads(pickle.dumps(stopped.state_dict()))
        resumed = loader()
        resumed.load_state_dict(state)
        assert [facts(batch) for batch in resumed] == epochs[0][at:]
        if at % 3 == 0:
            assert [facts(batch) for batch in resumed] == epochs[1]


def test_map_style_through_loaders(run):
    dataset = SegmentDataset(run.uri, where=WHERE)
    sampler = DistributedSampler(dataset, num_replicas=2, rank=1, shuffle=True, seed=1)
    loader = DataLoader(dataset, batch_size=3, sampler=sampler, collate_fn=list, num_workers=2)
    found = [sample for batch in loader for sample in batch]
    assert [sample.ref for sample in found] == [run.refs[number] for number in sampler]
    want = {sample.ref.id: sample["token_ids"] for sample in run.samples}
    assert all((sample["token_ids"].numpy() == want[sample.ref.id]).all() for sample in found)
    stateful = StatefulDataLoader(dataset, batch_size=2, shuffle=True, collate_fn=list, num_workers=2)
    ahead = iter(stateful)
    done = [next(ahead) for _ in range(3)]
    state = stateful.state_dict()
    rest = [[sample.ref.id for sample in batch] for batch in ahead]
    assert done
    again = StatefulDataLoader(dataset, batch_size=2, shuffle=True, collate_fn=list, num_workers=2)
    again.load_state_dict(state)
    assert [[sample.ref.id for sample in batch] for batch in again] == rest


def test_a_dataset_pickles_with_its_segments_and_opens_for_itself(hot):
    dataset = SegmentDataset(hot.config.uri, where=WHERE)
    state = next(iter(dataset.batches())).state
    record(hot, "later", seed=50)
    other = pickle.loads(pickle.dumps(dataset))
    assert other._opened is None
    assert other.fingerprint == dataset.fingerprint != SegmentDataset(hot.config.uri, where=WHERE).fingerprint
    assert [other.ref(i) for i in range(len(other))] == [dataset.ref(i) for i in range(len(dataset))]
    assert same(other[4]["token_ids"], hot.read(dataset.ref(4))["token_ids"])
    batches = other.batches()
    batches.load_state_dict(state)
    assert len(list(batches)) == len(dataset) - 1


# -- a run that goes on, or goes away ----------------------------------------------------------------------------------


def test_segments_of_several_models(hot):
    rng = np.random.default_rng(0)
    for name, shape in (("narrow", spool.MoEShape(3, 128, 2)), ("deep", spool.MoEShape(5, 300, 2))):
        session = hot.session(name, experts=shape)
        rows = rng.permuted(np.tile(np.arange(99), (5, shape.num_layers, 1)), axis=2)
        session.append(prompt_token_ids=[1, 2, 3], response_token_ids=[4, 5, 6], routed_experts=rows[:, :, :2])
        session.finalize(outcome="completed")

    def of(*names, **more):
        where = f"session_id in {names}"
        return SegmentDataset(hot.config.uri, where=where, fields=["routed_experts"], framework="numpy", **more)

    (batch,) = of("s0", "narrow").batches(batch_size=2)
    assert batch["routed_experts"].dtype == np.int32
    for numbers in ([0, 1], [1, 0]):
        dataset = of("s0", "deep")
        with pytest.raises(InputError, match=r"routed_experts has rows of .* in .*filter with where="):
            dataset.packs(fill=0)([dataset.ref(number) for number in numbers])
        dataset = of("narrow", "s0", dtype="stored")
        wide, _ = dataset.packs(fill=0)([dataset.ref(number) for number in numbers])
        assert wide["routed_experts"].dtype == np.uint16
    assert [len(sample["routed_experts"][0]) for sample in of("s0", "deep").__getitems__([0, 1])] == [3, 5]


@pytest.mark.parametrize(("dtype", "kind"), [("train", np.int32), ("stored", np.int16)])
def test_segments_with_entries_of_minus_one_beside_others(hot, dtype, kind):
    for name in ("signed", "unsigned"):
        fields = [spool.expert_field(spool.MoEShape(2, 128, 1), signed=name == "signed")]
        session = hot.session(name, fields=fields)
        rows = np.array([[[127], [-1 if name == "signed" else 5]]])
        session.append(prompt_token_ids=[1], response_token_ids=[2], routed_experts=rows)
        session.finalize(outcome="completed")
    where = "session_id in ('signed', 'unsigned')"
    dataset = SegmentDataset(hot.config.uri, where=where, fields=["routed_experts"], dtype=dtype, framework="numpy")
    for numbers in ([0, 1], [1, 0]):
        refs = [dataset.ref(number) for number in numbers]
        batch, _ = dataset.packs(fill=0)(refs)
        assert batch["routed_experts"].dtype == kind
        entries = [-1 if ref.session_id == "signed" else 5 for ref in refs]
        assert batch["routed_experts"][::2, :, 0].tolist() == [[127, entry] for entry in entries]


@pytest.mark.parametrize("dtype", ["train", "stored"])
def test_what_a_field_is_depends_on_its_batch_alone(hot, dtype):
    rows = {"three": (3, 128), "wide": (3, 512), "five": (5, 128)}
    for name, (n_layers, n_experts) in rows.items():
        links = spool.FieldSpec(name="links", dtype="int32", align="token", positions=name == "wide")
        session = hot.session(name, experts=spool.MoEShape(n_layers, n_experts, 1), fields=[links])
        ids = np.full((3, n_layers, 1), n_experts - 1)
        more = {"routed_experts": ids, "fields": {"links": np.arange(4, dtype=np.int32)}}
        session.append(prompt_token_ids=[1, 2], response_token_ids=[3, 4], **more)
        session.finalize(outcome="completed")
    fields = ["routed_experts", "links"]
    dataset = SegmentDataset(
        hot.config.uri, where=f"session_id in {tuple(rows)}", fields=fields, dtype=dtype, framework="numpy"
    )
    refs = [dataset.ref(number) for number in range(3)]
    for order in permutations(refs):
        packs = dataset.packs(fill=0)
        for ref in (*order, *order):
            (batch, _), (n_layers, n_experts) = packs([ref, ref]), rows[ref.session_id]
            assert batch["routed_experts"].shape == (8, n_layers, 1)
            assert batch["routed_experts"][0].max() == n_experts - 1
            if dtype == "stored":
                assert batch["routed_experts"].dtype == (np.uint8 if n_experts == 128 else np.uint16)
            assert batch["links"].dtype == (np.int64 if ref.session_id == "wide" else np.int32)
            assert batch["links"][4:].tolist() == ([4, 5, 6, 7] if ref.session_id == "wide" else [0, 1, 2, 3])
        with pytest.raises(InputError, match=r"links has positions|routed_experts has rows of"):
            packs(list(order))


def test_a_run_that_is_being_recorded_does_not_shift_it(hot):
    done, recorded = threading.Event(), []

    def go_on():
        while not done.is_set():
            recorded.extend(record(hot, f"more{len(recorded)}", seed=len(recorded)))

    thread = threading.Thread(target=go_on)
    dataset = SegmentDataset(hot.config.uri, where=WHERE, order="shuffled", seed=4)
    n, before = len(dataset), ids(dataset.batches(batch_size=2))
    thread.start()
    try:
        while len(recorded) < 5:
            time.sleep(0.01)
        assert ids(dataset.batches(batch_size=2)) == before
    finally:
        done.set()
        thread.join()
    assert len(dataset) == n
    grown = SegmentDataset(hot.config.uri, where=WHERE, order="shuffled", seed=4)
    assert len(grown) == n + len(recorded)
    state = list(dataset.batches(batch_size=2))[2].state
    batches = grown.batches(batch_size=2)
    batches.load_state_dict(state)
    assert ids(batches) == before[3:]
    assert len(list(chain.from_iterable(ids(batches)))) == n


def test_a_filter_that_finds_others_is_said(hot):
    state = next(iter(SegmentDataset(hot.config.uri, where=WHERE).batches())).state
    hot.annotate("s0", reward=0.0)
    batches = SegmentDataset(hot.config.uri, where=WHERE).batches()
    with pytest.raises(InputError, match=r"13 segments, and the first of these 12 are others.*pickled"):
        batches.load_state_dict(state)


@pytest.mark.parametrize("how", ["released", "removed"])
def test_lost_segments_are_named_or_skipped_and_counted(tmp_path, how):
    with spool.open(f"file://{tmp_path}/hot?retention=released&grace_s=0.001") as sp:
        record(sp, "a", seed=1)
        sp.flush()
        gone = [*record(sp, "b", seed=2), *record(sp, "c", seed=3)]
        sp.flush()
        record(sp, "d", seed=4)
        sp.flush()
        strict, lenient = (SegmentDataset(sp.config.uri, lost=lost) for lost in ("error", "skip"))
        if how == "released":
            sp.release(gone)
            sp.gc()
            kind = spool.ReleasedError
        else:
            (stream_of_all,) = {extent.stream for extents in gone[0].extents.values() for extent in extents}
            (tmp_path / "hot" / "streams" / stream_of_all / "token_ids" / "c" / "1").unlink()
            kind = spool.IntegrityError
        with pytest.raises(kind, match=r"segment b@lineage/0 cannot be read: .*; lost='skip' goes on without it"):
            list(strict.batches(batch_size=4))
        with pytest.raises(kind, match="segment c@lineage/0"):
            strict[2]
        with pytest.raises(kind, match="segment b@lineage/0"):
            lenient[1]
        assert [sample.ref.session_id for sample in lenient.__getitems__([0, 1, 3])] == ["a", "d"]
        found = list(lenient.batches(batch_size=2))
        assert ids(found) == [["a"], ["d"]]
        assert [batch.skipped for batch in found] == [("b@lineage/0",), ("c@lineage/0",)]
        alone = list(lenient.batches())
        assert ids(alone) == [["a"], [], [], ["d"]]
        assert alone[1].keys() == {"cu_seqlens", "position_ids"}
        assert [batch.state["position"] for batch in alone] == [1, 2, 3, 4]


def test_damage_is_never_skipped(hot, tmp_path):
    hot.flush()
    dataset = SegmentDataset(hot.config.uri, where=WHERE, lost="skip")
    (shard,) = (tmp_path / "hot" / "streams").glob("*/token_ids/c/0")
    with open(shard, "r+b") as file:
        file.seek(8)
        file.write(b"\xff" * 8)
    with pytest.raises(spool.IntegrityError, match="segment s0@lineage/0 cannot be read"):
        list(dataset.batches(batch_size=3))


def test_what_was_never_sent_is_said_of_its_segment(hot):
    session = hot.session("bare")
    session.append(prompt_token_ids=[1, 2], response_token_ids=[3])
    session.finalize(outcome="completed")
    dataset = SegmentDataset(hot.config.uri, where="outcome = 'completed'", fields=["routed_experts"])
    with pytest.raises(spool.NotFoundError, match=r"segment bare@lineage/0 cannot be read: .*routed_experts"):
        list(dataset.batches(batch_size=100))
    filled = SegmentDataset(hot.config.uri, where="session_id in ('bare', 's0')", fields=["routed_experts"], missing=-1)
    (batch,) = filled.batches(batch_size=2)
    assert (batch["routed_experts"][-3:] == -1).all()
    mixed = SegmentDataset(hot.config.uri, where="outcome = 'completed'")
    with pytest.raises(InputError, match=r"s0@lineage/0 has the fields .*and bare@lineage/0 of the same batch has"):
        list(mixed.batches(batch_size=100))


# -- reading ahead -----------------------------------------------------------------------------------------------------


def test_reading_ahead_is_bounded_by_bytes():
    sizes, begun, consumed = [10, 10, 10, 50, 10, 10, 10, 10], [], 0
    ahead = read_ahead(range(8), lambda job: begun.append(job) or job, n_bytes=lambda job: sizes[job], limit_bytes=25)
    for number, job in enumerate(ahead):
        assert job == number
        consumed += 1
        time.sleep(0.02)
        waiting = [sizes[other] for other in begun[consumed:]]
        assert sum(waiting) <= 25
        assert waiting or sizes[consumed : consumed + 1] in ([], [50])
    assert consumed == 8
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("spool-replay")]


@pytest.mark.parametrize("limit_bytes", [0, 100])
def test_an_error_comes_in_its_place_and_ends_the_thread(limit_bytes):
    def read(job):
        if job == 2:
            raise spool.StorageError("away")
        return job

    ahead, got = read_ahead(range(5), read, n_bytes=lambda _: 1, limit_bytes=limit_bytes), []
    with pytest.raises(spool.StorageError, match="away"):
        got.extend(ahead)
    assert got == [0, 1]
    assert list(ahead) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("spool-replay")]


@pytest.mark.parametrize("prefetch_bytes", [0, 1, "1MiB"])
def test_prefetch_changes_no_batch(hot, prefetch_bytes):
    dataset = SegmentDataset(hot.config.uri, where=WHERE, order="shuffled", seed=1)
    want = [facts(batch) for batch in dataset.batches(max_tokens=70)]
    batches = dataset.batches(max_tokens=70, prefetch_bytes=prefetch_bytes)
    found = []
    for batch in batches:
        found.append(facts(batch))
        assert batches.state_dict()["position"] == len(found)
    assert found == want


@pytest.mark.parametrize("prefetch_bytes", [0, "1MiB"])
def test_a_batch_that_is_let_go_of_is_gone(hot, prefetch_bytes):
    found = iter(SegmentDataset(hot.config.uri, where=WHERE).batches(prefetch_bytes=prefetch_bytes))
    for _ in range(3):
        batch = next(found)
        gone = weakref.ref(batch)
        del batch
        assert gone() is None


# -- the snapshot, and what is refused ---------------------------------------------------------------------------------


def test_a_snapshot_takes_few_bytes():
    def ref(number):
        extents = {
            name: tuple(Extent("20260101T000000-00000000", number * 900 + 300 * step, 300, 300 * step, number * 7919)
                        for step in range(3))
            for name in ("token_ids", "logprobs", "routed_experts")
        }  # fmt: skip
        return SegmentRef(
            spool_id="0" * 32, session_id=f"rollout-{number}", group_id=f"p{number // 8}@40", view="lineage",
            steps=(0, 1, 2), n_tokens=900, n_rows=900, response_start=100, extents=extents,
            roots=("file:///nvme/spool",), reward=0.5,
        )  # fmt: skip

    snapshot = snapshot_of(map(ref, range(3000)))
    assert all(snapshot.ref(number) == ref(number) for number in (0, 1, 47, 48, 2999))
    assert snapshot.groups.tolist() == [number // 8 for number in range(3000)]
    assert snapshot.n_bytes / 3000 < 250
    assert len(pickle.dumps(snapshot)) < 1.1 * snapshot.n_bytes
    empty = snapshot_of(iter(()))
    assert len(empty.rows) == 0


def test_a_late_array_of_no_declared_field(hot):
    dataset = SegmentDataset(hot.config.uri, where=WHERE)
    ref = dataset.ref(0)
    hot.attach(ref, teacher=np.arange(ref.n_rows, dtype=np.float32) - 5, align="token")
    late = SegmentDataset(hot.config.uri, where=f"session_id = '{ref.session_id}'", fields=["teacher"])
    (batch,) = late.batches()
    assert batch["teacher"].tolist() == list(range(-5, ref.n_rows - 5))


def test_a_dataset_of_nothing(hot):
    dataset = SegmentDataset(hot.config.uri, where="n_tokens > 100000")
    assert len(dataset) == 0
    for by in ("segment", "group"):
        batches = dataset.batches(max_tokens=10, batch_by=by, ends="repeat", rank=1, world_size=2)
        assert len(batches) == 0
        assert list(batches) == []


def test_empty_segments_are_packed(sp):
    session = sp.session("s")
    session.append(prompt_token_ids=[], response_token_ids=[])
    session.append(prompt_token_ids=[1], response_token_ids=[2, 3])
    session.finalize(view="timeline", outcome="completed")
    (batch,) = SegmentDataset(sp.config.uri, fields=["token_ids"]).batches(batch_size=5)
    assert batch["cu_seqlens"].tolist() in ([0, 0, 3], [0, 3])
    assert batch["token_ids"].tolist() == [1, 2, 3]


def test_what_is_wrong_is_named(hot, tmp_path):
    uri = hot.config.uri
    for options, said in [
        ({"order": "random"}, "order must be one of recorded, shuffled"),
        ({"lost": "ignore"}, "lost must be one of error, skip"),
        ({"framework": "jax"}, "framework must be one of torch, numpy"),
        ({"fields": "token_ids"}, r"fields must be a list of names.*write fields=\['token_ids'\]"),
        ({"dtype": "int32"}, "dtype must be one of train, stored"),
        ({"verify": True}, "verify must be one of whole, always, never"),
        ({"layers": 3}, "layers must be a slice of absolute layers"),
        ({"seed": -1}, "seed must be an integer, at least 0"),
        ({"where": "rewrd > 1"}, "did you mean reward"),
        ({"view": "tree"}, "view must be one of"),
    ]:
        with pytest.raises(InputError, match=said):
            SegmentDataset(uri, **options)
    with pytest.raises(spool.NotFoundError, match="there is no spool"):
        SegmentDataset(f"file://{tmp_path}/nothing")
    dataset = SegmentDataset(uri, where=WHERE)
    for options, said in [
        ({"max_tokens": 0}, "max_tokens must be an integer, at least 1"),
        ({"batch_by": "prompt"}, "batch_by must be one of segment, group"),
        ({"ends": "pad"}, "ends must be one of uneven, repeat, drop"),
        ({"buffer": 10}, "buffer= is for order='shuffled'"),
        ({"rank": 1}, "give both rank= and world_size="),
        ({"rank": 2, "world_size": 2}, "rank must be at least 0 and below world_size=2"),
        ({"prefetch_bytes": -1}, "prefetch_bytes must be a size"),
        ({"max_tokens": 200, "oversize": "error"}, r"segment long@lineage/0 has \d+ rows, more than max_tokens=200"),
        ({"max_tokens": 60, "oversize": "error", "batch_by": "group"}, "the group of segment s0@lineage/0 has"),
    ]:
        with pytest.raises(InputError, match=said):
            dataset.batches(**options)
    session = hot.session("named", fields=[spool.FieldSpec(name="cu_steps", dtype="int32", align="token")])
    session.append(prompt_token_ids=[1], response_token_ids=[2], fields={"cu_steps": [1, 2]})
    session.finalize(outcome="completed")
    with pytest.raises(InputError, match="cu_steps is the name of what a batch has beside its fields"):
        list(SegmentDataset(uri, where="session_id = 'named'").batches())


ODD = (object(), 3.5, -1, 2**70, True, "x", b"x", [], [3], {}, float("nan"), slice(1, 0), np.arange(2))


@pytest.mark.parametrize("argument", inspect.signature(SegmentDataset).parameters)
def test_an_odd_argument_of_a_dataset_is_refused_by_a_typed_error(hot, argument):
    for odd in ODD:
        with contextlib.suppress(spool.SpoolError), SegmentDataset(**{"uri": hot.config.uri, argument: odd}) as dataset:
            next(iter(dataset.batches()), None)


@pytest.mark.parametrize("argument", list(inspect.signature(SegmentDataset.batches).parameters)[1:])
def test_an_odd_argument_of_batches_is_refused_by_a_typed_error(hot, argument):
    dataset = SegmentDataset(hot.config.uri, order="shuffled", where=WHERE)
    for odd in ODD:
        with contextlib.suppress(spool.SpoolError):
            next(iter(dataset.batches(**{argument: odd})), None)
    for odd in ODD:
        with contextlib.suppress(spool.SpoolError):
            dataset.batches().load_state_dict(odd)


def test_without_torch_it_says_what_to_do(hot, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match=r"needs torch: pip install 'spool-store\[torch\]', or framework='numpy'"):
        SegmentDataset(hot.config.uri)
    assert "torch" not in str(SegmentDataset(hot.config.uri, framework="numpy")[0])


def test_states_of_something_else_are_refused(hot):
    dataset = SegmentDataset(hot.config.uri, where=WHERE)
    batches = dataset.batches(max_tokens=100)
    state = batches.state_dict()
    for wrong, said in [
        ("x", "state must be what state_dict"),
        ({**state, "position": -1}, "this is not what state_dict"),
        ({"epoch": 1}, "this is not what state_dict"),
        ({**state, "position": 10**9}, "the state is behind batch 1000000000, and epoch 0 has "),
        ({**state, "epoch": 10**30}, "this is not what state_dict"),
        ({**state, "world_size": 0}, "this is not what state_dict"),
        ({**state, "n_workers": 0}, "this is not what state_dict"),
        ({**state, "rules": {**state["rules"], "seed": 9}}, "batches with seed=9, here 0: make these with the same"),
        ({**state, "worker": 1, "n_workers": 2}, r"state of worker 1 of 2.*go on from the state of the last batch"),
    ]:
        with pytest.raises(InputError, match=said):
            batches.load_state_dict(wrong)
    with pytest.raises(InputError, match="epoch must be an integer, at least 0"):
        batches.set_epoch(-1)
    batches.set_epoch((1 << 62) - 1)
    list(batches)
    batches.load_state_dict(batches.state_dict())
    with pytest.raises(InputError, match=r"epoch must be .* below 2\*\*62"):
        batches.set_epoch(1 << 62)


def test_a_storage_that_failed_loses_no_batch(hot, monkeypatch):
    dataset = SegmentDataset(hot.config.uri, where=WHERE, order="shuffled", seed=3)
    want, calls, read = [facts(batch) for batch in dataset.batches(batch_size=2)], [], spool.Spool.read

    def failing(self, refs, **more):
        calls.append(refs)
        if len(calls) == 4:
            raise spool.StorageError("the storage is away")
        return read(self, refs, **more)

    monkeypatch.setattr(spool.Spool, "read", failing)
    batches, found = dataset.batches(batch_size=2), []
    with pytest.raises(spool.StorageError, match="away"):
        for batch in batches:
            found.append(facts(batch))  # noqa: PERF401
    assert found == want[:3]
    batches.load_state_dict(batches.state_dict())
    assert [facts(batch) for batch in batches] == want[3:]


def test_ranks_are_those_of_torch_distributed(tmp_path, hot, monkeypatch):
    import torch.distributed as dist

    dataset = SegmentDataset(hot.config.uri, where=WHERE)
    assert dataset.batches()._share == (0, 1, "uneven")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        assert dataset.batches()._share == (0, 1, "uneven")
    finally:
        dist.destroy_process_group()
    here = {"is_available": lambda: True, "is_initialized": lambda: True}
    there = SimpleNamespace(**here, get_rank=lambda: 3, get_world_size=lambda: 8)
    monkeypatch.setitem(sys.modules, "torch.distributed", there)
    assert dataset.batches(ends="drop")._share == (3, 8, "drop")


def test_the_example_trains_with_the_recorded_routing(tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(tmp_path / "spool")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "bit for bit" in done.stdout


def test_torch_is_loaded_when_it_is_used(hot):
    code = (
        "import sys, spool.train.replay.dataset as d\n"
        f"dataset = d.SegmentDataset({hot.config.uri!r}, framework='numpy')\n"
        "assert dataset[0] and list(dataset.batches(batch_size=8))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
