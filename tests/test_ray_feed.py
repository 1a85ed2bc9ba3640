"""A feed over Ray: what ranks get is what they get over a socket, and so is who hears of what went wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import ray
from ray._private.state import available_resources_per_node
from ray.cluster_utils import Cluster
from test_train_feed import ranks, record

from spool import train
from spool.errors import ConfigError, InputError, RankError
from spool.integrations.ray import connect
from spool.integrations.ray_reader import DEAD_S, NAMESPACE, SPILLED_AT
from spool.train import Mesh, plan

STORE_BYTES = 96 << 20
FIELDS = ["token_ids", "loss_mask", "logprobs", "routed_experts", "weight_versions", "staleness"]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Two nodes on this machine, each with an object store of its own."""
    head = {"num_cpus": 4, "include_dashboard": False, "resources": {"near": 1}, "object_store_memory": STORE_BYTES}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    ray.init(nodes.address, log_to_driver=False, logging_level="ERROR")
    nodes.add_node(num_cpus=1, object_store_memory=STORE_BYTES, resources={"far": 1})
    yield
    ray.shutdown()
    nodes.shutdown()


@ray.remote(num_cpus=0)
class Rank:
    """A rank in a process of its own. What it raises it returns, in words."""

    def pid(self):
        return os.getpid()

    def node(self):
        return ray.get_runtime_context().get_node_id()

    def connect(self, *arguments, **options):
        self.feed = connect(*arguments, framework="numpy", **options)

    def submit(self, planned, refs, finish=True, **options):
        self.feed.submit(planned, refs, **options)
        if finish:
            self.feed.finish()

    def next(self):
        """Take a micro-batch and hold it."""
        self.micro = None
        self.micro = next(iter(self.feed))

    def all(self, pause_s=0.0):
        """Return what comes until the end, or what went wrong; close."""
        found, self.micro = [], None
        try:
            with self.feed:
                for micro in self.feed:
                    found.append((micro.number, {name: micro[name].copy() for name in micro}))
                    micro["token_ids"][:] = -5  # nobody else sees it
                    time.sleep(pause_s)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return found

    def hold(self):
        return list(self.feed)

    def mini_batch(self):
        return [micro.plan.mini_batch for micro in self.feed.mini_batch()]

    def fail(self):
        with self.feed:
            raise ValueError("loss is NaN")

    def stats(self):
        return self.feed.stats

    def reader_pid(self):
        return self.feed.reader_pid

    def let_go(self):
        self.micro = None

    def close(self):
        self.feed.close()


@pytest.fixture(scope="module")
def pool():
    """Processes, kept from test to test: to start one takes a second."""
    return []


@pytest.fixture
def started(pool, open_spool):
    """Connect ranks, and submit a plan of theirs to all."""

    def start(mesh, n_micro, lengths=(9, 14, 3, 21, 30, 12), submit=True, **options):
        sp = open_spool()
        refs = record(sp, lengths=lengths)
        planned = plan(refs, mesh, n_micro=n_micro)
        while len(pool) < mesh.size:
            pool.append(Rank.options(resources={"far": 0.01} if len(pool) % 2 else {"near": 0.01}).remote())
        own = pool[: mesh.size]
        ray.get([each.connect.remote(sp.config.uri, mesh, rank, **options) for rank, each in enumerate(own)])
        if submit:
            ray.get([each.submit.remote(planned, refs, version="8") for each in own])
        return own, sp, planned, refs

    return start


def n_actors():
    return len([each for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE])


def wait_for(what, seconds=15.0):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def free_bytes():
    return min(found.get("object_store_memory", 0) for found in available_resources_per_node().values())


def test_ranks_get_what_the_socket_gives_and_what_was_recorded(started):
    mesh = Mesh(cp=2, tp=2)
    own, sp, planned, refs = started(mesh, 3, fields=FIELDS)
    found = ray.get([each.all.remote() for each in own])

    def consume(feed, rank):
        feed.submit(planned, refs, version="8")
        feed.finish()
        return [(micro.number, {name: micro[name].copy() for name in micro}) for micro in feed]

    for over_ray, over_socket in zip(found, ranks(sp.config.uri, mesh, consume, fields=FIELDS), strict=True):
        assert [number for number, _ in over_ray] == [number for number, _ in over_socket] == [0, 1, 2]
        for (_, arrays), (_, others) in zip(over_ray, over_socket, strict=True):
            assert arrays.keys() == others.keys()
            for name, array in arrays.items():
                assert array.dtype == others[name].dtype and (array == others[name]).all()
    assert len({ray.get(each.node.remote()) for each in own}) == 2
    samples = train.restore(sp, refs, "nested", version="8", fields=FIELDS)
    n_seen = 0
    for rank, micros in enumerate(found):
        for share, (_, arrays) in zip(planned.rank(rank).shares, micros, strict=True):
            for piece in share.pieces:
                rows = slice(piece.to, piece.to + piece.n_rows)
                for name in ("token_ids", "loss_mask", "weight_versions", "staleness"):
                    assert (arrays[name][rows] == samples[name][piece.item][piece.tokens]).all()
                n_seen += piece.n_rows
    assert n_seen == 2 * sum(ref.n_tokens for ref in refs)


def test_the_actor_goes_with_its_ranks_and_its_name_is_free(started):
    mesh = Mesh(tp=2)
    wait_for(lambda: n_actors() == 0)
    for _ in range(2):
        own, _, planned, _ = started(mesh, 2)
        assert n_actors() == 1
        assert [len(found) for found in ray.get([each.all.remote() for each in own])] == [planned.n_micro] * 2
    wait_for(lambda: n_actors() == 0)


def test_a_rank_may_connect_again_before_the_others_have_left(started, open_spool):
    mesh = Mesh(tp=2)
    (first, second), sp, planned, refs = started(mesh, 1)
    assert len(ray.get(first.all.remote())) == 1
    again = first.connect.remote(sp.config.uri, mesh, 0)
    assert not ray.wait([again], timeout=1.0)[0]
    assert len(ray.get(second.all.remote())) == 1
    ray.get([again, second.connect.remote(sp.config.uri, mesh, 1)])
    ray.get(second.submit.remote(planned, refs))
    assert [len(found) for found in ray.get([each.all.remote() for each in (first, second)])] == [1, 1]
    (first, second), *_ = started(mesh, 1)
    with pytest.raises(ray.exceptions.RayTaskError, match="it serves ranks that have not left: give each job a name"):
        ray.get(first.connect.remote(sp.config.uri, mesh, 0, join_timeout_s=4.0))
    ray.get([each.all.remote() for each in (first, second)])


def test_a_killed_rank_is_named_to_the_others(started, pool):
    own, *_ = started(Mesh(tp=3), 60, lengths=(9,) * 60)
    ray.get([each.next.remote() for each in own])
    pid = ray.get(own[1].pid.remote())
    began = time.monotonic()
    os.kill(pid, 9)
    others = ray.get([each.all.remote(0.1) for each in (own[0], own[2])])
    pool.remove(own[1])
    assert others == [f"RankError: rank tp=1 (process {pid}) of this feed died"] * 2
    assert time.monotonic() - began < DEAD_S + 10
    wait_for(lambda: n_actors() == 0)


def test_a_rank_that_fails_says_why_to_the_others(started):
    own, *_ = started(Mesh(tp=3), 60, lengths=(9,) * 60)
    pid = ray.get(own[1].pid.remote())
    with pytest.raises(ray.exceptions.RayTaskError, match="loss is NaN"):
        ray.get(own[1].fail.remote())
    began = time.monotonic()
    for words in ray.get([each.all.remote(0.1) for each in (own[0], own[2])]):
        assert words == f"RankError: rank tp=1 (process {pid}) of this feed failed: ValueError: loss is NaN"
    assert time.monotonic() - began < 10


def test_a_killed_actor_is_said_to_all(started):
    own, *_ = started(Mesh(tp=2), 60, lengths=(9,) * 60)
    ray.get([each.next.remote() for each in own])
    pid = ray.get(own[0].reader_pid.remote())
    began = time.monotonic()
    os.kill(pid, 9)
    for words in ray.get([each.all.remote(0.1) for each in own]):
        assert words.startswith("RankError: the actor that reads for this feed, spool-feed-")
        assert f"(process {pid}), died: " in words
    assert time.monotonic() - began < 20
    wait_for(lambda: n_actors() == 0)


def test_a_mini_batch_of_no_micro_batches_ends_at_once_on_all_ranks(started):
    own, _, _, refs = started(Mesh(tp=2), 2, submit=False, fields=["token_ids", "routed_experts"], timeout_s=20)
    for number, chosen in enumerate(([], refs, [], [])):
        planned = plan(chosen, Mesh(tp=2), max_tokens=512, mini_batch=number)
        ray.get(own[0].submit.remote(planned, chosen, finish=number == 3))
        assert ray.get([each.mini_batch.remote() for each in own]) == [[number] * planned.n_micro] * 2
    assert ray.get([each.mini_batch.remote() for each in own]) == [[], []]
    ray.get([each.close.remote() for each in own])


def test_what_is_wrong_with_reading_reaches_every_rank(started):
    own, *_ = started(Mesh(tp=2), 2, fields=["tokens"])
    for words in ray.get([each.all.remote() for each in own]):
        assert words.startswith("NotFoundError") and "tokens" in words


def test_ranks_that_disagree_are_told(started):
    mesh = Mesh(tp=2)
    own, sp, planned, refs = started(mesh, 1, submit=False)
    ray.get(own[0].submit.remote(planned, refs))
    ray.get(own[1].submit.remote(plan(refs, mesh, n_micro=2), refs))
    for words in ray.get([each.all.remote() for each in own]):
        assert words.startswith("RankError") and "submitted different plans" in words
    wait_for(lambda: n_actors() == 0)
    ray.get(own[0].connect.remote(sp.config.uri, mesh, 0))
    ray.get(own[1].connect.remote(sp.config.uri, mesh, 0))
    assert "takes part in this feed" in ray.get(own[1].all.remote())
    ray.get(own[1].connect.remote(sp.config.uri, mesh, 1, depth=3))
    for words in ray.get([each.all.remote() for each in own]):
        assert words.startswith("RankError") and "depth=3, the first one 2" in words


def test_a_rank_that_does_not_come_is_named(started):
    own, sp, *_ = started(Mesh(tp=1), 1)
    ray.get(own[0].all.remote())
    ray.get(own[0].connect.remote(sp.config.uri, Mesh(tp=2), 0, join_timeout_s=8.0))
    assert "of the 2 ranks that share this feed only tp=[0] came within 8 s" in ray.get(own[0].all.remote())


def test_depth_counts_what_ranks_hold_and_the_store_is_free(started):
    wait_for(lambda: n_actors() == 0)
    wait_for(lambda: free_bytes() > 0.99 * STORE_BYTES)
    (own,), *_ = started(Mesh(), 6, lengths=(3000,) * 12, depth=3)
    ray.get(own.next.remote())
    held_bytes = ray.get(own.stats.remote()).held_bytes
    assert held_bytes > 1 << 17
    time.sleep(1.0)  # in which the other two came as well
    wait_for(lambda: free_bytes() > STORE_BYTES - held_bytes // 2)  # copied, and forgotten
    with pytest.raises(ray.exceptions.RayTaskError, match="holds arrays of 3 micro-batches, and depth=3 allows no"):
        ray.get(own.hold.remote(), timeout=60)


@contextmanager
def filled(left_bytes):
    """Leave so much of the object store free, below what Ray begins to move to disk at."""
    wait_for(lambda: free_bytes() > 0.99 * STORE_BYTES)
    held = ray.put(np.zeros(int(SPILLED_AT * STORE_BYTES) - left_bytes, np.uint8))
    wait_for(lambda: free_bytes() < 0.5 * STORE_BYTES)
    yield
    del held


def test_a_full_object_store_is_said_before_anything_goes_to_disk(started):
    mesh = Mesh(tp=2)
    with filled(4 << 20):
        own, *_ = started(mesh, 2, lengths=(30_000,) * 8)
        for words in ray.get([each.all.remote() for each in own]):
            assert words.startswith("CapacityError: holding 2 micro-batches (depth=2) needs ")
            assert " of memory, and Ray's object store on node " in words and "lower depth=" in words
    wait_for(lambda: free_bytes() > 0.99 * STORE_BYTES)
    again, *_ = started(mesh, 2, lengths=(30_000,) * 8)
    assert [len(found) for found in ray.get([each.all.remote() for each in again])] == [2, 2]


def test_arguments_are_checked_where_they_come_in(spool_uri, monkeypatch):
    for options, words in [
        ({"actor_options": {"name": "mine"}}, "without name: a feed sets this"),
        ({"actor_options": {"cpus": 1}}, "actor_options does not fit.*cpus"),
        ({"depth": 1}, "depth must be at least 2"),
    ]:
        with pytest.raises(InputError, match=words):
            connect(spool_uri, Mesh(), 0, framework="numpy", **options)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"Ray is not started .* ray.init"):
        connect(spool_uri, Mesh(), 0)


def test_an_actor_that_no_node_can_run_is_said_and_not_left_behind(started):
    (own,), sp, *_ = started(Mesh(), 1)
    assert len(ray.get(own.all.remote())) == 1
    wanting = {"actor_options": {"resources": {"nowhere": 1}}, "join_timeout_s": 1.5}
    with pytest.raises(ray.exceptions.RayTaskError, match="it did not start: are there nodes with what actor_options"):
        ray.get(own.connect.remote(sp.config.uri, Mesh(), 0, **wanting))
    (own,), *_ = started(Mesh(), 1)
    assert len(ray.get(own.all.remote())) == 1


def test_a_rank_whose_ray_is_shut_down_starts_no_other(open_spool, monkeypatch):
    sp = open_spool()
    refs = record(sp)
    feed = connect(sp.config.uri, Mesh(), 0, framework="numpy")
    monkeypatch.setattr("spool.integrations.ray.ray", SimpleNamespace(is_initialized=lambda: False, get=ray.get))
    feed.submit(plan(refs, Mesh(), n_micro=1), refs)
    with pytest.raises(RankError, match="died: Ray was shut down in this process"):
        next(iter(feed))
    feed.close()


def test_without_ray_the_message_says_what_to_install():
    code = "import sys; sys.modules['ray'] = None\nimport spool.integrations.ray"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ConfigError: ray is not installed: install spool-store[ray]" in done.stderr
