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

PROCESS_THREAD = Table(
    "process_thread",
    1,
    "Threads of each rank's own process: time on a core and time waiting for one, totals since the "
    "thread began. A row only where one of them grew; of many threads, those that ran most.",
    (
        _TIME,
        _SPAN,
        Column(name="rank", type="int32", doc="Rank that the thread belongs to."),
        Column(name="pid", type="int64", doc="The rank's own process."),
        Column(name="tid", type="int64", doc="The thread, as in `host_span`."),
        Column(name="name", type="string", doc="Name of the thread when it was first seen."),
        Column(name="run_ns", type="int64", unit="ns", doc="On a core."),
        Column(
            name="run_delay_ns",
            type="int64",
            unit="ns",
            doc="Ready to run, and waiting for a core.",
        ),
        Column(name="slice_count", type="int64", unit="count", doc="Times that it was put on one."),
    ),
)

PROCESS_EVENT = Table(
    "process_event",
    1,
    "What the kernel counts of each rank (perf_event_open), totals since sampling began: of its "
    "threads then, and of all threads and processes that these started later.",
    (
        _TIME,
        _SPAN,
        Column(name="rank", type="int32", doc="Rank that the process belongs to."),
        Column(name="pid", type="int64", doc="The rank's own process."),
        _maybe("context_switch_count", "int64", "count", "Times that a thread left its core."),
        _maybe("migration_count", "int64", "count", "Times that a thread went to another core."),
        _maybe("page_fault_count", "int64", "count", "Page faults."),
        _maybe("major_fault_count", "int64", "count", "Page faults that had to read from a disk."),
        _maybe("cycle_count", "int64", "count", "Cycles of the cores."),
        _maybe("instruction_count", "int64", "count", "Instructions that were completed."),
        _maybe("cache_miss_count", "int64", "count", "Misses of the last cache."),
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

CORE_CLOCK = Table(
    "core_clock",
    1,
    "Clock of each core of the host, where its driver shows it.",
    (
        _TIME,
        _SPAN,
        Column(name="core_id", type="int32", doc="Core as the kernel numbers it."),
        Column(name="clock_hz", type="int64", unit="hz", doc="Clock now."),
    ),
)

CORE_CYCLE = Table(
    "core_cycle",
    1,
    "Clock of each core while it ran since its previous row, from the registers aperf and mperf.",
    (
        _TIME,
        _SPAN,
        Column(name="core_id", type="int32", doc="Core as the kernel numbers it."),
        Column(
            name="clock_ratio",
            type="float64",
            unit="ratio",
            doc="Mean clock while it ran, of its nominal clock.",
        ),
        _maybe("clock_hz", "int64", "hz", "The same in Hz, where the nominal clock is told."),
    ),
)

HOST_ENERGY = Table(
    "host_energy",
    1,
    "Energy of the host's processors (RAPL), with wraps of the counter undone.",
    (
        _TIME,
        _SPAN,
        Column(name="domain", type="string", doc="Domain, for example package-0/dram."),
        Column(name="energy_j", type="float64", unit="j", doc="Energy since sampling began."),
    ),
)

FABRIC_PORT = Table(
    "fabric_port",
    1,
    "InfiniBand, RoCE and EFA ports. Counters are totals; difference them, and mind that some "
    "wrap or stick at 32 bits.",
    (
        _TIME,
        _SPAN,
        Column(
            name="device", type="string", doc="Name of the device, for example mlx5_0 or rdmap0s6."
        ),
        Column(name="port_id", type="int32", doc="Port of the device."),
        _maybe("tx_bytes", "int64", "bytes", "Sent, total (words of 4 bytes made bytes)."),
        _maybe("rx_bytes", "int64", "bytes", "Received, total."),
        _maybe("rdma_read_bytes", "int64", "bytes", "Read by RDMA (EFA), total."),
        _maybe("rdma_write_bytes", "int64", "bytes", "Written by RDMA (EFA), total."),
        _maybe("retransmitted_bytes", "int64", "bytes", "Sent again (EFA), total."),
        _maybe("tx_wait_count", "int64", "count", "Ticks in which data waited for credits."),
        _maybe("tx_discard_count", "int64", "count", "Packets that were not sent."),
        _maybe("link_down_count", "int64", "count", "Times that the link went down."),
        _maybe("symbol_error_count", "int64", "count", "Symbol errors on the link."),
        _maybe("cnp_sent_count", "int64", "count", "Congestion notifications sent as receiver."),
        _maybe("cnp_handled_count", "int64", "count", "Congestion notifications obeyed as sender."),
        _maybe("ecn_marked_count", "int64", "count", "Packets that came marked by a switch."),
        _maybe("out_of_sequence_count", "int64", "count", "Packets that came out of order."),
        _maybe("sequence_error_count", "int64", "count", "Negative acknowledgements for order."),
        _maybe("timeout_count", "int64", "count", "Acknowledgements that did not come in time."),
        _maybe(
            "receiver_not_ready_count", "int64", "count", "Receiver-not-ready retries exceeded."
        ),
        _maybe("adaptive_retransmit_count", "int64", "count", "Adaptive retransmissions (RoCE)."),
        _maybe("out_of_buffer_count", "int64", "count", "Packets dropped for want of a buffer."),
    ),
)

PAUSE = Table(
    "pause",
    1,
    "Priority flow control of Ethernet interfaces, from their drivers' statistics; totals.",
    (
        _TIME,
        _SPAN,
        Column(name="interface", type="string", doc="Name of the interface."),
        Column(name="priority", type="int32", doc="Priority, 0 to 7."),
        _maybe("rx_pause_count", "int64", "count", "Pause frames received: told to stop."),
        _maybe("tx_pause_count", "int64", "count", "Pause frames sent: told others to stop."),
        _maybe("rx_pause_ns", "int64", "ns", "Time in which sending was paused, total."),
        _maybe("tx_pause_ns", "int64", "ns", "Time in which others were paused, total."),
    ),
)

CORE_WAIT = Table(
    "core_wait",
    1,
    "Run time and run delay of the thread that ends each step, read where steps meet.",
    (
        _TIME,
        _SPAN,
        Column(name="tid", type="int64", doc="The thread, as the kernel numbers it."),
        _maybe("step", "int64", None, "Step that had just ended; null before the first."),
        Column(
            name="run_delay_ns",
            type="int64",
            unit="ns",
            doc="Time in which the thread could run but had to wait for a core, total.",
        ),
        _maybe("run_ns", "int64", "ns", "Time in which the thread ran, total."),
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

_DEVICE = (
    Column(
        name="device_id",
        type="int32",
        doc="Device ordinal as the driver numbers it, where no UUID tells better.",
    ),
    _maybe(
        "device_uuid",
        "string",
        None,
        "UUID of the device as its driver writes it; joins samples to ranks.",
    ),
)

DEVICE_CLOCK = Table(
    "device_clock",
    1,
    "Clocks, power and event reasons of each device as its driver reports them: the fast tier.",
    (
        _TIME,
        _SPAN,
        *_DEVICE,
        _maybe(
            "sm_clock_hz",
            "int64",
            "hz",
            "Current SM (gfx) clock; mean over the dies of one device.",
        ),
        _maybe("memory_clock_hz", "int64", "hz", "Current memory clock."),
        _maybe(
            "power_w",
            "float64",
            "w",
            "Board (socket) power: instant where the driver tells it, else its running average.",
        ),
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

DEVICE_COUNTER = Table(
    "device_counter",
    1,
    "Slower sensors and counters of each device. Counters are totals since the driver was loaded or "
    "the device reset; difference them.",
    (
        _TIME,
        _SPAN,
        *_DEVICE,
        _maybe("energy_j", "float64", "j", "Energy, total."),
        _maybe("power_average_w", "float64", "w", "Board power, averaged by the driver (1 s)."),
        _maybe("temperature_c", "float64", "c", "Temperature of the chip."),
        _maybe("memory_temperature_c", "float64", "c", "Temperature of the memory."),
        _maybe(
            "device_utilization_ratio",
            "float64",
            "ratio",
            "Share of the driver's last period in which any kernel ran; says nothing of how many "
            "units it used.",
        ),
        _maybe(
            "memory_utilization_ratio",
            "float64",
            "ratio",
            "Share of the driver's last period in which memory was read or written.",
        ),
        _maybe("memory_used_bytes", "int64", "bytes", "Device memory in use, by all processes."),
        _maybe("pcie_tx_bytes", "int64", "bytes", "Sent over PCIe, total; may wrap."),
        _maybe("pcie_rx_bytes", "int64", "bytes", "Received over PCIe, total; may wrap."),
        _maybe(
            "pcie_bytes",
            "int64",
            "bytes",
            "Over PCIe in both directions since sampling began, of drivers that tell only their "
            "sum: their accumulated rate times the time.",
        ),
        _maybe("link_tx_bytes", "int64", "bytes", "Sent over all NVLink (XGMI) links, total."),
        _maybe("link_rx_bytes", "int64", "bytes", "Received over all of them, total."),
        _maybe("link_error_count", "int64", "count", "CRC errors and replays of the links, total."),
        _maybe("ecc_corrected_count", "int64", "count", "Corrected memory errors since start."),
        _maybe("ecc_uncorrected_count", "int64", "count", "Uncorrected memory errors since start."),
        _maybe("pcie_replay_count", "int64", "count", "PCIe replays, total."),
        _maybe("pcie_nak_count", "int64", "count", "PCIe packets refused by either end, total."),
        _maybe(
            "pcie_recovery_count",
            "int64",
            "count",
            "Times that the PCIe link had to recover, total.",
        ),
        _maybe("power_throttle_ns", "int64", "ns", "Time below the wanted clock for power, total."),
        _maybe("thermal_throttle_ns", "int64", "ns", "The same for temperature, total."),
        _maybe("sync_boost_throttle_ns", "int64", "ns", "The same for sync boost, total."),
        _maybe("board_limit_throttle_ns", "int64", "ns", "The same for the board's limit, total."),
        _maybe("reliability_throttle_ns", "int64", "ns", "The same for reliability, total."),
        _maybe("application_clock_ns", "int64", "ns", "Time held at application clocks, total."),
        _maybe("software_thermal_ns", "int64", "ns", "Time slowed by the driver for heat, total."),
        _maybe("hardware_thermal_ns", "int64", "ns", "Time slowed by the chip for heat, total."),
        _maybe("power_brake_ns", "int64", "ns", "Time slowed by the board's power brake, total."),
    ),
)

ENERGY_WINDOW = Table(
    "energy_window",
    1,
    "Energy of spans that another tool measured and named (Zeus): each began half of span_ns "
    "before time_ns. Of older versions the times are of the host's own clock.",
    (
        _TIME,
        _SPAN,
        *_DEVICE,
        Column(name="window", type="string", doc="Name of the span."),
        Column(name="energy_j", type="float64", unit="j", doc="Energy of the device in it."),
    ),
)

DEVICE_ACTIVITY = Table(
    "device_activity",
    1,
    "What each device's units were busy with since its previous row, from hardware counters (GPM).",
    (
        _TIME,
        _SPAN,
        *_DEVICE,
        _maybe("sm_utilization_ratio", "float64", "ratio", "SMs that were busy, mean over time."),
        _maybe("sm_occupancy_ratio", "float64", "ratio", "Warps resident of what would fit."),
        _maybe("tensor_utilization_ratio", "float64", "ratio", "Tensor cores' busy share."),
        _maybe("dram_utilization_ratio", "float64", "ratio", "Memory bandwidth used of its peak."),
        _maybe("fp64_utilization_ratio", "float64", "ratio", "FP64 units' busy share."),
        _maybe("fp32_utilization_ratio", "float64", "ratio", "FP32 units' busy share."),
        _maybe("fp16_utilization_ratio", "float64", "ratio", "FP16 units' busy share."),
        _maybe("pcie_tx_bytes_per_s", "float64", "bytes_per_s", "Sent over PCIe."),
        _maybe("pcie_rx_bytes_per_s", "float64", "bytes_per_s", "Received over PCIe."),
        _maybe("link_rx_bytes_per_s", "float64", "bytes_per_s", "Received over all links."),
        _maybe("link_tx_bytes_per_s", "float64", "bytes_per_s", "Sent over all links."),
    ),
)

DEVICE_LIMIT = Table(
    "device_limit",
    1,
    "What holds for a device over the whole run; one row per device.",
    (
        _TIME,
        _SPAN,
        *_DEVICE,
        _maybe("name", "string", None, "Name as the driver writes it."),
        _maybe("pci_address", "string", None, "Domain:bus:device.function."),
        _maybe("driver_version", "string", None, "Version of the driver."),
        _maybe("sm_clock_max_hz", "int64", "hz", "Largest SM clock."),
        _maybe("sm_clock_boost_hz", "int64", "hz", "Largest boost clock that the board allows."),
        _maybe("sm_clock_application_hz", "int64", "hz", "Application clock that was set."),
        _maybe("memory_clock_max_hz", "int64", "hz", "Largest memory clock."),
        _maybe(
            "power_basis",
            "string",
            None,
            "What `device_clock.power_w` is: instant, or averaged by the driver, and over how long "
            "where it is known.",
        ),
        _maybe("power_limit_w", "float64", "w", "Power limit in force."),
        _maybe("power_limit_default_w", "float64", "w", "Power limit by default."),
        _maybe("power_limit_max_w", "float64", "w", "Largest power limit that can be set."),
        _maybe("memory_bytes", "int64", "bytes", "Device memory."),
        _maybe("pcie_generation", "int32", None, "PCIe generation in use."),
        _maybe("pcie_lane_count", "int32", "count", "PCIe lanes in use."),
        _maybe("mig", "bool", None, "Whether the device is partitioned (MIG; DPX, CPX …)."),
    ),
)

STEP_WORK = Table(
    "step_work",
    1,
    "What a rank worked through in a step, as the program counted it: prof.step(tokens=…).",
    (
        Column(name="time_ns", type="int64", unit="ns", doc="Unix time of the middle of the step."),
        Column(name="span_ns", type="int64", unit="ns", doc="How long the step took."),
        Column(name="step", type="int64", doc="Number of the step, as in `step`."),
        Column(name="tokens_count", type="int64", unit="count", doc="Tokens of this rank."),
    ),
)

TELEMETRY_TABLES = (
    CPU_CORE,
    HOST,
    PROCESS,
    PROCESS_THREAD,
    PROCESS_EVENT,
    NIC,
    CORE_CLOCK,
    CORE_CYCLE,
    HOST_ENERGY,
    FABRIC_PORT,
    PAUSE,
    CORE_WAIT,
    DEVICE_MEMORY,
    DEVICE_CLOCK,
    DEVICE_COUNTER,
    ENERGY_WINDOW,
    DEVICE_ACTIVITY,
    DEVICE_LIMIT,
    CLOCK,
    STEP_WORK,
)
