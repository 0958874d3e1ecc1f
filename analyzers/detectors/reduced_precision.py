"""Products in fp32 on a device that has quicker arithmetic for them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Detector, Sighting
from chopper.analyzers.events.device import Events

DETECTOR = Detector(
    title="Products run in {now}",
    condition="Matrix products and convolutions ran in fp32 (or TF32) on a device whose peak in "
    "TF32 (or bf16) is higher.",
    evidence="{kernels} kernels took {time_ns:ns}; the peak in {other} is {factor:factor} as high",
    remedy="{how}",
    view="operations",
)
_NEXT = {
    "fp32": ("tf32", "Call torch.set_float32_matmul_precision('high')."),
    "tf32": ("bf16", "Run the model under torch.autocast(device_type, dtype=torch.bfloat16)."),
}


def reduced_precision(run: Attributed, events: Events) -> Iterator[Sighting]:
    """DEVICE_EVENT, CEILINGS -> a sighting for each data type.

    Without the pattern, a product gets faster by the ratio of the peaks, but not than its bytes
    take at the memory's bandwidth, where they are known.
    """
    codes, names = events.dtype
    for now, (wanted, how) in _NEXT.items():
        rows, run_ns, time_ns, kernels, factor = {}, {}, 0, 0, 1.0
        for rank, ceilings in run.ceilings.items():
            peaks = ceilings.theoretical
            other = next(
                (t for t in (wanted, "bf16", "fp16") if peaks and t in peaks.flop_per_s), ""
            )
            if peaks is None or now not in names or now not in peaks.flop_per_s or not other:
                continue
            ratio = peaks.flop_per_s[other] / peaks.flop_per_s[now]
            chosen = (events.rank == rank) & events.math & (codes == names.index(now))
            if ratio <= 1 or not chosen.any():
                continue
            least = events.work_bytes[chosen] / (peaks.memory_bytes_per_s or np.inf) * 1e9
            faster = np.fmax(events.dur_ns[chosen] / ratio, least)
            quick = np.minimum(np.rint(faster), events.dur_ns[chosen]).astype(np.int64)
            rows[rank], run_ns[rank] = events.row[chosen], (events.row[chosen], quick)
            time_ns += int(events.dur_ns[chosen].sum())
            kernels += int(chosen.sum())
            factor, wanted = ratio, other
        if rows:
            yield Sighting(
                detector="reduced_precision",
                events=rows,
                run_ns=run_ns,
                evidence={
                    "now": now,
                    "other": wanted,
                    "factor": factor,
                    "kernels": kernels,
                    "time_ns": time_ns,
                    "how": how,
                },
            )
