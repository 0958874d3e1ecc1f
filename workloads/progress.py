"""Progress of a long measurement, said now and then by one rank."""

from __future__ import annotations

import os
import time

EVERY_S = 5.0


class Progress:
    """Prints a line when five seconds have passed since the last one; nothing in shorter work."""

    def __init__(self, total: int, unit: str) -> None:
        self.total, self.unit, self.done = total, unit, 0
        self._told_s = self._began_s = time.monotonic()

    def advance(self) -> None:
        """A part is done; free of synchronization with the device."""
        self.done += 1
        now_s = time.monotonic()
        if now_s - self._told_s < EVERY_S or self.done == self.total:
            return
        self._told_s = now_s
        if os.environ.get("RANK", "0") == "0":
            left_s = (now_s - self._began_s) / self.done * (self.total - self.done)
            # Of the first parts alone, what it took to begin would be multiplied.
            left = f", about {left_s:.0f} s left" if 20 * self.done >= self.total else ""
            print(f"{self.unit} {self.done} of {self.total}{left}", flush=True)
