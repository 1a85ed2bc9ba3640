"""What other processes do in the tests of cold reads: light to import, since each starts a fresh interpreter."""

from __future__ import annotations

import hashlib
import os
import resource

import spool


def digest(samples):
    """Return one text for the content of samples."""
    seen = hashlib.sha256()
    for sample in samples:
        for name in sorted(sample):
            seen.update(name.encode())
            seen.update(sample[name].tobytes())
    return seen.hexdigest()


def read_all(location, refs, out, environment):
    """Read in this process with a handle of its own; a fork server has the environment of when it was started."""
    os.environ.update(environment)
    with spool.open(location, readonly=True) as sp:
        out.put(digest(sp.read(refs)))


def read_in_fork(sp, refs, out, _environment):
    """Read with the handle that this process was forked with."""
    out.put(digest(sp.read(refs)))


def measure(location, refs, fields, out):
    """Read in this process; send the bytes of the result, and by how much the most memory ever held has grown."""
    with spool.open(location, readonly=True) as sp:
        sp.read(refs[0], fields=fields, tokens=slice(0, 10))
        before = _most_bytes()
        samples = sp.read(refs, fields=fields, dtype="stored")
        out.put((sum(value.nbytes for sample in samples for value in sample.values()), _most_bytes() - before))


def _most_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
