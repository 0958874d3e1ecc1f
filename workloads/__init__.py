"""Reference workloads: each a script that reads top to bottom and uses only the public API."""
