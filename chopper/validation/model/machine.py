"""The two machines of the model: what H100 and MI300X nodes call things, and what they can do."""

from __future__ import annotations

from dataclasses import dataclass

from chopper.hardware.devices import DevicePeaks, lookup

FLAVOURS = ("cuda", "rocm")


@dataclass(frozen=True, slots=True)
class Machine:
    """One kind of node.

    Attributes:
        peaks: of its device.
        memory_bytes: as the driver reports it.
        compute_stream, communication_stream, copy_stream: numbers as its traces have them.
        gemm, flash_forward, flash_backward, elementwise, norm …: names of its kernels.
        bus_bytes_per_s: of copies from the host.
    """

    flavour: str
    peaks: DevicePeaks
    device_name: str
    memory_bytes: int
    warp: int
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

    @property
    def units(self) -> int:
        """Streaming multiprocessors or compute units."""
        return int(self.peaks.units.value or 0)

    @property
    def flop_per_ns(self) -> float:
        """bf16 peak."""
        return (self.peaks.flop_per_s("bf16") or 0.0) / 1e9

    @property
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


def machine(flavour: str) -> Machine:
    """The node of a flavour, ``cuda`` or ``rocm``.

    Raises:
        ValueError: no such flavour.
    """
    if flavour == "cuda":
        name, units, memory = "NVIDIA H100 80GB HBM3", 132, 85_029_158_912
        peaks = lookup(name, multi_processor_count=units, memory_bytes=memory)
        assert peaks is not None
        return Machine(
            flavour=flavour,
            peaks=peaks,
            device_name=name,
            memory_bytes=memory,
            warp=32,
            compute_stream=7,
            communication_stream=20,
            second_communication_stream=24,
            copy_stream=13,
            gemm="sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_"
            "execute_segment_k_off_kernel__5x_cublas",
            flash_forward="void pytorch_flash::flash_fwd_kernel<pytorch_flash::"
            "Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t> >"
            "(pytorch_flash::Flash_fwd_params)",
            flash_backward="void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<"
            "pytorch_flash::Flash_bwd_kernel_traits<128, 64, 128, 8, cutlass::bfloat16_t> >"
            "(pytorch_flash::Flash_bwd_params)",
            launch="cudaLaunchKernel",
            launch_communication="cudaLaunchKernelExC",
            copy_to_device="Memcpy HtoD (Pinned -> Device)",
            copy_to_host="Memcpy DtoH (Device -> Pageable)",
            memset="Memset (Device)",
            prefix="cuda",
            block=384,
            gemm_shape={"registers per thread": 168, "shared memory": 231_424},
            bus_bytes_per_s=55e9,
        )
    if flavour == "rocm":
        name, units, memory = "AMD Instinct MI300X", 304, 206_141_652_992
        peaks = lookup(name, multi_processor_count=units, memory_bytes=memory)
        assert peaks is not None
        return Machine(
            flavour=flavour,
            peaks=peaks,
            device_name=name,
            memory_bytes=memory,
            warp=64,
            compute_stream=0,
            communication_stream=4,
            second_communication_stream=5,
            copy_stream=3,
            gemm="Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_SN_LDSB1_"
            "AFC1_AFEM1_AFEM1_ASEM1_CLR1_CADS0_DTLA0_EPS0_FDSI0",
            flash_forward="_ZN7ck_tile6kentryILi256ELi2ENS_13FmhaFwdKernelINS_"
            "25BlockFmhaPipelineQRKSVSAsync",
            flash_backward="_ZN7ck_tile6kentryILi256ELi2ENS_19FmhaBwdDQDKDVKernelINS_"
            "39BlockFmhaBwdDQDKDVPipelineTrLoadKRKTRVR",
            launch="hipLaunchKernel",
            launch_communication="hipExtLaunchKernel",
            copy_to_device="Memcpy HtoD (Host -> Device)",
            copy_to_host="Memcpy DtoH (Device -> Host)",
            memset="__amd_rocclr_fillBufferAligned",
            prefix="hip",
            block=256,
            gemm_shape={},
            bus_bytes_per_s=50e9,
        )
    raise ValueError(f"flavour {flavour!r}: one of {', '.join(FLAVOURS)}")
