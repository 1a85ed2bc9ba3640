"""Which rank trains which rows: lengths and a mesh in, exact rows out. Pure: imports no store, and reads nothing."""
