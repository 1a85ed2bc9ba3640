"""The trainer's side: what each rank of a mesh consumes."""
