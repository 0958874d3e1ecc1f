"""Plan of a run of the model: its size, and every knob that injections turn."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dose:
    """An amount of something, on some ranks, in some steps."""

    amount: float = 0.0
    ranks: tuple[int, ...] | None = None
    """None: on all."""
    every: int = 1

    def at(self, rank: int, step: int) -> float:
        """The amount in one step of one rank."""
        if self.ranks is not None and rank not in self.ranks:
            return 0.0
        return self.amount if step % self.every == 0 else 0.0


_NONE = Dose()


@dataclass(frozen=True, slots=True)
class Clock:
    """A lower device clock between two times, counted from the first traced step; None: always."""

    ratio: float
    reason: int
    begin_ns: int | None = None
    end_ns: int | None = None
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run of the model: the machine, its size, and every knob.

    Times in the doses are nanoseconds, ratios are factors less one.
    """

    flavour: str = "cuda"
    seed: int = 0
    ranks: int = 2
    layers: int = 2
    warmup_steps: int = 1
    steps: int = 4
    ahead: bool = False
    """The loss is not read back: the host runs ahead, up to the forward of the step before."""
    hybrid: bool = False
    """Parameters are sharded over pairs of ranks and gradients reduced across pairs, too."""
    noise_ratio: float = 0.004
    """Standard deviation of kernel durations and of host times (ten times as much)."""
    telemetry_hz: float = 1000.0
    host_offsets_ns: tuple[int, ...] = (0, 2_300_417_003, -1_100_000_450, 733_000)
    """Lead of each rank's clock."""
    host_drift_ns_per_s: tuple[float, ...] = (0.0, 4000.0, -7000.0, 2500.0)

    quiet_every: int = 0
    """Every n-th step only accumulates gradients: nothing is gathered, reduced or updated."""
    late_layers: int = 0
    """So many layers' parameters are gathered only when they are needed."""
    graph: bool = False
    """Each layer's forward is replayed from one graph."""
    data: Dose = _NONE
    data_collection: Dose = _NONE
    """Garbage collection while a batch is made."""
    before_boundary: Dose = _NONE
    """User Python at the end of a step."""
    synchronization: Dose = _NONE
    """Time that the host takes to come back from each further ``.item()``."""
    synchronization_count: int = 0
    dispatch: Dose = _NONE
    """Per operator."""
    call: Dose = _NONE
    """Per launch."""
    query: Dose = _NONE
    """Other runtime calls, per layer."""
    python: Dose = _NONE
    """Per layer."""
    collection: Dose = _NONE
    """Garbage collection, per layer."""
    allocator: Dose = _NONE
    """Per layer."""
    profiler: Dose = _NONE
    """The profiler's own work, per layer."""
    barrier: Dose = _NONE
    """A host-side wait for a collective, per step."""
    slow: Dose = _NONE
    """Model math takes so much longer: on one rank, a straggler."""
    link: Dose = _NONE
    """Transfers take so much longer."""
    copy: Dose = _NONE
    """Nanoseconds of copies from the host that the device waits for, per layer."""
    copy_ahead: bool = False
    """These copies start one layer earlier and are hidden in part."""
    fill: Dose = _NONE
    """Nanoseconds of memset, per layer."""
    contention: Dose = _NONE
    """Kernels beside communication take so much longer."""
    recompute: Dose = _NONE
    """Layers that run their forward again in backward."""
    vector: Dose = _NONE
    """Memory-bound work takes so much longer."""
    wave: Dose = _NONE
    """Blocks beyond full rounds, as a share of a round."""
    stream_gap_ns: int = 900
    """Between two kernels of a stream."""
    event_gap_ns: int = 1800
    """Between the end of a task and the start of one of another stream that waits for it."""
    clocks: tuple[Clock, ...] = ()
    sensitivity: float = 1.0
    """Sensitivity of model math to the clock."""
