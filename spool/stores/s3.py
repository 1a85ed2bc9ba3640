"""S3, one try at a time, with the client that s3fs configures; its retries and caches are not in the way."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import hashlib
import os
import weakref
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

import s3fs
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ResponseStreamingError,
)
from botocore.exceptions import ConnectionError as ConnectionFailedError
from botocore.parsers import ResponseParserError
from fsspec.asyn import get_loop

from spool.errors import ConfigError, IntegrityError, NotFoundError, SpoolError, StorageError
from spool.stores.body import Body
from spool.stores.objects import ObjectInfo
from spool.stores.retry import TransientError
from spool.stores.threads import PerProcess
from spool.stores.wire import (
    CHECK_RIGHTS,
    CHECK_SERVER,
    ChangedError,
    OutOfRangeError,
    Version,
    Whole,
    WrongLengthError,
)

T = TypeVar("T")

_CONNECT_S = 5.0
_RIGHTS = frozenset({"AccessDenied", "ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId",
                     "SignatureDoesNotMatch", "RequestTimeTooSkewed", "AuthorizationHeaderMalformed"})  # fmt: skip
# answers whose status says "your fault" although the network damaged or delayed the request
_TRANSIENT = frozenset({"BadDigest", "XAmzContentSHA256Mismatch", "InvalidDigest", "IncompleteBody", "RequestTimeout",
                        "SlowDown", "InternalError", "ServiceUnavailable", "OperationAborted",
                        "ConditionalRequestConflict"})  # fmt: skip
_EXISTS, _OUT_OF_RANGE, _UNSUPPORTED = 412, 416, 501


_open: weakref.WeakSet[_Client] = weakref.WeakSet()


def _never_destroy_inherited() -> None:
    """In a forked child, leak the clients of its parent.

    Destroying one, at the latest when the interpreter ends, takes its sockets out of the epoll set that the child
    shares with its parent, whose requests would then hear nothing any more.
    """
    for client in list(_open):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


os.register_at_fork(after_in_child=_never_destroy_inherited)


class _Client:
    """An S3 client of one process, on the process's I/O loop."""

    def __init__(self, *, concurrency: int, stall_s: float) -> None:
        self.pid = os.getpid()
        self.loop = get_loop()
        # asynchronous: s3fs then leaves closing to its owner, and does nothing in a forked child
        self.fs = s3fs.S3FileSystem(
            asynchronous=True,
            loop=self.loop,
            skip_instance_cache=True,
            use_listings_cache=False,
            config_kwargs={
                "connect_timeout": min(_CONNECT_S, stall_s),
                "read_timeout": stall_s,
                "max_pool_connections": concurrency,
                "retries": {"total_max_attempts": 1, "mode": "standard"},
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
                "s3": {"payload_signing_enabled": False},
            },
        )
        self._connected = False
        self._end = weakref.finalize(self, _shut, self.fs, self.loop, self.pid)
        _open.add(self)

    async def _connect(self) -> None:
        client = await self.fs.set_session()
        client.meta.events.register("before-call.s3.DeleteObjects", _add_md5, unique_id="spool-md5")

    async def _call(self, request: Callable[[Any], Awaitable[T]]) -> T:
        return await request(await self.fs.set_session())

    def run(self, request: Callable[[Any], Awaitable[T]], timeout_s: float) -> T:
        """Return what ``request`` does with the client, or cancel it after ``timeout_s``."""
        if not self._connected:
            # reads configuration and the service's description, no network: no part of the request's time
            asyncio.run_coroutine_threadsafe(self._connect(), self.loop).result()
            self._connected = True
        future = asyncio.run_coroutine_threadsafe(self._call(request), self.loop)
        try:
            return future.result(timeout_s)
        finally:
            future.cancel()

    def close(self) -> None:
        self._end()


def _shut(fs: Any, loop: asyncio.AbstractEventLoop, pid: int) -> None:
    """Close a client's connections, in the process that made it only: a forked child shares its sockets."""
    creator = getattr(fs, "_s3creator", None)
    if creator is None or os.getpid() != pid or not loop.is_running():
        return
    with contextlib.suppress(TimeoutError, RuntimeError):
        asyncio.run_coroutine_threadsafe(creator.__aexit__(None, None, None), loop).result(2)


def _add_md5(params: dict[str, Any], **_: object) -> None:
    """Add the checksum that botocore no longer sends with this request and many servers ask for."""
    params["headers"].setdefault("Content-MD5", _md5(params["body"]))


def _md5(data: bytes | memoryview) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


class S3Wire:
    """Requests to a bucket.

    Uploads carry a Content-MD5, which every S3 server checks.

    Args:
        url: ``s3://bucket/prefix``.
        concurrency: connections a process.
        stall_s: a connection that is silent for so long is given up.

    Raises:
        ConfigError: the URL names no bucket.
    """

    has_parts = True

    def __init__(self, url: str, *, concurrency: int, stall_s: float) -> None:
        self._bucket, _, prefix = url.partition("://")[2].partition("/")
        if not self._bucket:
            raise ConfigError(f"{url} names no bucket; write s3://bucket/prefix")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._clients = PerProcess(lambda: _Client(concurrency=concurrency, stall_s=stall_s))

    def _call(self, timeout_s: float, method: str, **arguments: object) -> dict[str, Any]:
        async def request(client: Any) -> dict[str, Any]:
            answer: dict[str, Any] = await getattr(client, method)(Bucket=self._bucket, **arguments)
            return answer

        return self._clients.get().run(request, timeout_s)

    def _at(self, key: str) -> str:
        return f"{self._prefix}{key}"

    def read(self, key: str, start: int, stop: int, tag: str | None, timeout_s: float) -> bytes:
        """Return a range; the number of bytes is checked against the header before the body is read."""

        async def request(client: Any) -> bytes:
            answer = await client.get_object(Bucket=self._bucket, Key=self._at(key), Range=f"bytes={start}-{stop - 1}")
            async with answer["Body"] as body:
                if tag is not None and answer.get("ETag") != tag:
                    raise ChangedError
                if answer["ContentLength"] != stop - start:
                    raise WrongLengthError(answer["ContentLength"])
                data: bytes = await body.read()
                return data

        try:
            return self._clients.get().run(request, timeout_s)
        except ClientError as error:
            if _status(error) == _OUT_OF_RANGE:
                raise OutOfRangeError from None
            raise

    def read_whole(self, key: str, most_bytes: int, timeout_s: float) -> Whole:
        """Return an object; of a larger one the head alone."""

        async def request(client: Any) -> Whole:
            answer = await client.get_object(Bucket=self._bucket, Key=self._at(key))
            size: int = answer["ContentLength"]
            async with answer["Body"] as body:
                return Whole(await body.read() if size <= most_bytes else None, size, answer.get("ETag", ""))

        return self._clients.get().run(request, timeout_s)

    def write(self, key: str, data: memoryview, timeout_s: float) -> None:
        """Put a whole object."""
        self._call(timeout_s, "put_object", Key=self._at(key), Body=Body(data), ContentMD5=_md5(data))

    def create(self, key: str, data: memoryview, timeout_s: float) -> bool:
        """Put a whole object unless there is one; servers that do not know the condition replace it."""
        try:
            self._call(
                timeout_s, "put_object", Key=self._at(key), Body=Body(data), ContentMD5=_md5(data), IfNoneMatch="*"
            )
        except ClientError as error:
            if _status(error) == _UNSUPPORTED:
                self.write(key, data, timeout_s)
            elif _status(error) == _EXISTS:
                return False
            else:
                raise
        return True

    def stat(self, key: str, timeout_s: float) -> Version | None:
        """Return an object's version; its tag is the ETag."""
        try:
            found = self._call(timeout_s, "head_object", Key=self._at(key))
        except ClientError as error:
            if _status(error) == 404:
                return None
            raise
        info = ObjectInfo(key, found["ContentLength"], found["LastModified"].timestamp())
        return Version(info, found.get("ETag", ""))

    def page(self, prefix: str, token: str | None, timeout_s: float) -> tuple[Sequence[ObjectInfo], str | None]:
        """Return a page of a listing."""
        more = {} if token is None else {"ContinuationToken": token}
        found = self._call(timeout_s, "list_objects_v2", Prefix=self._at(prefix), **more)
        objects = [
            ObjectInfo(item["Key"].removeprefix(self._prefix), item["Size"], item["LastModified"].timestamp())
            for item in found.get("Contents", ())
            if not item["Key"].endswith("/")  # a folder that some servers make up or keep
        ]
        return objects, found["NextContinuationToken"] if found.get("IsTruncated") else None

    def delete(self, keys: Sequence[str], timeout_s: float) -> None:
        """Delete objects with one request."""
        asked = [{"Key": self._at(key)} for key in keys]
        answer = self._call(timeout_s, "delete_objects", Delete={"Objects": asked, "Quiet": True})
        for failure in answer.get("Errors", ()):
            if failure.get("Code") not in ("NoSuchKey", "404"):
                raise ClientError({"Error": failure, "ResponseMetadata": {"HTTPStatusCode": 0}}, "DeleteObjects")

    def begin(self, key: str, timeout_s: float) -> str:
        """Begin a multipart upload."""
        upload: str = self._call(timeout_s, "create_multipart_upload", Key=self._at(key))["UploadId"]
        return upload

    def put_part(self, key: str, upload: str, number: int, data: memoryview, timeout_s: float) -> str:
        """Put a part."""
        answer = self._call(
            timeout_s, "upload_part",
            Key=self._at(key), UploadId=upload, PartNumber=number, Body=Body(data), ContentMD5=_md5(data),
        )  # fmt: skip
        tag: str = answer["ETag"]
        return tag

    def complete(self, key: str, upload: str, tags: Sequence[str], timeout_s: float) -> None:
        """Make the parts one object; FileNotFoundError where there is no such upload any more."""
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
        try:
            self._call(
                timeout_s, "complete_multipart_upload",
                Key=self._at(key), UploadId=upload, MultipartUpload={"Parts": parts},
            )  # fmt: skip
        except ClientError as error:
            if _code(error) == "NoSuchUpload":
                raise FileNotFoundError(key) from None
            raise

    def abort(self, key: str, upload: str, timeout_s: float) -> None:
        """Abort a multipart upload."""
        try:
            self._call(timeout_s, "abort_multipart_upload", Key=self._at(key), UploadId=upload)
        except ClientError as error:
            if _status(error) != 404:
                raise

    def uploads(self, before: float, timeout_s: float) -> Sequence[tuple[str, str]]:
        """Return the unfinished multipart uploads below the root."""
        found: list[tuple[str, str]] = []
        marks: dict[str, str] = {}
        while True:
            page = self._call(timeout_s, "list_multipart_uploads", Prefix=self._prefix, **marks)
            for upload in page.get("Uploads", ()):
                initiated: datetime = upload["Initiated"]
                if initiated.timestamp() <= before and upload["Key"].startswith(self._prefix):
                    found.append((upload["Key"].removeprefix(self._prefix), upload["UploadId"]))
            if not page.get("IsTruncated"):
                return found
            marks = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def explain(self, error: Exception, what: str, key: str) -> SpoolError | TransientError:
        """Sort an error of the client by status and code; its text is not looked at."""
        if isinstance(error, ClientError):
            return self._explain_answer(_status(error), _code(error), what, key)
        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            return StorageError(
                f"cannot {what}: no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
                "AWS_PROFILE, or give the machine a role",
                key=key,
            )
        name = type(error).__name__
        network = (ConnectionFailedError, HTTPClientError, ResponseStreamingError, ResponseParserError, OSError)
        if isinstance(error, network) or not isinstance(error, BotoCoreError | TypeError | ValueError):
            failed = f"the connection{_endpoint(error)} failed ({name})"
            reason = "it took too long" if isinstance(error, TimeoutError) else failed
            return TransientError(reason, kind=StorageError, advice=CHECK_SERVER, key=key)
        return StorageError(
            f"cannot {what}: the client refused ({name}); check the AWS configuration, and that AWS_ENDPOINT_URL "
            "begins with http:// or https://",
            key=key,
        )

    def _explain_answer(self, status: int, code: str, what: str, key: str) -> SpoolError | TransientError:
        facts: dict[str, Any] = {"key": key, "status": status, "code": code}
        said = f"the server answered {status} {code}"
        if code == "NoSuchBucket":
            return StorageError(f"cannot {what}: there is no bucket {self._bucket}; make it, or mend the URL", **facts)
        if code in _TRANSIENT or status in (408, 429) or (status >= 500 and status != _UNSUPPORTED):
            kind = IntegrityError if code in ("BadDigest", "XAmzContentSHA256Mismatch") else StorageError
            return TransientError(said, kind=kind, advice=CHECK_SERVER, **facts)
        if status in (401, 403) or code in _RIGHTS:
            return StorageError(f"cannot {what}: {said}; {CHECK_RIGHTS}", **facts)
        if status == 404:
            return NotFoundError(f"cannot {what}: there is no such object ({code})", **facts)
        return StorageError(f"cannot {what}: {said}; check the URL and the endpoint", **facts)

    def close(self) -> None:
        """Close this process's connections."""
        client = self._clients.take()
        if client is not None:
            client.close()


def _endpoint(error: Exception) -> str:
    """Return where a connection led, as far as the client says it; scheme, host and port only."""
    told = getattr(error, "kwargs", {}).get("endpoint_url")
    parts = urlsplit(told) if isinstance(told, str) else None
    return f" to {parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts is not None and parts.netloc else ""


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
