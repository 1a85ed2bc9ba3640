"""The terminal browser: screens over a spool that is only read. Needs the extra ``tui``."""
