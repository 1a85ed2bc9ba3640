"""A recorded run as a torch dataset: order, packed batches, reading ahead, resuming."""
