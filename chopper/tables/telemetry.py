"""Tables that samplers write while a run goes on, as Arrow IPC streams.

Samples are taken at their own rates and joined to a trace by time. Every row carries the middle of
the reading and how long the reading took: what it says held at some moment in
``time_ns`` ± ``span_ns`` / 2.
"""

from __future__ import annotations

from chopper.tables._base import Column, ColumnType, Table

_TIME = Column(
    name="time_ns", type="int64", unit="ns", doc="Unix time of the sample: middle of the reading."
)
_SPAN = Column(
    name="span_ns",
    type="int64",
    unit="ns",
    doc="How long the reading took; the sample's time is known to half of it.",
)


def _maybe(name: str, kind: ColumnType, unit: str | None, doc: str) -> Column:
    """A column that is null where the machine does not say."""
    return Column(name=name, type=kind, unit=unit, doc=doc, nullable=True)


CPU_CORE = Table(
    "cpu_core",
    1,
    "Use of each core since the previous sample. The kernel counts in ticks of 10 ms, so one "
    "sample is exact to 10 ms over its period; the errors do not add up over samples.",
    (
        _TIME,
        _SPAN,
        Column(name="core_id", type="int32", doc="Core as the kernel numbers it."),
        _maybe(
            "busy_ratio",
            "float64",
            "ratio",
            "Share of the time in which it ran tasks or interrupts of this machine: neither idle, "
            "nor waiting for I/O, nor stolen.",
        ),
        _maybe("system_ratio", "float64", "ratio", "In the kernel, interrupts included."),
        _maybe("steal_ratio", "float64", "ratio", "Taken by the hypervisor for other guests."),
    ),
)

HOST = Table(
    "host",
    1,
    "The host as a whole. Pressure and throttling are totals since boot or cgroup creation; "
    "difference them.",
    (
        _TIME,
        _SPAN,
        _maybe("memory_available_bytes", "int64", "bytes", "MemAvailable of /proc/meminfo."),
        _maybe(
            "pressure_cpu_some_ns",
            "int64",
            "ns",
            "Time in which at least one task waited for a core (PSI cpu some, total).",
        ),
        _maybe(
            "pressure_memory_some_ns",
            "int64",
            "ns",
            "Time in which at least one task waited for memory (PSI memory some, total).",
        ),
        _maybe(
            "pressure_io_some_ns",
            "int64",
            "ns",
            "Time in which at least one task waited for I/O (PSI io some, total).",
        ),
        _maybe(
            "cgroup_throttled_ns",
            "int64",
            "ns",
            "Time in which this job's cgroup was held back by its CPU quota, total; summed over "
            "cores as the kernel counts it.",
        ),
        _maybe(
            "cgroup_throttled_count",
            "int64",
            "count",
            "Quota periods in which this job's cgroup was held back, total.",
        ),
    ),
)

PROCESS = Table(
    "process",
    1,
    "Each rank's process, with the processes it started (data loader workers).",
    (
        _TIME,
        _SPAN,
        Column(name="rank", type="int32", doc="Rank that the process belongs to."),
        Column(name="pid", type="int64", doc="The rank's own process."),
        _maybe(
            "cpu_ratio",
            "float64",
            "ratio",
            "CPU time over wall time since the previous sample, children included; 2.0 is two "
            "cores. Children count from when they were found, at most a second after they began.",
        ),
        _maybe("child_cpu_ratio", "float64", "ratio", "The children's share of cpu_ratio."),
        _maybe(
            "run_delay_ns",
            "int64",
            "ns",
            "Time in which the rank's main thread could run but had to wait for a core, total.",
        ),
        _maybe(
            "rss_bytes",
            "int64",
            "bytes",
            "Resident set size, summed over the rank and its children; shared pages count in each.",
        ),
        _maybe(
            "pss_bytes",
            "int64",
            "bytes",
            "Proportional set size of the rank and its children: shared pages are divided among "
            "those who share. Read at most once a second, null in the samples between.",
        ),
        _maybe("thread_count", "int32", "count", "Threads of the rank and its children."),
        _maybe("child_count", "int32", "count", "Processes that descend from the rank."),
    ),
)

NIC = Table(
    "nic",
    1,
    "Network interfaces. Counters are totals since boot; RDMA traffic bypasses them.",
    (
        _TIME,
        _SPAN,
        Column(name="interface", type="string", doc="Name of the interface."),
        _maybe("rx_bytes", "int64", "bytes", "Received, total."),
        _maybe("tx_bytes", "int64", "bytes", "Sent, total."),
    ),
)

DEVICE_MEMORY = Table(
    "device_memory",
    1,
    "Device memory of one rank as torch's allocator sees it, read at the end of each step.",
    (
        _TIME,
        _SPAN,
        Column(name="device_id", type="int32", doc="Device ordinal."),
        _maybe("step", "int64", None, "Step that had just ended; null outside of steps."),
        _maybe("allocated_bytes", "int64", "bytes", "Held by tensors."),
        _maybe("reserved_bytes", "int64", "bytes", "Held by the allocator."),
        _maybe("max_allocated_bytes", "int64", "bytes", "Peak in tensors since the process began."),
        _maybe("max_reserved_bytes", "int64", "bytes", "Peak in the allocator since then."),
    ),
)

DEVICE_CLOCK = Table(
    "device_clock",
    1,
    "Clocks, power and event reasons of each device as its driver reports them: the fast tier.",
    (
        _TIME,
        _SPAN,
        Column(
            name="device_id",
            type="int32",
            doc="Device ordinal as the ranks' framework numbers it, where no UUID tells better.",
        ),
        _maybe(
            "device_uuid",
            "string",
            None,
            "UUID of the device as its driver writes it; joins samples to ranks.",
        ),
        _maybe(
            "sm_clock_hz",
            "int64",
            "hz",
            "Current SM (gfx) clock; mean over the dies of one device.",
        ),
        _maybe("memory_clock_hz", "int64", "hz", "Current memory clock."),
        _maybe("power_w", "float64", "w", "Instant board (socket) power."),
        _maybe(
            "event_reasons",
            "int64",
            None,
            "Why the clock is where it is, bits as NVML's clocks event reasons; unknown bits kept.",
        ),
    ),
)

CLOCK = Table(
    "clock",
    1,
    "The host's clocks read together about once a second: joins times of different clocks, and "
    "shows when the wall clock was stepped or slewed.",
    (
        _TIME,
        _SPAN,
        Column(name="monotonic_ns", type="int64", unit="ns", doc="CLOCK_MONOTONIC at time_ns."),
        _maybe("monotonic_raw_ns", "int64", "ns", "CLOCK_MONOTONIC_RAW at time_ns; not slewed."),
    ),
)

TELEMETRY_TABLES = (CPU_CORE, HOST, PROCESS, NIC, DEVICE_MEMORY, DEVICE_CLOCK, CLOCK)
