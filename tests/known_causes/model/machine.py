"""The two machines of the model: what H100 and MI300X nodes call things, and what they can do."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import msgspec

from chopper.hardware.devices import DevicePeaks, lookup


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """One kind of node: numbers and names as its traces have them."""

    device_name: str
    memory_bytes: int
    units: int
    compute_stream: int
    communication_stream: int
    second_communication_stream: int
    copy_stream: int
    gemm: str
    flash_forward: str
    flash_backward: str
    launch: str
    launch_communication: str
    copy_to_device: str
    copy_to_host: str
    memset: str
    prefix: str
    block: int
    gemm_shape: dict[str, int]
    bus_bytes_per_s: float
    """Of copies from the host."""
    memory_clock_hz: int
    properties: dict[str, int]
    """Of its devices, as Kineto writes them."""
    nccl_version: str
    versions: dict[str, int | float]

    @property
    def flavour(self) -> str:
        """``cuda`` or ``rocm``."""
        return "cuda" if self.prefix == "cuda" else "rocm"

    @cached_property
    def peaks(self) -> DevicePeaks:
        """Peaks of the machine's device."""
        peaks = lookup(
            self.device_name, multi_processor_count=self.units, memory_bytes=self.memory_bytes
        )
        assert peaks is not None
        return peaks

    @cached_property
    def flop_per_ns(self) -> float:
        """bf16 peak."""
        return (self.peaks.flop_per_s("bf16") or 0.0) / 1e9

    @cached_property
    def bytes_per_ns(self) -> float:
        """Memory bandwidth."""
        return float(self.peaks.memory_bandwidth_bytes_per_s.value or 0) / 1e9

    @property
    def link_bytes_per_ns(self) -> float:
        """One direction of all links of a device; datasheets add up both."""
        return float(self.peaks.link_bytes_per_s.value or 0) / 2 / 1e9

    @property
    def reference_hz(self) -> float:
        """The clock that the bf16 peak is quoted at."""
        return float(self.peaks.reference_clock_hz["bf16"].value or 0)

    def elementwise(self, what: str) -> str:
        """Name of an elementwise kernel."""
        array = (
            "at::detail::Array<char*, 3>" if self.flavour == "cuda" else "std::array<char*, 3ul>"
        )
        types = f"<8, {what}, {array} >(int, {what}, {array})"
        return f"void at::native::vectorized_elementwise_kernel{types}"

    def collective(self, name: str) -> str:
        """Name of a collective's kernel; RCCL has one for all."""
        if self.flavour == "rocm":
            return "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)"
        kind = {
            "_allgather_base": "AllGather_RING_LL",
            "_reduce_scatter_base": "ReduceScatter_Sum_bf16_RING_LL",
            "allreduce": "AllReduce_Sum_bf16_RING_LL",
        }[name]
        return f"ncclDevKernel_{kind}(ncclDevKernelArgsStorage<4096ul>)"


class Recorded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of an operator as recorded, where they are not all tensors of bf16."""

    types: list[str]
    concrete: list[str] | None = None


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    machines: dict[str, Machine]
    operators: dict[str, Recorded]


_TABLE = msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes(), type=_Table)
MACHINES, RECORDED = _TABLE.machines, _TABLE.operators
FLAVOURS = tuple(MACHINES)
