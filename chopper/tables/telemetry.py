"""Tables that samplers write while a run goes on, as Arrow IPC streams."""

from __future__ import annotations

from chopper.tables._base import Column, Table

_TIME = Column(name="time_ns", type="int64", unit="ns", doc="Unix time of the sample (middle).")

CPU_CORE = Table(
    "cpu_core",
    1,
    "Use of each core since the previous sample.",
    (
        _TIME,
        Column(name="core_id", type="int32", doc="Core as the kernel numbers it."),
        Column(name="busy_ratio", type="float64", unit="ratio", nullable=True, doc="Not idle."),
        Column(
            name="system_ratio", type="float64", unit="ratio", nullable=True, doc="In the kernel."
        ),
        Column(
            name="steal_ratio",
            type="float64",
            unit="ratio",
            nullable=True,
            doc="Taken by the hypervisor.",
        ),
    ),
)

HOST = Table(
    "host",
    1,
    "The host as a whole. Counters are totals since boot or cgroup creation.",
    (
        _TIME,
        Column(
            name="memory_available_bytes",
            type="int64",
            unit="bytes",
            nullable=True,
            doc="MemAvailable.",
        ),
        Column(
            name="pressure_cpu_some_ns",
            type="int64",
            unit="ns",
            nullable=True,
            doc="PSI cpu some, total.",
        ),
        Column(
            name="pressure_memory_some_ns",
            type="int64",
            unit="ns",
            nullable=True,
            doc="PSI memory some, total.",
        ),
        Column(
            name="pressure_io_some_ns",
            type="int64",
            unit="ns",
            nullable=True,
            doc="PSI io some, total.",
        ),
        Column(
            name="cgroup_throttled_ns",
            type="int64",
            unit="ns",
            nullable=True,
            doc="Time this cgroup was throttled, total.",
        ),
    ),
)

PROCESS = Table(
    "process",
    1,
    "The ranks' processes (with their children) since the previous sample.",
    (
        _TIME,
        Column(name="rank", type="int32", doc="Rank that the process belongs to."),
        Column(name="pid", type="int64", doc="Process."),
        Column(
            name="cpu_ratio",
            type="float64",
            unit="ratio",
            nullable=True,
            doc="CPU time over wall time; 2.0 is two cores.",
        ),
        Column(
            name="rss_bytes", type="int64", unit="bytes", nullable=True, doc="Resident set size."
        ),
        Column(
            name="pss_bytes",
            type="int64",
            unit="bytes",
            nullable=True,
            doc="Proportional set size (sampled at most once a second).",
        ),
        Column(name="thread_count", type="int32", unit="count", nullable=True, doc="Threads."),
    ),
)

NIC = Table(
    "nic",
    1,
    "Network interfaces. Counters are totals since boot.",
    (
        _TIME,
        Column(name="interface", type="string", doc="Name of the interface."),
        Column(name="rx_bytes", type="int64", unit="bytes", nullable=True, doc="Received."),
        Column(name="tx_bytes", type="int64", unit="bytes", nullable=True, doc="Sent."),
    ),
)

DEVICE_MEMORY = Table(
    "device_memory",
    1,
    "Device memory of one rank as its allocator sees it.",
    (
        _TIME,
        Column(name="device_id", type="int32", doc="Device ordinal."),
        Column(
            name="allocated_bytes", type="int64", unit="bytes", nullable=True, doc="In tensors."
        ),
        Column(
            name="reserved_bytes",
            type="int64",
            unit="bytes",
            nullable=True,
            doc="Held by the allocator.",
        ),
        Column(
            name="max_allocated_bytes",
            type="int64",
            unit="bytes",
            nullable=True,
            doc="Peak in tensors since the start.",
        ),
    ),
)

TELEMETRY_TABLES = (CPU_CORE, HOST, PROCESS, NIC, DEVICE_MEMORY)
