"""Two runs compared: whether they do the same work, what differs, and gates on it."""
