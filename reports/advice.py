"""Advice on each cause, in one or two plain sentences.

Meaning comes from :mod:`chopper.causes`; this is only the way out. A cause without an entry takes
its parent's.
"""

from __future__ import annotations

from chopper.causes import CAUSES, parents

_ADVICE: dict[str, str] = {
    "compute.ideal": "Only less math, a lower precision or a faster device makes this smaller.",
    "compute.roofline": "Give the products more work per byte: larger batch or sequence per rank, "
    "fused projections (one QKV product instead of three), less tensor parallelism.",
    "compute.clock": "Watch clocks, power and temperature together (`--view clock_by_phase`): "
    "a lower clock is only worth fixing where the limit can be moved.",
    "compute.clock.power_cap": "Raise the power limit if the machine allows it, or shed power: "
    "steadier memory traffic, fewer wasted FLOP, lower precision. Ranks at different clocks make "
    "stragglers.",
    "compute.clock.thermal": "Check cooling, air flow and the device's neighbours; compare the "
    "temperatures of the ranks.",
    "compute.clock.application": "Someone set this clock: `nvidia-smi -rac` and `nvidia-smi -rgc` "
    "(or `rocm-smi --resetclocks`) give the default back.",
    "compute.clock.idle_ramp": "The device falls idle inside the step: close the gaps before these "
    "kernels, or keep the clock up between them (persistence mode, locked clocks).",
    "compute.clock.host_limited": "The device was not busy enough to raise its clock: look at the "
    "idle causes first; compare the clock's limit with the reference of the peak.",
    "compute.clock.unlabelled": "Record the event (throttle) reasons with the clocks to see what "
    "held them down.",
    "compute.contention": "Give communication fewer units (NCCL_MAX_CTAS, fewer channels), use the "
    "copy engines, or move the overlap to kernels that suffer less.",
    "compute.efficiency": "Look at the slowest kernels in the table below: pad odd dimensions to "
    "multiples of 64 or more, try torch.compile or another GEMM back end.",
    "compute.efficiency.wave_quantization": "Choose batch and sequence so that the tiles of a "
    "product fill whole rounds of the device, or use split-K or stream-K kernels.",
    "compute.efficiency.instructions": "Kernels compute what is thrown away: pad less, use kernels "
    "that skip masked tiles.",
    "compute.efficiency.tensor_core": "The matrix units starve: larger tiles, aligned dimensions, "
    "another GEMM back end; check that the dtype uses them at all.",
    "compute.efficiency.rest": "Look at the slowest kernels in the table below: pad odd dimensions "
    "to multiples of 64 or more, try torch.compile or another GEMM back end; record clocks and "
    "counters so that more of this can be named.",
    "compute.no_peak": "Record with shapes (chopper does by default) on a device whose peak is "
    "known, or run `chopper calibrate` here: then this time splits into ideal and loss.",
    "compute.recompute": "Checkpoint fewer layers, or only cheap operators (selective "
    "checkpointing), if memory allows.",
    "compute.optimizer": "Use the fused or foreach optimizer, shard its state, or step less often "
    "with gradient accumulation.",
    "compute.outside_training": "Evaluate, generate or save less often, on fewer batches, or "
    "beside training; `--by phase` shows which phase takes how much.",
    "compute.fsdp_copy": "Communicate fewer, larger buffers (larger FSDP blocks, larger DDP "
    "buckets); keep parameters in the dtype that is communicated.",
    "compute.vector": "Fuse: torch.compile, fused norms, rotary embedding and cross entropy read "
    "and write memory once instead of several times.",
    "compute.vector.roofline": "These kernels move bytes as fast as memory allows, so only moving "
    "fewer helps: fuse them (torch.compile, fused norm, rotary embedding, cross entropy) or keep "
    "activations in a smaller dtype.",
    "compute.vector.excess": "Small or strided tensors: fuse them, make them contiguous, batch "
    "many small kernels into one.",
    "compute.vector.no_bytes": "Record shapes, or calibrate the memory bandwidth with `chopper "
    "calibrate`, to see how much of this is loss.",
    "compute.unmodelled": "See which kernels these are in the kernel table; the share is also the "
    "limit of what this report can claim about computing.",
    "communication.wait": "One rank arrives late. Compare the ranks in the table below: uneven "
    "batches, a slow loader, a throttled device or a busy host on that rank.",
    "communication.transfer": "Overlap it with computing (prefetch, larger buckets), send less "
    "(lower precision, less sharding) or use a faster link.",
    "communication.transfer.at_peak": "The link is already at its peak: overlap it with computing, "
    "send less (lower precision, less sharding), or use a faster link.",
    "communication.transfer.below_peak": "Messages are small or the link is shared: use larger "
    "buckets, check the algorithm and the topology, look for other traffic at that time.",
    "communication.transfer.no_peak": "Overlap it with computing, or send less; with the link's "
    "peak (`chopper calibrate`) this splits into necessary and lost time.",
    "communication.unseparated": "Give the traces of all ranks of the run: then waiting for a slow "
    "rank is told from a slow link.",
    "copy": "Use pinned memory and non_blocking=True so that copies hide under computing; keep "
    "data on the device.",
    "copy.host_to_device": "Pin the loader's memory and copy with non_blocking=True one batch "
    "ahead, so that the copy hides under computing.",
    "copy.device_to_host": "Avoid .item(), .cpu() and printing of tensors inside the step; log "
    "every N steps, from a detached copy.",
    "copy.device_to_device": "Look for .contiguous(), .clone() and cat that could be views or "
    "preallocated buffers.",
    "copy.memset": "Buffers are cleared each step: use zero_grad(set_to_none=True) and "
    "torch.empty where the values are overwritten.",
    "idle.dependency": "Kernels of another stream come late: launch communication earlier "
    "(prefetch) and keep fewer stream synchronizations in the step.",
    "idle.launch_latency": "Many short kernels: fuse them (torch.compile) or replay them as one "
    "graph (CUDA or HIP graphs).",
    "idle.call": "The device waits for each launch: launch fewer, larger kernels, or use CUDA or "
    "HIP graphs.",
    "idle.preparation": "The host cannot feed the device: take work out of the loop's Python.",
    "idle.preparation.data": "More loader workers, prefetch_factor, pin_memory; move decoding and "
    "tokenizing out of the loop.",
    "idle.preparation.synchronization": "Remove .item(), .cpu(), torch.cuda.synchronize() and "
    "boolean tests of tensors from the step, or do them every N steps.",
    "idle.preparation.allocator": "The caching allocator runs out and asks the driver: free "
    "memory, avoid changing shapes, try expandable segments.",
    "idle.preparation.collective_wait": "A rank's host blocks in a collective: find the late rank "
    "in the table below; avoid barriers and object collectives in the step.",
    "idle.preparation.gc": "Call gc.disable() in the loop and gc.collect() at a quiet point, or "
    "gc.freeze() after start-up.",
    "idle.preparation.compile": "Keep shapes fixed, or mark them dynamic "
    "(torch.compile(dynamic=True), mark_dynamic), so that nothing is compiled again; "
    "TORCH_LOGS=recompiles says why it was. First compilations end with the warm-up: trace later "
    "steps.",
    "idle.preparation.core_wait": "Other programs, or more threads than cores, take the rank's "
    "cores: pin ranks to cores of their own, set OMP_NUM_THREADS, keep the machine quiet.",
    "compute.core_wait": "Other programs, or more threads than cores, take the rank's cores: pin "
    "ranks to cores of their own, set OMP_NUM_THREADS, keep the machine quiet.",
    "idle.preparation.dispatch": "Eager overhead: torch.compile, CUDA or HIP graphs, foreach and "
    "fused operators, or a larger batch per launch.",
    "idle.preparation.runtime": "Fewer launches and driver queries: fuse kernels or replay graphs.",
    "idle.preparation.profiler": "The profiler's own cost, absent without it; record fewer steps, "
    "or without shapes and stacks.",
    "idle.preparation.python": "Hoist what does not change out of the loop, log less often, or let "
    "torch.compile take the step.",
    "idle.preparation.unobserved": "Record with `chopper record` (host operators on) to see what "
    "the launching thread did.",
    "idle.unlaunched": "Record whole steps, with runtime calls on, so that each kernel has its "
    "launch in the trace.",
    "idle.no_step": "Record whole steps: this lies at the edge of what was traced.",
}


def advice(cause: str) -> str:
    """Return what to do about a cause; empty when nothing general can be said."""
    for node in (cause, *(parents(cause) if cause in CAUSES else ())):
        if node in _ADVICE:
            return _ADVICE[node]
    return ""
