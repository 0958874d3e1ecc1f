"""What a run would have taken with something changed: a replay of its dependency graph.

`graph` makes the graph from joined ranks, `changes` says what is different, `solve` runs it,
`schedule` turns the outcome into windows and tables. See docs/concepts/replay.md.
"""
