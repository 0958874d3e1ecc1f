"""The environment hook of ``chopper record``: no code of the program is changed.

``chopper record`` puts this folder first on PYTHONPATH: every Python below it imports
``sitecustomize`` from here at its start. That arms :mod:`chopper.recording.hook.arming` when the
process imports torch, and that starts to record when it trains, which launchers, data loader
workers and helpers never do.
"""

from __future__ import annotations
