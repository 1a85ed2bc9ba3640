"""Public help for testing programs that use Spool: deterministic synthetic workloads with the data to expect."""
