"""Products in fp32 on a device that has quicker arithmetic for them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Sighting, detector
from chopper.analyzers.events.device import Events

DETECTOR = detector("reduced_precision")
_HALF = "Run the model under torch.autocast(device_type, dtype=torch.{}){}."
_NEXT = {"fp32": ("tf32", "bf16", "fp16"), "tf32": ("bf16", "fp16")}
REMEDIES = {
    "tf32": "Call torch.set_float32_matmul_precision('high') for products, and set "
    "torch.backends.cudnn.allow_tf32 = True for convolutions. Some ROCm builds also need "
    "HIPBLASLT_ALLOW_TF32=1 in the environment (pytorch/pytorch#139869).",
    "bf16": _HALF.format("bfloat16", ""),
    "fp16": _HALF.format("float16", ", and train with torch.amp.GradScaler"),
}


def reduced_precision(run: Attributed, events: Events) -> Iterator[Sighting]:
    """DEVICE_EVENT, CEILINGS -> a sighting for each data type."""
    codes, names = events.dtype
    for now, wanted in _NEXT.items():
        rows, run_ns, time_ns, kernels = {}, {}, 0, 0
        factors: dict[str, float] = {}
        for rank, ceilings in run.ceilings.items():
            peaks = ceilings.theoretical
            if peaks is None or now not in names or now not in peaks.flop_per_s:
                continue
            other = next((t for t in wanted if t in peaks.flop_per_s), "")
            ratio = peaks.flop_per_s[other] / peaks.flop_per_s[now] if other else 1.0
            chosen = (events.rank == rank) & events.math & (codes == names.index(now))
            if ratio <= 1 or not chosen.any():
                continue
            least = events.work_bytes[chosen] / (peaks.memory_bytes_per_s or np.inf) * 1e9
            faster = np.fmax(events.dur_ns[chosen] / ratio, least)
            quick = np.minimum(np.rint(faster), events.dur_ns[chosen]).astype(np.int64)
            rows[rank], run_ns[rank] = events.row[chosen], (events.row[chosen], quick)
            time_ns += int(events.dur_ns[chosen].sum())
            kernels += int(chosen.sum())
            factors.setdefault(other, ratio)
        if rows:
            other, factor = next(iter(factors.items()))
            yield Sighting(
                detector="reduced_precision",
                events=rows,
                run_ns=run_ns,
                evidence={
                    "now": now,
                    "other": other,
                    "factor": factor,
                    "kernels": kernels,
                    "time_ns": time_ns,
                    "how": REMEDIES[other],
                },
            )
