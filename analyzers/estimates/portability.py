"""One program on several devices: its projected time on each, and how portable its speed is.

The efficiency of a program on a device is the roofline's time over its own. Its performance and
portability over a set of devices is their harmonic mean, and zero where it does not run on one
of them (Pennycook, Sewall and Lee, arXiv 1611.07409).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import msgspec

from chopper.analyzers.estimates import Estimate, assumed
from chopper.analyzers.estimates.project import Projection, Side, project_captured


class OnDevice(msgspec.Struct, kw_only=True, frozen=True):
    """A program on one device, per training step (a run's: per step or trace)."""

    device: str
    architecture: str | None = None
    """Target of Triton's compiler; null where kernels were not compiled for it."""
    roofline_ns: int
    """At the datasheet's peaks, of the form that needs least."""
    eager_ns: int
    """Projected with one kernel per operator; of a run, as it was recorded."""
    compiled_ns: int | None = None
    """Projected with torch.compile's kernels; null for a run, and where one does not compile."""
    recorded_ns: int | None = None
    """As measured, on the device of the run."""

    @property
    def eager_efficiency_ratio(self) -> float:
        """Roofline over the measured time, else the projected one."""
        return self.roofline_ns / (self.recorded_ns or self.eager_ns)

    @property
    def compiled_efficiency_ratio(self) -> float | None:
        """Roofline over the projected time of the compiled program."""
        return self.roofline_ns / self.compiled_ns if self.compiled_ns else None


class OnTarget(msgspec.Struct, kw_only=True, frozen=True):
    """The machine code of a kernel for one architecture."""

    architecture: str
    registers_count: int | None = None
    """Of a thread; vector registers on AMD."""
    shared_bytes: int | None = None
    code_bytes: int | None = None
    reason: str | None = None
    """Error of the compiler, where it made none."""


class Kernel(msgspec.Struct, kw_only=True, frozen=True):
    """A kernel that Inductor wrote in Triton, and the captured operators that it computes."""

    name: str
    operators: str | None
    call_count: int
    targets: tuple[OnTarget, ...]


class Cpu(msgspec.Struct, kw_only=True, frozen=True):
    """The program on this machine's CPU, measured: medians of alternating rounds."""

    eager_ns: int
    compiled_ns: int
    rounds_count: int
    kernel_count: int
    """Of Inductor, in C++."""
    library_call_count: int


class Reference(msgspec.Struct, kw_only=True, frozen=True):
    """The Triton kernels in Triton's interpreter, against eager PyTorch."""

    tokens_count: int | None = None
    loss_difference_ratio: float | None = None
    """Null where eager PyTorch's loss is zero."""
    gradient_difference_ratio: float | None = None
    """Norm of the difference over that of the gradient, of the parameter that differs most."""
    reason: str | None = None


class Portability(Estimate, kw_only=True, frozen=True):
    """One program on several devices."""

    SCHEMA: ClassVar[str] = "chopper.estimate.portability/1"

    run: str
    devices: tuple[OnDevice, ...]
    eager_portability_ratio: float
    compiled_portability_ratio: float | None = None
    """Null for a run, and where kernels were not compiled for one of the devices."""
    captured_count: int | None = None
    """Operators in the captured graphs, forward and backward."""
    eager_call_count: int | None = None
    """Operators that launch a kernel in eager PyTorch."""
    library_call_count: int | None = None
    """Calls of libraries that torch.compile leaves, such as matrix products."""
    kernels: tuple[Kernel, ...] = ()
    cpu: Cpu | None = None
    reference: Reference | None = None
    versions: dict[str, str] | None = None


def portability_ratio(efficiencies: Iterable[float | None]) -> float:
    """Return the harmonic mean of efficiencies; zero where one is None."""
    values = [*efficiencies]
    if not values or not all(values):
        return 0.0
    return len(values) / sum(1 / value for value in values if value)


def of_run(projections: Sequence[Projection], recorded_device: str) -> Portability:
    """Return the portability of a recorded run from its projections, one onto its own device."""
    devices = tuple(
        OnDevice(
            device=p.target_device or "",
            roofline_ns=p.roofline_ns,
            eager_ns=p.projected_ns,
            recorded_ns=p.recorded_ns if p.target_device == recorded_device else None,
        )
        for p in projections
    )
    return Portability(
        assumptions=assumed("portability", "project", "reach"),
        run=projections[0].run,
        devices=devices,
        eager_portability_ratio=portability_ratio(d.eager_efficiency_ratio for d in devices),
    )


def of_module(
    captured: dict[str, Any], *, module: str, sides: Sequence[Side], architectures: dict[str, str]
) -> Portability:
    """Return the portability of a captured module, eager and compiled.

    Args:
        captured: as :func:`chopper.collectors.compiled_kernels.compiled_kernels` returns it.
        module: its name.
        sides: the devices.
        architectures: device → target that its kernels were compiled for.

    Raises:
        InputError: no operator has FLOP or bytes.
    """
    kernels = tuple(
        Kernel(
            name=kernel["name"],
            operators=kernel["operators"],
            call_count=kernel["call_count"],
            targets=tuple(OnTarget(architecture=a, **of) for a, of in kernel["targets"].items()),
        )
        for kernel in captured["kernels"]
    )
    failed = {t.architecture for kernel in kernels for t in kernel.targets if t.reason}
    devices = []
    for side in sides:
        eager, compiled = (
            project_captured(
                module=module,
                operators=captured[form],
                element_bytes=captured["element_bytes"],
                there=side,
            )
            for form in ("eager", "compiled")
        )
        architecture = architectures.get(side.device.id)
        runs = architecture is not None and architecture not in failed
        devices.append(
            OnDevice(
                device=side.device.label,
                architecture=architecture,
                roofline_ns=min(eager.roofline_ns, compiled.roofline_ns),
                eager_ns=eager.projected_ns,
                compiled_ns=compiled.projected_ns if runs else None,
            )
        )
    names = {kernel.name for kernel in kernels}
    return Portability(
        assumptions=assumed("portability", "captured", "reach"),
        run=module,
        devices=tuple(devices),
        eager_portability_ratio=portability_ratio(d.eager_efficiency_ratio for d in devices),
        compiled_portability_ratio=None
        if any(d.architecture is None for d in devices)
        else portability_ratio(d.compiled_efficiency_ratio for d in devices),
        captured_count=captured["captured_count"],
        eager_call_count=sum(op["call_count"] for op in captured["eager"]),
        library_call_count=sum(
            op["call_count"] for op in captured["compiled"] if op["op"] not in names
        ),
        kernels=kernels,
        cpu=Cpu(**captured["cpu"]),
        reference=Reference(**captured["reference"]),
        versions=captured["versions"],
    )
