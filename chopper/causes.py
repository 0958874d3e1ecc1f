"""The tree of causes: what a nanosecond of device time can be attributed to.

Ids are dotted and stable: they stand in JSON output, in tables and in ``--fix``. Leaf causes
partition the observed time; a parent is the sum of its leaves. ``ideal`` is the time that the
hardware needs at its peak; everything else is the gap.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """One node of the tree."""

    id: str
    label: str
    doc: str

    @property
    def parent(self) -> str | None:
        """Id of the parent, None at the top."""
        return self.id.rpartition(".")[0] or None


_CAUSES = (
    Cause(
        "compute",
        "Compute",
        "A compute kernel was running (it hides communication and copies under it).",
    ),
    Cause(
        "compute.ideal",
        "Model math at peak",
        "FLOP of the model's matrix products, convolutions and attention (forward and backward), "
        "divided by the peak of the device for their data type. This is the ideal time.",
    ),
    Cause(
        "compute.roofline",
        "Memory-bound model math",
        "Extra time because the products' bytes do not fit through memory in the time that "
        "their FLOP need: the share (by the logarithmic mean) of the factor max(FLOP/peak, "
        "bytes/bandwidth) / (FLOP/peak).",
    ),
    Cause(
        "compute.clock",
        "Reduced clock (DVFS)",
        "The device ran slower than the clock that its peak is quoted at: clock samples joined to "
        "each kernel in time, weighted by how much the kernel depends on the clock. Of model math "
        "and memory-bound kernels.",
    ),
    Cause(
        "compute.clock.power_cap",
        "Power cap",
        "The clock was lowered to stay within a power limit (software power cap, power brake).",
    ),
    Cause(
        "compute.clock.thermal",
        "Thermal throttling",
        "The clock was lowered because the device, its memory or its board was hot.",
    ),
    Cause(
        "compute.clock.application",
        "Application clock setting",
        "The clock was set: application clocks, locked clocks or a synchronized boost group.",
    ),
    Cause(
        "compute.clock.idle_ramp",
        "Ramp-up from idle",
        "The device came from idle and its clock had not risen yet.",
    ),
    Cause(
        "compute.clock.host_limited",
        "No throttle reason active",
        "The clock was below the reference while no throttle reason was active: the device "
        "was not kept busy enough to raise it, or its default limit is lower.",
    ),
    Cause(
        "compute.clock.unlabelled",
        "Throttle reason not recorded",
        "The clock was below the reference and the samples do not say why.",
    ),
    Cause(
        "compute.contention",
        "Resource contention",
        "Kernels that ran beside communication, copies or other kernels took longer than the same "
        "work (same operator, shapes, kernel and grid) took alone, clocks made equal. Of model "
        "math and memory-bound kernels.",
    ),
    Cause(
        "compute.efficiency",
        "Kernel inefficiency",
        "Time that products took beyond roofline, clock and contention: what the kernels "
        "themselves leave unused of the device.",
    ),
    Cause(
        "compute.efficiency.wave_quantization",
        "Wave quantization",
        "The thread blocks of a kernel do not fill its last wave on the device's units: "
        "ceil(blocks / blocks at a time) over blocks / blocks at a time.",
    ),
    Cause(
        "compute.efficiency.instructions",
        "Redundant math",
        "Kernels performed more FLOP than the product needs (padding, masked tiles), by hardware "
        "counters.",
    ),
    Cause(
        "compute.efficiency.tensor_core",
        "Idle tensor cores",
        "The matrix units were busy for only a part of the time, by hardware counters.",
    ),
    Cause(
        "compute.efficiency.rest",
        "Unexplained inefficiency",
        "Time that no measured factor explains: instruction mix, latency, imbalance; and each "
        "factor above that this run did not measure (the basis names them).",
    ),
    Cause(
        "compute.no_peak",
        "Model math, peak unknown",
        "Products whose ideal time is unknown, recognised by their operator or their kernel's "
        "name: the device, or its peak for this data type, or the operator's shapes are not "
        "known.",
    ),
    Cause(
        "compute.recompute",
        "Activation recomputation",
        "Forward work done again in the backward pass (activation checkpointing).",
    ),
    Cause("compute.optimizer", "Optimizer", "Kernels launched by the optimizer's step."),
    Cause(
        "compute.outside_training",
        "Outside the training step",
        "Compute in phases that are no part of a training step: evaluation, generation, rollouts, "
        "forwards without gradients, checkpoints, and whatever else the program names with "
        "prof.phase(…). It counts neither for the ideal time nor for model FLOP. Where nothing is "
        "trained, forwards are the program's work and are not in here.",
    ),
    Cause(
        "compute.fsdp_copy",
        "Data-parallel copies and casts",
        "Copying shards and gradients in and out of communication buffers, scaling and casting "
        "them: in the hooks of FSDP and DDP, and of DeepSpeed's ZeRO and Megatron where Python "
        "stacks were recorded.",
    ),
    Cause(
        "compute.vector",
        "Memory-bound kernels",
        "Elementwise operations, norms, softmax, reductions, embeddings: no matrix product.",
    ),
    Cause(
        "compute.vector.roofline",
        "At memory bandwidth",
        "Time that the bytes of memory-bound kernels need at the device's memory bandwidth.",
    ),
    Cause(
        "compute.vector.excess",
        "Slower than memory bandwidth",
        "Time that memory-bound kernels took beyond what their bytes need at the device's "
        "bandwidth, and beyond clock and contention.",
    ),
    Cause(
        "compute.vector.no_bytes",
        "Bytes or bandwidth unknown",
        "Memory-bound kernels, recognised by their operator or their name, whose bytes are "
        "not known, or run on a device whose bandwidth is not known.",
    ),
    Cause(
        "compute.unmodelled",
        "Unmodelled kernels",
        "Kernels without a modelled operator whose name does not tell the kind of work either.",
    ),
    Cause(
        "compute.core_wait",
        "CPU contention while computing",
        "Runs without a device: the computing thread was ready to run and had no CPU core, "
        "because other programs, or more threads than cores, had them (the Linux kernel's run "
        "delay, per step).",
    ),
    Cause(
        "communication",
        "Exposed communication",
        "A collective was running and no compute hid it.",
    ),
    Cause(
        "communication.wait",
        "Straggler wait",
        "Exposed time of a collective before the last rank of its group arrived.",
    ),
    Cause(
        "communication.transfer",
        "Transfer",
        "Exposed time of a collective after the last rank of its group arrived.",
    ),
    Cause(
        "communication.transfer.at_peak",
        "At link bandwidth",
        "Time that the bytes need at the link's peak bandwidth: bytes times the bus factor, "
        "divided by the peak.",
    ),
    Cause(
        "communication.transfer.below_peak",
        "Slower than link bandwidth",
        "Time that transfers took beyond what their bytes need at the link's peak bandwidth.",
    ),
    Cause(
        "communication.transfer.no_peak",
        "Link bandwidth or bytes unknown",
        "Transfers whose ideal time is unknown: their bytes or the link's peak bandwidth are "
        "not known.",
    ),
    Cause(
        "communication.unseparated",
        "Wait and transfer, not separated",
        "Collectives whose waiting cannot be told from their transfer: seen from one rank "
        "only, not matched on all ranks of their group, or left before the last rank arrived.",
    ),
    Cause("copy", "Exposed copies", "A copy or memset was running and nothing hid it."),
    Cause("copy.host_to_device", "Host to device", "Copies to the device."),
    Cause("copy.device_to_host", "Device to host", "Copies from the device."),
    Cause("copy.device_to_device", "Device to device", "Copies within or between devices."),
    Cause("copy.memset", "Memset", "Filling memory."),
    Cause("copy.other", "Direction unknown", "Copies whose direction is not recorded."),
    Cause("idle", "Idle", "Nothing was running on the device."),
    Cause(
        "idle.dependency",
        "Stream dependency",
        "The next kernel had been launched, and what ran before the gap ran on another stream.",
    ),
    Cause(
        "idle.launch_latency",
        "Launch latency",
        "The call that launched the next kernel had returned, and the device had not started it.",
    ),
    Cause(
        "idle.call",
        "Launch overhead",
        "The call that launched the next kernel was running, and the device was already waiting.",
    ),
    Cause(
        "idle.preparation",
        "Host-bound",
        "The device had nothing to do: the launching thread was busy with something else.",
    ),
    Cause(
        "idle.preparation.data",
        "Data stall",
        "Waiting for the next batch, or making it.",
    ),
    Cause(
        "idle.preparation.synchronization",
        "Host-device synchronization",
        "The host waited for the device: .item(), stream or device sync, blocking copies.",
    ),
    Cause(
        "idle.preparation.allocator",
        "Memory allocator",
        "cudaMalloc, cudaFree, hipMalloc and their kin.",
    ),
    Cause(
        "idle.preparation.collective_wait",
        "Host blocked in a collective",
        "The host blocked in a collective, a barrier or a store.",
    ),
    Cause("idle.preparation.gc", "Garbage collection", "Python's garbage collector ran."),
    Cause(
        "idle.preparation.compile",
        "Compilation",
        "torch.compile was at work: tracing, code generation, compiling, Triton's autotuning; for "
        "the first time, or again for other shapes.",
    ),
    Cause(
        "idle.preparation.dispatch",
        "Framework dispatch",
        "Time of operators on the host outside kernels and runtime calls.",
    ),
    Cause(
        "idle.preparation.runtime",
        "Other driver calls",
        "Launch calls of other kernels, queries of the driver, its loading and compiling of code.",
    ),
    Cause(
        "idle.preparation.profiler",
        "Profiler overhead",
        "The profiler's own recorded work.",
    ),
    Cause("idle.preparation.python", "User Python", "Python code between operators."),
    Cause(
        "idle.preparation.core_wait",
        "CPU contention on the host",
        "Runs without a device: the preparing thread was ready to run and had no CPU core, "
        "because other programs, or more threads than cores, had them (the Linux kernel's run "
        "delay, per step).",
    ),
    Cause(
        "idle.preparation.unobserved",
        "Host activity not recorded",
        "Nothing was recorded of the launching thread at that time.",
    ),
    Cause(
        "idle.unlaunched",
        "Launch not recorded",
        "The kernel that ended the gap has no launch in the trace, so the gap has no cause.",
    ),
    Cause(
        "idle.no_step",
        "Before the first or after the last kernel",
        "Part of a window without any device event to explain it.",
    ),
)

CAUSES: dict[str, Cause] = {cause.id: cause for cause in _CAUSES}
LEAVES: tuple[str, ...] = tuple(
    c for c in CAUSES if not any(other.startswith(c + ".") for other in CAUSES)
)


def parents(cause_id: str) -> tuple[str, ...]:
    """All ancestors of a cause, nearest first."""
    found = []
    at = CAUSES[cause_id].parent
    while at is not None:
        found.append(at)
        at = CAUSES[at].parent
    return tuple(found)
