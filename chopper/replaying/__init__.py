"""Replays of a run: what it would take with something changed, and what each cause gives back.

``asked`` has the changes, ``answers`` what comes back, ``replay`` the graph that is run again.
"""

from __future__ import annotations

from chopper.replaying.answers import SCHEMA, WhatIf
from chopper.replaying.asked import ALIASES, Changes, causes_named, changes_of
from chopper.replaying.path import lanes_of
from chopper.replaying.replay import Replay, recoverable, replay_of

__all__ = [
    "ALIASES",
    "SCHEMA",
    "Changes",
    "Replay",
    "WhatIf",
    "causes_named",
    "changes_of",
    "lanes_of",
    "recoverable",
    "replay_of",
]
