"""A proxy in front of an S3 server that does harm when told to: late, dropped, cut, wrong and missing answers."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CODES = {403: "AccessDenied", 404: "NoSuchKey", 400: "InvalidArgument", 500: "InternalError", 501: "NotImplemented",
         412: "PreconditionFailed", 503: "SlowDown"}  # fmt: skip
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}


@dataclass
class Fault:
    """One kind of harm.

    Attributes:
        action: ``delay`` (by ``n`` seconds), ``drop`` (no answer), ``mute`` (done, but no answer), ``cut`` (close
            the body ``n`` bytes early), ``short`` (``n`` bytes fewer, said to be all), ``long`` (``n`` bytes more),
            ``stall`` (half the body, then nothing), ``corrupt`` (change a byte of what is uploaded), ``garble`` (change
            a byte of the answer), or a status.
        method: of the requests it is for; empty for all.
        part: text that their path and query contain.
        n: see there.
        after: how many of them pass unharmed first.
        times: how many are harmed then; None for all.
    """

    action: str | int
    method: str = ""
    part: str = ""
    n: float = 10
    after: int = 0
    times: int | None = None

    def takes(self, method, path):
        if (self.method and method != self.method) or self.part not in path or self.times == 0:
            return False
        if self.after:
            self.after -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return True


class HostileS3:
    """The proxy; a context manager.

    Attributes:
        endpoint: its URL.
        faults: what it does, the first that fits a request.
        requests: method and path of every request, harmed ones included.
        created: paths that were put under the condition that nothing is there. The proxy keeps to it, as S3 does and
            the server behind does not: such a put of one of these is refused.
    """

    def __init__(self, upstream, port=0):
        self.faults, self.requests = [], []
        self.created = set()
        self.ended = threading.Event()
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"proxy": self, "upstream": upstream.removeprefix("http://")})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def fault(self, action, method="", **how):
        """Add a `Fault`."""
        self.faults.append(Fault(action, method, **how))

    def heal(self):
        """Do no more harm, and forget what was asked."""
        with self._lock:
            self.faults.clear()
            self.requests.clear()

    def count(self, method, part=""):
        """Return how many requests there were."""
        return sum(m == method and part in path for m, path in list(self.requests))

    def harm(self, method, path):
        with self._lock:
            self.requests.append((method, path))
            return next((fault for fault in self.faults if fault.takes(method, path)), None)

    def exists(self, path):
        """Return whether a path was created before; it is from now on."""
        with self._lock:
            before = path in self.created
            self.created.add(path)
            return before

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: HostileS3
    upstream: str

    def log_message(self, *_):
        pass

    def handle(self):
        with contextlib.suppress(OSError):
            super().handle()

    def _forward(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.proxy.harm(self.command, self.path)
        action = fault.action if fault else None
        if action == "drop":
            return self._hang_up()
        if action == "delay":
            time.sleep(fault.n)
        if isinstance(action, int):
            return self._refuse(action)
        if "If-None-Match" in self.headers and self.proxy.exists(self.path):
            return self._refuse(412)
        if action == "corrupt" and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        status, headers, data = self._ask(body)
        if action == "mute":
            return self._hang_up()
        if action == "short":
            data = data[: len(data) - int(fault.n)]
        if action == "garble" and data:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if action == "long":
            data += b"x" * int(fault.n)
        size = len(data)
        if self.command == "HEAD":
            size = int(next((value for name, value in headers if name.lower() == "content-length"), 0))
            size -= int(fault.n) if action == "short" else 0
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        if action == "stall":
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.proxy.ended.wait(30)
            return self._hang_up()
        if action == "cut":
            self.wfile.write(data[: len(data) - int(fault.n)])
            return self._hang_up()
        return self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _forward  # noqa: N815

    def _ask(self, body):
        upstream = http.client.HTTPConnection(self.upstream, timeout=60)
        with contextlib.closing(upstream):
            headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
            upstream.request(self.command, self.path, body=body or None, headers=headers)
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def _refuse(self, status):
        text = f"<?xml version='1.0'?><Error><Code>{CODES[status]}</Code><Message>as told</Message></Error>".encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", "0" if self.command == "HEAD" else str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _hang_up(self):
        self.close_connection = True
        self.wfile.flush()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
