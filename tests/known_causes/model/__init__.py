"""A model of a training job that keeps its own books; it knows nothing of the analyzers."""
