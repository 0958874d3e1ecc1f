"""Run directories: where they may be, what lies in them, and how it is checked."""
