"""Analyzers: pure functions from tables to tables. No I/O, no plotting, no torch."""
