"""Frozen structs without I/O: what Spool speaks about."""
