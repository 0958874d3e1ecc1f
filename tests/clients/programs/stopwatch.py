"""Time of one place in a training program, as a share of its loop: the truth that is planted."""

from __future__ import annotations

import json
import time


class Stopwatch:
    """Sums the time in its with-blocks and the time between its laps; the first lap is left out."""

    def __init__(self):
        self.entered_s = self.last_s = None
        self.planted_s = self.inside_s = self.loop_s = 0.0

    def __enter__(self):
        self.entered_s = time.perf_counter()

    def __exit__(self, *exception):
        self.inside_s += time.perf_counter() - self.entered_s

    def each(self, iterable):
        """Yield what an iterable yields; waiting for it is planted."""
        iterator = iter(iterable)
        while True:
            with self:
                item = next(iterator, None)
            if item is None:
                return
            yield item

    def lap(self):
        """End a step."""
        now_s = time.perf_counter()
        if self.last_s is not None:
            self.loop_s += now_s - self.last_s
            self.planted_s += self.inside_s
        self.last_s, self.inside_s = now_s, 0.0

    def report(self):
        """Print the share of the loop as a line of JSON."""
        share = self.planted_s / self.loop_s
        print(json.dumps({"planted_ratio": round(share, 4), "loop_s": round(self.loop_s, 3)}))
