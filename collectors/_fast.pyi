from __future__ import annotations

Place = tuple[int, int, int]
"""Offset and width in bytes of a number in what a call writes, and a tag (see ``_plan``)."""

class Loop:
    """Calls a driver's functions at absolute deadlines, in threads of its own, without the GIL."""

    def __init__(
        self,
        period_ns: int,
        capacity: int,
        column_count: int,
        outcomes: tuple[tuple[int, int], ...],
        keep_empty: bool,
        devices: tuple[
            tuple[
                int,
                int,
                tuple[
                    tuple[
                        int, int, int | None, bytes, tuple[int, int, int, int, int] | None, int, int
                    ],
                    ...,
                ],
                tuple[tuple[int, int, tuple[Place, ...], int | float, bool, bool, int] | None, ...],
            ],
            ...,
        ],
    ) -> None:
        """A loop that has not started.

        Args:
            period_ns: between deadlines.
            capacity: records of a device's ring, a power of two up to 2^24.
            column_count: at most 32.
            outcomes: code → what it takes away: 1 the sensor, 2 the device; others this reading.
            keep_empty: also keep readings of which no value is known.
            devices: id, code of the name (-1: none), calls (function, handle, second argument, what
                the buffer holds at first, what is computed between two snapshots, at each how many
                samples, after how many first) and columns (kind, call, places, factor, whether 0 is
                unknown, whether all bits one is, the largest value).

        Raises:
            ValueError: something of it does not fit together.
        """

    def start(self, first_ns: int, /) -> None:
        """Start the thread; ``first_ns`` is the first deadline, of CLOCK_MONOTONIC."""

    def relieve(self, limit_ns: int, /) -> list[tuple[int, int]]:
        """Give the devices behind a call that blocks to a new thread.

        Returns:
            (device, how long its call has lasted) of each call that is longer than ``limit_ns``.
        """

    def set_period(self, period_ns: int, /) -> None:
        """Change the time between deadlines."""

    def take(
        self,
    ) -> tuple[int, list[tuple[bytes | None, bytes, int]]]:
        """Records since the last call, by time.

        Returns:
            How many, and Arrow's buffers and count of nulls of each column: time, span, device,
            code of the name, then those of the plan.
        """

    def statistics(
        self,
    ) -> tuple[
        list[tuple[int, int, int, int, int, int, int, tuple[int, ...]]],
        dict[int, int],
        dict[int, int],
        int,
    ]:
        """Totals since the start.

        Returns:
            Of each device: id, samples, late, dropped, those that its ring had no room for, time
            from first to last, the code that lost it (0: none), the code that took each column
            away. Then counts of delays and of costs of a tick by bucket, and the number of ticks.
        """

    def stop(self, timeout_ns: int, /) -> int:
        """End the threads; how many are still inside a call of the driver."""
