"""The terminal browser: looks inside a spool and writes nothing into it."""
