"""Bytes at keys: local files, read and written without ever seeing an array."""
