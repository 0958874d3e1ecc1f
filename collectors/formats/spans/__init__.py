"""Spans of other tools: their tables, and the timers of pipelines."""
