"""Run directories: their layout, reading, writing and exclusive access."""
