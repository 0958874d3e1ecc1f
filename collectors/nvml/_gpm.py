"""GPU performance monitoring of Hopper and later: metrics of the time between two snapshots."""

from __future__ import annotations

import contextlib
from math import isfinite
from typing import Any, NamedTuple

from chopper.collectors._plan import METRIC, Call, Column, Interval, address, content, pointer
from chopper.collectors.nvml import _library as nvml


class Metric(NamedTuple):
    """A metric as NVML numbers it."""

    number: int
    unit: float
    """One of it in the column's unit."""
    most: int
    """The largest value; counters that wrapped come out as anything."""


def _share(number: int) -> Metric:
    return Metric(number, 0.01, 100)


def _mebibytes_per_s(number: int) -> Metric:
    return Metric(number, float(1 << 20), _MOST_MIB_PER_S)


_MOST_MIB_PER_S = 16 << 20
"""16 TiB/s, more than any link of a device carries."""

# Of the columns of `device_activity`.
METRICS = {
    "sm_utilization_ratio": _share(2),
    "sm_occupancy_ratio": _share(3),
    "tensor_utilization_ratio": _share(5),
    "dram_utilization_ratio": _share(10),
    "fp64_utilization_ratio": _share(11),
    "fp32_utilization_ratio": _share(12),
    "fp16_utilization_ratio": _share(13),
    "pcie_tx_bytes_per_s": _mebibytes_per_s(20),
    "pcie_rx_bytes_per_s": _mebibytes_per_s(21),
    "link_rx_bytes_per_s": _mebibytes_per_s(60),
    "link_tx_bytes_per_s": _mebibytes_per_s(61),
}

_NOT_SUPPORTED = 3


class Gpm:
    """Two snapshots of a device, swapped when what lies between them was told.

    While the driver has nothing to tell of so short a time, the older one stays: the next reading
    covers the time of both.
    """

    def __init__(self, device: nvml.NvmlDevice) -> None:
        self._device = device
        self._snapshots: list[Any] = []
        self._newer = 0
        self._has_older = False
        self._values: dict[int, float | nvml.ReadingFailed] = {}
        self._problem: nvml.ReadingFailed | None = None
        try:
            support = nvml.query("nvmlGpmQueryDeviceSupport", device.handle)
            if not support.isSupportedDevice:
                raise nvml.ReadingFailed(_NOT_SUPPORTED)
            self._snapshots = [nvml.query("nvmlGpmSampleAlloc") for _ in range(2)]
            self._request = nvml.gpm_request([metric.number for metric in METRICS.values()])
            self._call = self._planned()
        except nvml.ReadingFailed as exc:
            self._problem = exc

    def _planned(self) -> Call:
        kind = type(self._request)
        first, second = map(pointer, self._snapshots)
        interval = Interval(
            address(nvml.function("nvmlGpmMetricsGet")),
            first,
            second,
            kind.sample1.offset,
            kind.sample2.offset,
        )
        take = address(nvml.function("nvmlGpmSampleGet"))
        return Call(take, pointer(self._device.handle), None, content(self._request), interval)

    @property
    def offered(self) -> bool:
        """True where the device has it."""
        return self._problem is None

    def reader(self, metric: Metric) -> nvml.Reader:
        """A column of it.

        Raises:
            ReadingFailed: the device has none of them.
        """
        if self._problem is not None:
            raise self._problem

        def read() -> float | None:
            value = self._values.get(metric.number)
            if isinstance(value, nvml.ReadingFailed):
                raise value
            if value is None or not isfinite(value) or not 0 <= value <= metric.most:
                return None
            return value * metric.unit

        at = [slot.metricId for slot in self._request.metrics].index(metric.number)
        metric_place = (nvml.gpm_metric_offset(at), 8, 0)
        column = Column(METRIC, 0, (metric_place,), metric.unit, most=metric.most)
        return nvml.Reader(read, self._call, column)

    def advance(self) -> None:
        """Take a snapshot; from the second on, compute the metrics of the time between."""
        self._values = {}
        if self._problem is not None or self._device.lost is not None:
            return
        newer, older = self._snapshots[self._newer], self._snapshots[1 - self._newer]
        try:
            nvml.query("nvmlGpmSampleGet", self._device.handle, newer)
            if self._has_older:
                self._request.sample1, self._request.sample2 = older, newer
                nvml.query("nvmlGpmMetricsGet", self._request)
        except nvml.ReadingFailed as exc:
            self._values = {metric.number: exc for metric in METRICS.values()}
            return
        self._newer = 1 - self._newer
        if not self._has_older:
            self._has_older = True
            return
        for slot in self._request.metrics[: self._request.numMetrics]:
            self._values[slot.metricId] = (
                nvml.ReadingFailed(slot.nvmlReturn) if slot.nvmlReturn else slot.value
            )

    def free(self) -> None:
        """Give the snapshots back."""
        for snapshot in self._snapshots:
            with contextlib.suppress(nvml.ReadingFailed):
                nvml.query("nvmlGpmSampleFree", snapshot)
        self._snapshots = []
