"""The S3 server of the tests, as `tools.s3_server` has it."""

from tools.s3_server import S3Server, free_port

__all__ = ["S3Server", "free_port"]
