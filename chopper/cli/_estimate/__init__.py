"""The subcommands of ``chopper estimate``: one module each, loaded when it is called."""

from __future__ import annotations
