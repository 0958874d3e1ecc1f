"""Collectors: one source each (kernel trace, host, memory, foreign formats), written as tables."""
