"""Jobs of many ranks: their operations, the dependency model, its what-if.

``operations`` is their table, ``schedules`` has the pipeline schedules, ``model`` the graph and its
simulation, ``whatif`` the slowdown and its parts, ``rescheduled`` other shapes.
"""
