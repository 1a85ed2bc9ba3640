"""From references to the arrays that a trainer takes: whole batches, or the routing of a layer at a time."""
