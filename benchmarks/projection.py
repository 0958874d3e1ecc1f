"""Projections between two devices, against the same models recorded on both.

    python -m benchmarks.projection DIR [--verbose]
    python -m benchmarks.projection DIR --json

DIR has one trace per model and device, named DEVICE-MODEL.json.gz, with DEVICE a name of the table
of devices (h100-sxm, mi300x) or a part of it. Each pair is projected both ways, twice: with what
the program knows the devices to reach, and with what only the *other* pairs reached on them at best
(leave one pair out), where they tell. Prints the error in total, of the kernels alone, and that of
the uncalibrated roofline; exit code 1 when a total is beyond 25 % or not twice as good as that.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import permutations
from pathlib import Path
from typing import Any

from chopper import pipeline
from chopper.analyzers.estimates.project import Projection, Side, operator_class, project
from chopper.analyzers.work import family
from chopper.hardware.devices import DevicePeaks, Reach, lookup, reach_of
from chopper.views import view

LIMIT = 0.25
LARGE_BYTES = 60e6
"""Of an operator: more than a cache of either device holds for long."""


class Recorded:
    """One trace: its device, and what the projection takes of it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        _, _, self.model = file.name.partition("-")
        attribution = pipeline.attribute(pipeline.read(file))
        names = {rank.device for rank in attribution.ranks if rank.device}
        device = lookup(next(iter(names))) if len(names) == 1 else None
        if device is None:
            raise SystemExit(
                f"{file}: its device is not in the table: {', '.join(names) or 'none'}"
            )
        self.device: DevicePeaks = device
        self.operations = view(attribution, "operations")
        self.causes = {row.id: row.time_ns for row in attribution.leaves()}
        self.windows = max(1, sum(rank.steps for rank in attribution.ranks))

    def best(self) -> tuple[float, float]:
        """Highest shares of the peaks that a product, and a large copy or vector operator, get."""
        products = memory = 0.0
        bandwidth = self.device.memory_bandwidth_bytes_per_s.value
        for row in self.operations.to_pylist():
            kind = operator_class(row["op"], family(row["op"] or ""))
            mean_ns = row["time_ns"] / max(1, row["call_count"])
            if not mean_ns:
                continue
            peak = self.device.flop_per_s(row["dtype"]) if row["dtype"] else None
            if kind == "products" and row["math_flop"] and peak:
                products = max(products, row["math_flop"] / mean_ns * 1e9 / peak)
            size = row["traffic_bytes"] or 0
            if kind in ("elementwise", "copies") and size > LARGE_BYTES and bandwidth:
                memory = max(memory, size / mean_ns * 1e9 / bandwidth)
        return products, memory


def known(device: DevicePeaks, others: list[Recorded]) -> Reach:
    """Shares that other runs on the device reached; without large work, those the program knows."""
    shipped = reach_of(device)
    best = [r.best() for r in others if r.device.id == device.id]
    products, memory = (max((b[i] for b in best), default=0.0) for i in (0, 1))
    return Reach(
        products=products or shipped.products,
        memory=min(1.0, memory) or shipped.memory,
        source="the other pairs",
    )


def carried(here: Recorded, there: Recorded, ours: Reach, theirs: Reach) -> Projection:
    """One projection and its check."""
    return project(
        run=here.file.name,
        operations=here.operations,
        causes_ns=here.causes,
        windows_count=here.windows,
        here=Side(here.device, ours),
        there=Side(there.device, theirs),
        checked=(there.file.name, there.operations, there.causes),
        checked_windows_count=there.windows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--verbose", action="store_true", help="each class of operators too")
    parser.add_argument("--json", action="store_true", dest="as_json")
    args = parser.parse_args()
    by_model: dict[str, list[Recorded]] = {}
    for file in sorted(args.directory.glob("*.json.gz")):
        recorded = Recorded(file)
        by_model.setdefault(recorded.model, []).append(recorded)
    rows: list[dict[str, Any]] = []
    for model, pair in by_model.items():
        if len({r.device.id for r in pair}) < 2:
            print(f"{model}: recorded on one device only, left out", file=sys.stderr)
            continue
        others = [r for m, runs in by_model.items() if m != model for r in runs]
        for here, there in permutations(pair, 2):
            shipped = carried(here, there, reach_of(here.device), reach_of(there.device))
            left_out = carried(here, there, known(here.device, others), known(there.device, others))
            rows.append(
                {
                    "model": model.removesuffix(".json.gz"),
                    "from": here.device.id,
                    "to": there.device.id,
                    "recorded_ns": shipped.recorded_ns,
                    "projected_ns": shipped.projected_ns,
                    "there_ns": shipped.checked_ns,
                    "error_ratio": shipped.error_ratio,
                    "kernels_error_ratio": shipped.operators_error_ratio,
                    "left_out_error_ratio": left_out.error_ratio,
                    "left_out_kernels_error_ratio": left_out.operators_error_ratio,
                    "roofline_error_ratio": shipped.roofline_error_ratio,
                    "roofline_kernels_error_ratio": shipped.operators_roofline_error_ratio,
                    "classes": [
                        (c.operator_class, c.projected_ns, c.checked_ns) for c in shipped.classes
                    ],
                }
            )
    if not rows:
        raise SystemExit(f"{args.directory}: no model is recorded on two devices")
    if args.as_json:
        print(json.dumps(rows))
    else:
        _print(rows, verbose=args.verbose)
    missed = [
        r
        for r in rows
        if abs(r["error_ratio"]) > LIMIT
        or abs(r["error_ratio"]) > abs(r["roofline_error_ratio"]) / 2
    ]
    raise SystemExit(1 if missed else 0)


def _print(rows: list[dict[str, Any]], *, verbose: bool) -> None:
    print(f"{'':44}{'as shipped':>19}   {'others only':>17}   {'roofline':>17}")
    print(
        f"{'model':28}{'from → to':16}{'total':>9} {'kernels':>9}   {'total':>8} {'kernels':>8}"
        f"   {'total':>8} {'kernels':>8}"
    )
    for r in rows:
        way = f"{r['from'].split('-')[1]} → {r['to'].split('-')[1]}"
        print(
            f"{r['model'][:27]:28}{way:16}{r['error_ratio']:>+9.1%} "
            f"{r['kernels_error_ratio']:>+9.1%}   {r['left_out_error_ratio']:>+8.1%} "
            f"{r['left_out_kernels_error_ratio']:>+8.1%}   {r['roofline_error_ratio']:>+8.1%} "
            f"{r['roofline_kernels_error_ratio']:>+8.1%}"
        )
        for kind, projected, there in r["classes"] if verbose else ():
            error = f"{projected / there - 1:+.0%}" if there else "–"
            print(
                f"    {kind:16}{projected / 1e6:10.3f} ms  there {(there or 0) / 1e6:10.3f} ms  "
                f"{error}"
            )
    for title, name in (("as shipped", "error_ratio"), ("others only", "left_out_error_ratio")):
        errors = [abs(r[name]) for r in rows]
        print(f"{title}: mean {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}")


if __name__ == "__main__":
    main()
