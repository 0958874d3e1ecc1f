"""Experiments: the variants of a workload, how they are started, and what came out."""
