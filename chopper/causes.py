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
        "Computing",
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
        "Memory-bound shape",
        "The same products' bytes do not fit through memory in the time that their FLOP need: the "
        "share (by the logarithmic mean) of the factor max(FLOP/peak, bytes/bandwidth) / (FLOP/peak).",
    ),
    Cause(
        "compute.clock",
        "Clock below the reference",
        "The device ran slower than the clock that its peak is quoted at: clock samples joined to "
        "each kernel in time, weighted by how much the kernel depends on the clock. Of model math "
        "and memory-bound work.",
    ),
    Cause(
        "compute.clock.power_cap",
        "Power cap",
        "The clock was lowered to stay within a power limit (software power cap, power brake).",
    ),
    Cause(
        "compute.clock.thermal",
        "Thermal",
        "The clock was lowered because the device, its memory or its board was hot.",
    ),
    Cause(
        "compute.clock.application",
        "Application clock",
        "The clock was set: application clocks, locked clocks or a synchronized boost group.",
    ),
    Cause(
        "compute.clock.idle_ramp",
        "Ramp from idle",
        "The device came from idle and its clock had not risen yet.",
    ),
    Cause(
        "compute.clock.host_limited",
        "Limited by the host",
        "The clock was below the reference while no reason held it down: the device was not kept "
        "busy enough to raise it, or its default limit is lower.",
    ),
    Cause(
        "compute.clock.unlabelled",
        "Reason not recorded",
        "The clock was below the reference and the samples do not say why.",
    ),
    Cause(
        "compute.contention",
        "Contention",
        "Kernels that ran beside communication, copies or other kernels took longer than the same "
        "work (same operator, shapes, kernel and grid) took alone, clocks made equal. Of model math "
        "and memory-bound work.",
    ),
    Cause(
        "compute.efficiency",
        "Below peak",
        "Products ran longer than roofline, clock and contention explain: what the kernels "
        "themselves leave unused.",
    ),
    Cause(
        "compute.efficiency.wave_quantization",
        "Last wave not full",
        "The blocks of a kernel do not fill its last round on the device's units: "
        "rounds needed over blocks by blocks at a time.",
    ),
    Cause(
        "compute.efficiency.instructions",
        "More math than needed",
        "Kernels performed more FLOP than the product needs (padding, masked tiles), by hardware "
        "counters.",
    ),
    Cause(
        "compute.efficiency.tensor_core",
        "Tensor cores not busy",
        "The matrix units were busy for only a part of the time, by hardware counters.",
    ),
    Cause(
        "compute.efficiency.rest",
        "Other, below peak",
        "What no measured factor explains: instruction mix, latency, imbalance; and each factor "
        "above that this run did not measure (the basis names them).",
    ),
    Cause(
        "compute.no_peak",
        "Model math, peak unknown",
        "Products, by their operator or their kernel's name, whose ideal time is unknown: the device, "
        "or its peak for this data type, or the operator's shapes are not known.",
    ),
    Cause(
        "compute.recompute",
        "Recomputation",
        "Forward work done again in the backward pass (activation checkpointing).",
    ),
    Cause("compute.optimizer", "Optimizer", "Kernels launched by the optimizer's step."),
    Cause(
        "compute.outside_training",
        "Work outside of training",
        "Compute in phases that are no part of a training step: evaluation, generation, rollouts, "
        "forwards without gradients, checkpoints, and whatever else the program names with "
        "prof.phase(…). It counts neither for the ideal time nor for model FLOP. Where nothing is "
        "trained, forwards are the program's work and are not in here.",
    ),
    Cause(
        "compute.fsdp_copy",
        "Data-parallel copies and casts",
        "Copying shards and gradients in and out of communication buffers, scaling and casting them: "
        "in the hooks of FSDP and DDP, and of DeepSpeed's ZeRO and Megatron where Python stacks "
        "were recorded.",
    ),
    Cause(
        "compute.vector",
        "Memory-bound work",
        "Elementwise operations, norms, softmax, reductions, embeddings: no matrix product.",
    ),
    Cause(
        "compute.vector.roofline",
        "At memory bandwidth",
        "What the bytes of memory-bound work take at the device's memory bandwidth.",
    ),
    Cause(
        "compute.vector.excess",
        "Above memory bandwidth",
        "What memory-bound work took longer than its bytes need at the device's bandwidth, and than "
        "clock and contention explain.",
    ),
    Cause(
        "compute.vector.no_bytes",
        "Bytes or bandwidth unknown",
        "Memory-bound work, by its operator or its kernel's name, whose bytes, or the device's "
        "bandwidth, are not known.",
    ),
    Cause(
        "compute.unmodelled",
        "Unmodelled kernels",
        "Kernels without a modelled operator whose name does not tell the kind of work either.",
    ),
    Cause(
        "compute.core_wait",
        "Computing, without a core",
        "On a run without a device: the computing thread could run and had no core, which other "
        "programs, or more threads than cores, had (the kernel's run delay, per step).",
    ),
    Cause(
        "communication",
        "Exposed communication",
        "A collective was running and no compute hid it.",
    ),
    Cause(
        "communication.wait",
        "Waiting for a straggler",
        "Before the last rank arrived at the collective.",
    ),
    Cause(
        "communication.transfer",
        "Transfer",
        "After the last rank arrived.",
    ),
    Cause(
        "communication.transfer.at_peak",
        "At link peak",
        "Bytes times the bus factor, divided by the link's peak.",
    ),
    Cause(
        "communication.transfer.below_peak",
        "Below link peak",
        "What transfers took longer than their bytes need at the link's peak.",
    ),
    Cause(
        "communication.transfer.no_peak",
        "Link peak or bytes unknown",
        "Transfers whose ideal is unknown.",
    ),
    Cause(
        "communication.unseparated",
        "Wait and transfer together",
        "Collectives seen from one rank only, or not matched on all ranks of their group, or "
        "left before the last rank came: waiting cannot be told from transfer.",
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
        "Dependency between streams",
        "The next kernel had been launched, and what ran before the gap ran on another stream.",
    ),
    Cause(
        "idle.launch_latency",
        "Launch latency",
        "The call that launched the next kernel had returned, and the device had not started it.",
    ),
    Cause(
        "idle.call",
        "Launch call",
        "The call that launched the next kernel was running, and the device was already waiting.",
    ),
    Cause(
        "idle.preparation",
        "Host was late",
        "The device had nothing to do and the launching thread was busy with something else.",
    ),
    Cause("idle.preparation.data", "Data loading", "Waiting for, or making, the next batch."),
    Cause(
        "idle.preparation.synchronization",
        "Synchronization",
        "The host waited for the device: .item(), stream or device sync, blocking copies.",
    ),
    Cause(
        "idle.preparation.allocator",
        "Allocator",
        "cudaMalloc, cudaFree, hipMalloc … and their kin.",
    ),
    Cause(
        "idle.preparation.collective_wait",
        "Host-side wait for a collective",
        "The host blocked in a collective, a barrier or a store.",
    ),
    Cause("idle.preparation.gc", "Garbage collection", "Python's garbage collector ran."),
    Cause(
        "idle.preparation.compile",
        "Compilation",
        "torch.compile was at work: tracing, code generation, compiling, Triton's autotuning; for the "
        "first time, or again for other shapes.",
    ),
    Cause(
        "idle.preparation.dispatch",
        "Framework dispatch",
        "Operators' own time outside kernels and runtime calls.",
    ),
    Cause(
        "idle.preparation.runtime",
        "Other runtime calls",
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
        "Preparing, without a core",
        "On a run without a device: the preparing thread could run and had no core, which other "
        "programs, or more threads than cores, had (the kernel's run delay, per step).",
    ),
    Cause(
        "idle.preparation.unobserved",
        "Host not observed",
        "Nothing was recorded of the launching thread at that time.",
    ),
    Cause(
        "idle.unlaunched",
        "Launch not recorded",
        "The kernel that ended the gap has no launch in the trace, so the gap has no cause.",
    ),
    Cause(
        "idle.no_step",
        "Before the first kernel, or after the last",
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
