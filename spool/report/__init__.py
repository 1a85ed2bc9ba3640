"""One page that shows the shape of a run."""
