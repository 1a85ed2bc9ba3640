"""Buffers <-> arrays and structs, never a path: Zarr shards, commit log frames, Arrow records, payloads."""
