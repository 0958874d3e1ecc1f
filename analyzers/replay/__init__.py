"""The dependency graph of a run, replayed with something changed.

``whatif_options`` has the changes, ``replay`` the graph that is run again, ``answers`` what comes
back.
"""
