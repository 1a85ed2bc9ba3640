"""The speed table: each row against a peer or the bare system call, in the same run."""
