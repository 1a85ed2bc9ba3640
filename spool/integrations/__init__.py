"""Bridges to what others use. Each file imports its other side when it is used, never `spool` with it."""
