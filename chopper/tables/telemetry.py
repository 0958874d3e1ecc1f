"""Tables that samplers write while a run goes on, as Arrow IPC streams.

Samples are taken at their own rates and joined to a trace by time. Every row carries the middle of
the reading and how long the reading took: what it says held at some moment in
``time_ns`` ± ``span_ns`` / 2.
"""

from __future__ import annotations

from chopper.tables._base import Table, column, count, ns, optional

_TIME = ns("time_ns", "Unix time of the sample: middle of the reading.")
_SPAN = ns("span_ns", "How long the reading took; the sample's time is known to half of it.")


CPU_CORE = Table(
    "cpu_core",
    1,
    "Use of each core since the previous sample. The kernel counts in ticks of 10 ms, so one "
    "sample is exact to 10 ms over its period; the errors do not add up over samples.",
    (
        _TIME,
        _SPAN,
        column("core_id", "int32", "Core as the kernel numbers it."),
        optional(
            "busy_ratio",
            "float64",
            "Share of the time in which it ran tasks or interrupts of this machine: neither idle, "
            "nor waiting for I/O, nor stolen.",
        ),
        optional("system_ratio", "float64", "In the kernel, interrupts included."),
        optional("steal_ratio", "float64", "Taken by the hypervisor for other guests."),
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
        optional("memory_available_bytes", "int64", "MemAvailable of /proc/meminfo."),
        optional(
            "pressure_cpu_some_ns",
            "int64",
            "Time in which at least one task waited for a core (PSI cpu some, total).",
        ),
        optional(
            "pressure_memory_some_ns",
            "int64",
            "Time in which at least one task waited for memory (PSI memory some, total).",
        ),
        optional(
            "pressure_io_some_ns",
            "int64",
            "Time in which at least one task waited for I/O (PSI io some, total).",
        ),
        optional(
            "cgroup_throttled_ns",
            "int64",
            "Time in which this job's cgroup was held back by its CPU quota, total; summed over "
            "cores as the kernel counts it.",
        ),
        optional(
            "cgroup_throttled_count",
            "int64",
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
        column("rank", "int32", "Rank that the process belongs to."),
        column("pid", "int64", "The rank's own process."),
        optional(
            "cpu_ratio",
            "float64",
            "CPU time over wall time since the previous sample, children included; 2.0 is two "
            "cores. Children count from when they were found, at most a second after they began.",
        ),
        optional("child_cpu_ratio", "float64", "The children's share of cpu_ratio."),
        optional(
            "run_delay_ns",
            "int64",
            "Time in which the rank's main thread could run but had to wait for a core, total.",
        ),
        optional(
            "rss_bytes",
            "int64",
            "Resident set size, summed over the rank and its children; shared pages count in each.",
        ),
        optional(
            "pss_bytes",
            "int64",
            "Proportional set size of the rank and its children: shared pages are divided among "
            "those who share. Read at most once a second, null in the samples between.",
        ),
        optional("thread_count", "int32", "Threads of the rank and its children."),
        optional("child_count", "int32", "Processes that descend from the rank."),
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
        column("rank", "int32", "Rank that the thread belongs to."),
        column("pid", "int64", "The rank's own process."),
        column("tid", "int64", "The thread, as in `host_span`."),
        column("name", "string", "Name of the thread when it was first seen."),
        ns("run_ns", "On a core."),
        ns("run_delay_ns", "Ready to run, and waiting for a core."),
        count("slice_count", "Times that it was put on one."),
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
        column("rank", "int32", "Rank that the process belongs to."),
        column("pid", "int64", "The rank's own process."),
        optional("context_switch_count", "int64", "Times that a thread left its core."),
        optional("migration_count", "int64", "Times that a thread went to another core."),
        optional("page_fault_count", "int64", "Page faults."),
        optional("major_fault_count", "int64", "Page faults that had to read from a disk."),
        optional("cycle_count", "int64", "Cycles of the cores."),
        optional("instruction_count", "int64", "Instructions that were completed."),
        optional("cache_miss_count", "int64", "Misses of the last cache."),
    ),
)

NIC = Table(
    "nic",
    1,
    "Network interfaces. Counters are totals since boot; RDMA traffic bypasses them.",
    (
        _TIME,
        _SPAN,
        column("interface", "string", "Name of the interface."),
        optional("rx_bytes", "int64", "Received, total."),
        optional("tx_bytes", "int64", "Sent, total."),
    ),
)

CORE_CLOCK = Table(
    "core_clock",
    1,
    "Clock of each core of the host, where its driver shows it.",
    (
        _TIME,
        _SPAN,
        column("core_id", "int32", "Core as the kernel numbers it."),
        column("clock_hz", "int64", "Clock now."),
    ),
)

CORE_CYCLE = Table(
    "core_cycle",
    1,
    "Clock of each core while it ran since its previous row, from the registers aperf and mperf.",
    (
        _TIME,
        _SPAN,
        column("core_id", "int32", "Core as the kernel numbers it."),
        column("clock_ratio", "float64", "Mean clock while it ran, of its nominal clock."),
        optional("clock_hz", "int64", "The same in Hz, where the nominal clock is told."),
    ),
)

HOST_ENERGY = Table(
    "host_energy",
    1,
    "Energy of the host's processors (RAPL), with wraps of the counter undone.",
    (
        _TIME,
        _SPAN,
        column("domain", "string", "Domain, for example package-0/dram."),
        column("energy_j", "float64", "Energy since sampling began."),
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
        column("device", "string", "Name of the device, for example mlx5_0 or rdmap0s6."),
        column("port_id", "int32", "Port of the device."),
        optional("tx_bytes", "int64", "Sent, total (words of 4 bytes made bytes)."),
        optional("rx_bytes", "int64", "Received, total."),
        optional("rdma_read_bytes", "int64", "Read by RDMA (EFA), total."),
        optional("rdma_write_bytes", "int64", "Written by RDMA (EFA), total."),
        optional("retransmitted_bytes", "int64", "Sent again (EFA), total."),
        optional("tx_wait_count", "int64", "Ticks in which data waited for credits."),
        optional("tx_discard_count", "int64", "Packets that were not sent."),
        optional("link_down_count", "int64", "Times that the link went down."),
        optional("symbol_error_count", "int64", "Symbol errors on the link."),
        optional("cnp_sent_count", "int64", "Congestion notifications sent as receiver."),
        optional("cnp_handled_count", "int64", "Congestion notifications obeyed as sender."),
        optional("ecn_marked_count", "int64", "Packets that came marked by a switch."),
        optional("out_of_sequence_count", "int64", "Packets that came out of order."),
        optional("sequence_error_count", "int64", "Negative acknowledgements for order."),
        optional("timeout_count", "int64", "Acknowledgements that did not come in time."),
        optional("receiver_not_ready_count", "int64", "Receiver-not-ready retries exceeded."),
        optional("adaptive_retransmit_count", "int64", "Adaptive retransmissions (RoCE)."),
        optional("out_of_buffer_count", "int64", "Packets dropped for want of a buffer."),
    ),
)

PAUSE = Table(
    "pause",
    1,
    "Priority flow control of Ethernet interfaces, from their drivers' statistics; totals.",
    (
        _TIME,
        _SPAN,
        column("interface", "string", "Name of the interface."),
        column("priority", "int32", "Priority, 0 to 7."),
        optional("rx_pause_count", "int64", "Pause frames received: told to stop."),
        optional("tx_pause_count", "int64", "Pause frames sent: told others to stop."),
        optional("rx_pause_ns", "int64", "Time in which sending was paused, total."),
        optional("tx_pause_ns", "int64", "Time in which others were paused, total."),
    ),
)

CORE_WAIT = Table(
    "core_wait",
    1,
    "Run time and run delay of the thread that ends each step, read where steps meet.",
    (
        _TIME,
        _SPAN,
        column("tid", "int64", "The thread, as the kernel numbers it."),
        optional("step", "int64", "Step that had just ended; null before the first."),
        ns("run_delay_ns", "Time in which the thread could run but had to wait for a core, total."),
        optional("run_ns", "int64", "Time in which the thread ran, total."),
    ),
)

DEVICE_MEMORY = Table(
    "device_memory",
    1,
    "Device memory of one rank as torch's allocator sees it, read at the end of each step.",
    (
        _TIME,
        _SPAN,
        column("device_id", "int32", "Device ordinal."),
        optional("step", "int64", "Step that had just ended; null outside of steps."),
        optional("allocated_bytes", "int64", "Held by tensors."),
        optional("reserved_bytes", "int64", "Held by the allocator."),
        optional("max_allocated_bytes", "int64", "Peak in tensors since the process began."),
        optional("max_reserved_bytes", "int64", "Peak in the allocator since then."),
    ),
)

_DEVICE = (
    column(
        "device_id", "int32", "Device ordinal as the driver numbers it, where no UUID tells better."
    ),
    optional(
        "device_uuid",
        "string",
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
        optional(
            "sm_clock_hz", "int64", "Current SM (gfx) clock; mean over the dies of one device."
        ),
        optional("memory_clock_hz", "int64", "Current memory clock."),
        optional(
            "power_w",
            "float64",
            "Board (socket) power: instant where the driver tells it, else its running average.",
        ),
        optional(
            "event_reasons",
            "int64",
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
        ns("monotonic_ns", "CLOCK_MONOTONIC at time_ns."),
        optional("monotonic_raw_ns", "int64", "CLOCK_MONOTONIC_RAW at time_ns; not slewed."),
    ),
)

DEVICE_COUNTER = Table(
    "device_counter",
    1,
    "Slower sensors and counters of each device. Counters are totals since the driver was "
    "loaded or the device reset; difference them.",
    (
        _TIME,
        _SPAN,
        *_DEVICE,
        optional("energy_j", "float64", "Energy, total."),
        optional("power_average_w", "float64", "Board power, averaged by the driver (1 s)."),
        optional("temperature_c", "float64", "Temperature of the chip."),
        optional("memory_temperature_c", "float64", "Temperature of the memory."),
        optional(
            "device_utilization_ratio",
            "float64",
            "Share of the driver's last period in which any kernel ran; says nothing of how many "
            "units it used.",
        ),
        optional(
            "memory_utilization_ratio",
            "float64",
            "Share of the driver's last period in which memory was read or written.",
        ),
        optional("memory_used_bytes", "int64", "Device memory in use, by all processes."),
        optional("pcie_tx_bytes", "int64", "Sent over PCIe, total; may wrap."),
        optional("pcie_rx_bytes", "int64", "Received over PCIe, total; may wrap."),
        optional(
            "pcie_bytes",
            "int64",
            "Over PCIe in both directions since sampling began, of drivers that tell only their "
            "sum: their accumulated rate times the time.",
        ),
        optional("link_tx_bytes", "int64", "Sent over all NVLink (XGMI) links, total."),
        optional("link_rx_bytes", "int64", "Received over all of them, total."),
        optional("link_error_count", "int64", "CRC errors and replays of the links, total."),
        optional("ecc_corrected_count", "int64", "Corrected memory errors since start."),
        optional("ecc_uncorrected_count", "int64", "Uncorrected memory errors since start."),
        optional("pcie_replay_count", "int64", "PCIe replays, total."),
        optional("pcie_nak_count", "int64", "PCIe packets refused by either end, total."),
        optional("pcie_recovery_count", "int64", "Times that the PCIe link had to recover, total."),
        optional("power_throttle_ns", "int64", "Time below the wanted clock for power, total."),
        optional("thermal_throttle_ns", "int64", "The same for temperature, total."),
        optional("sync_boost_throttle_ns", "int64", "The same for sync boost, total."),
        optional("board_limit_throttle_ns", "int64", "The same for the board's limit, total."),
        optional("reliability_throttle_ns", "int64", "The same for reliability, total."),
        optional("application_clock_ns", "int64", "Time held at application clocks, total."),
        optional("software_thermal_ns", "int64", "Time slowed by the driver for heat, total."),
        optional("hardware_thermal_ns", "int64", "Time slowed by the chip for heat, total."),
        optional("power_brake_ns", "int64", "Time slowed by the board's power brake, total."),
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
        column("window", "string", "Name of the span."),
        column("energy_j", "float64", "Energy of the device in it."),
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
        optional("sm_utilization_ratio", "float64", "SMs that were busy, mean over time."),
        optional("sm_occupancy_ratio", "float64", "Warps resident of what would fit."),
        optional("tensor_utilization_ratio", "float64", "Tensor cores' busy share."),
        optional("dram_utilization_ratio", "float64", "Memory bandwidth used of its peak."),
        optional("fp64_utilization_ratio", "float64", "FP64 units' busy share."),
        optional("fp32_utilization_ratio", "float64", "FP32 units' busy share."),
        optional("fp16_utilization_ratio", "float64", "FP16 units' busy share."),
        optional("pcie_tx_bytes_per_s", "float64", "Sent over PCIe."),
        optional("pcie_rx_bytes_per_s", "float64", "Received over PCIe."),
        optional("link_rx_bytes_per_s", "float64", "Received over all links."),
        optional("link_tx_bytes_per_s", "float64", "Sent over all links."),
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
        optional("name", "string", "Name as the driver writes it."),
        optional("pci_address", "string", "Domain:bus:device.function."),
        optional("driver_version", "string", "Version of the driver."),
        optional("sm_clock_max_hz", "int64", "Largest SM clock."),
        optional("sm_clock_boost_hz", "int64", "Largest boost clock that the board allows."),
        optional("sm_clock_application_hz", "int64", "Application clock that was set."),
        optional("memory_clock_max_hz", "int64", "Largest memory clock."),
        optional(
            "power_basis",
            "string",
            "What `device_clock.power_w` is: instant, or averaged by the driver, and over how long "
            "where it is known.",
        ),
        optional("power_limit_w", "float64", "Power limit in force."),
        optional("power_limit_default_w", "float64", "Power limit by default."),
        optional("power_limit_max_w", "float64", "Largest power limit that can be set."),
        optional("memory_bytes", "int64", "Device memory."),
        optional("pcie_generation", "int32", "PCIe generation in use."),
        optional("pcie_lane_count", "int32", "PCIe lanes in use."),
        optional("mig", "bool", "Whether the device is partitioned (MIG; DPX, CPX …)."),
    ),
)

STEP_WORK = Table(
    "step_work",
    1,
    "What a rank worked through in a step, as the program counted it: prof.step(tokens=…).",
    (
        ns("time_ns", "Unix time of the middle of the step."),
        ns("span_ns", "How long the step took."),
        column("step", "int64", "Number of the step, as in `step`."),
        count("tokens_count", "Tokens of this rank."),
    ),
)

DEVICE_DIE = Table(
    "device_die",
    1,
    "Clocks of the parts of a device, where its driver tells them apart (AMD's dies).",
    (
        _TIME,
        _SPAN,
        *_DEVICE,
        column("domain", "string", "gfx (compute dies, XCDs) or soc."),
        column("die_id", "int32", "Number of the die within its domain."),
        column("clock_hz", "int64", "Clock now."),
    ),
)

DEVICE_LINK = Table(
    "device_link",
    1,
    "Links between devices one by one (XGMI). Counters are totals; difference them.",
    (
        _TIME,
        _SPAN,
        *_DEVICE,
        column("link_id", "int32", "Number of the link at this device."),
        optional("tx_bytes", "int64", "Sent over it, total."),
        optional("rx_bytes", "int64", "Received over it, total."),
        optional("up", "bool", "Whether the link is up."),
    ),
)

DEVICE_PARTITION = Table(
    "device_partition",
    1,
    "How a device is partitioned, once: several devices of a run may be parts of one socket.",
    (
        _TIME,
        _SPAN,
        *_DEVICE,
        optional("pci_address", "string", "Domain:bus:device.function of the part."),
        optional("compute_partition", "string", "SPX, DPX, TPX, QPX or CPX."),
        optional("memory_partition", "string", "NPS1, NPS2, NPS4 or NPS8."),
        optional("partition_id", "int32", "Number of the part within its socket."),
    ),
)

DEVICE_BUFFERED = Table(
    "device_buffered",
    1,
    "Samples that the driver took itself and kept, where they are finer than polling. Clocks are "
    "written when they change: each value holds until the next.",
    (
        ns("time_ns", "Unix time as the driver noted it, in µs."),
        ns("span_ns", "Resolution of that time: 1 µs."),
        *_DEVICE,
        column("quantity", "string", "power_w, sm_clock_hz or memory_clock_hz."),
        column("value", "float64", "In the unit that the quantity names."),
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

SENSOR_TABLES = (DEVICE_DIE, DEVICE_LINK, DEVICE_PARTITION, DEVICE_BUFFERED)
