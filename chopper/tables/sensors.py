"""Tables of devices' sensors beside clocks, counters and limits: dies, links, partitions, buffers."""

from __future__ import annotations

from chopper.tables._base import Column, Table
from chopper.tables.telemetry import _DEVICE, _SPAN, _TIME, _maybe

DEVICE_DIE = Table(
    "device_die",
    1,
    "Clocks of the parts of a device, where its driver tells them apart (AMD's dies).",
    (
        _TIME,
        _SPAN,
        *_DEVICE,
        Column(name="domain", type="string", doc="gfx (compute dies, XCDs) or soc."),
        Column(name="die_id", type="int32", doc="Number of the die within its domain."),
        Column(name="clock_hz", type="int64", unit="hz", doc="Clock now."),
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
        Column(name="link_id", type="int32", doc="Number of the link at this device."),
        _maybe("tx_bytes", "int64", "bytes", "Sent over it, total."),
        _maybe("rx_bytes", "int64", "bytes", "Received over it, total."),
        _maybe("up", "bool", None, "Whether the link is up."),
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
        _maybe("pci_address", "string", None, "Domain:bus:device.function of the part."),
        _maybe("compute_partition", "string", None, "SPX, DPX, TPX, QPX or CPX."),
        _maybe("memory_partition", "string", None, "NPS1, NPS2, NPS4 or NPS8."),
        _maybe("partition_id", "int32", None, "Number of the part within its socket."),
    ),
)

DEVICE_BUFFERED = Table(
    "device_buffered",
    1,
    "Samples that the driver took itself and kept, where they are finer than polling. Clocks are "
    "written when they change: each value holds until the next.",
    (
        Column(
            name="time_ns", type="int64", unit="ns", doc="Unix time as the driver noted it, in µs."
        ),
        Column(name="span_ns", type="int64", unit="ns", doc="Resolution of that time: 1 µs."),
        *_DEVICE,
        Column(name="quantity", type="string", doc="power_w, sm_clock_hz or memory_clock_hz."),
        Column(name="value", type="float64", doc="In the unit that the quantity names."),
    ),
)

SENSOR_TABLES = (DEVICE_DIE, DEVICE_LINK, DEVICE_PARTITION, DEVICE_BUFFERED)
