"""The subcommands of ``chopper estimate``: each module here is one, with three names.

``Options`` is what can be asked (its docstring is the help), ``estimate`` computes the result from
it, and ``page`` shows the result.
"""
