"""Nodes of a cluster as directories, for tests: each with a hot root of its own, all with one cold root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def location(folder, cold, **options):
    """Return the URI of a node's hot root in front of a cold root."""
    query = "&".join(f"{key}={value}" for key, value in {"spill": cold, **options}.items())
    return f"file://{folder}?{query}"


def start(task, **arguments):
    """Start a process that does ``task`` of this module's command line; talk to it by lines of JSON."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    return subprocess.Popen(
        [sys.executable, str(TESTS / "nodes.py"), task, json.dumps(arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def result(process, *, timeout_s=300):
    """Return what a process printed, one value a line, once it has ended well."""
    out, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, f"a process ended with {process.returncode}"
    return [json.loads(line) for line in out.splitlines()]


def say(value):
    """Print a value for `result`."""
    print(json.dumps(value), flush=True)


# -- what processes do ------------------------------------------------------------------------------------------------


def write(uri, names):
    """Record a session a name and publish it; say its steps, as they are acknowledged, and its segments."""
    import msgspec
    from tiers import record

    import spool

    with spool.open(uri) as sp:
        made = []
        for name in names:
            segments = record(sp, name, group_id=name.split("-")[0])
            say({"session": name, "steps": [step.index for step in sp.steps(name)]})
            made += segments
        sp.publish(made, timeout_s=240)
        say({"segments": msgspec.json.encode(made).decode()})


def suspend(uri, session_id):
    """Record a session's first steps, suspend it and publish it; say the token."""
    import numpy as np
    from tiers import SHAPE

    import spool

    with spool.open(uri) as sp:
        s = sp.session(session_id, experts=SHAPE)
        rng, prompt = np.random.default_rng(7), list(range(40))
        for _ in range(2):
            n = len(prompt) + 30
            order = np.argsort(rng.random((n - 1, SHAPE.num_layers, 16)), axis=-1)[..., : SHAPE.topk]
            s.append(
                prompt_token_ids=prompt, response_token_ids=list(range(30)), routed_experts=(order * 8).astype("i4"),
                logprobs=rng.standard_normal(30).astype("f4"), weight_version="1",
                messages=[{"role": "user", "content": "x" * len(prompt)}],
            )  # fmt: skip
            prompt = prompt + list(range(30)) + [1, 2, 3]
        token = s.suspend()
        sp.publish(sp.steps(session_id), timeout_s=120)
        say({"token": token, "prompt": prompt})


def create(uri):
    """Make the spool when told to; say its id."""
    import spool

    say("ready")
    sys.stdin.readline()
    with spool.open(uri) as sp:
        say(sp.spool_id)


def read(location_, refs):
    """Read references and say how many bytes came and a checksum."""
    import msgspec
    import xxhash

    import spool
    from spool.model.refs import SegmentRef

    with spool.open(location_, readonly=True) as sp:
        for sample in sp.read(msgspec.json.decode(refs, type=list[SegmentRef])):
            digest = xxhash.xxh3_64()
            for name in sorted(sample):
                digest.update(sample[name].tobytes())
            say(digest.hexdigest())


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
