"""The environment hook of ``chopper record``: no code of the program is changed.

``chopper record`` puts this folder first on PYTHONPATH. Every Python started below it, however
deep (torchrun's ranks, multiprocessing's children), imports ``sitecustomize`` from here at its
start; that arms :mod:`chopper.recording.hook.arming` if and when the process imports torch; and
that starts to record if and when the process trains. Launchers, data loader workers and helpers
never do.
"""

from __future__ import annotations
