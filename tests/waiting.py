"""Waiting for what another process or thread does, on a machine however busy."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

PATIENCE_S = 600.0
"""Ends a test that hangs. Nothing is measured by it: what comes late has come."""


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition; fail when it never comes about."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s, f"never came about: {what}"
        select.select([], [], [], 0.01)


PATIENT_SAMPLERS = f"""
from chopper.collectors.sampler import SamplerProcess
SamplerProcess.stop.__kwdefaults__["timeout_s"] = {PATIENCE_S}
"""
"""In a program that records: a sampler without a core is waited for, which would hold up users."""
