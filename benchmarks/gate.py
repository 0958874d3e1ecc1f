"""How often a comparison of identical programs cries wolf, and how often it sees 5 %.

    python -m benchmarks.gate [--cases N]

Simulated steps of four kinds of noise; a row says in how many percent of the cases the lower bound
of the 95 % interval of B − A lies above 0: for two identical programs (wrong), and when every step
of B takes 5 % longer (right).
"""

from __future__ import annotations

import argparse

import numpy as np

from chopper.statistics import Sample, compare_means

STEPS = (3, 5, 10, 20, 50)


def noise(kind: str, steps: int, rng: np.random.Generator) -> np.ndarray:
    if kind == "normal, 2 %":
        return 1 + 0.02 * rng.standard_normal(steps)
    if kind == "lognormal, 10 %":
        return np.exp(0.1 * rng.standard_normal(steps))
    if kind == "stalls: 1 in 10, ≤ 60 %":
        stalled = rng.random(steps) < 0.1
        return 1 + 0.01 * rng.standard_normal(steps) + stalled * 0.6 * rng.random(steps)
    values = np.empty(steps)
    value = rng.standard_normal()
    for i in range(steps):
        values[i] = value
        value = 0.6 * value + 0.8 * rng.standard_normal()
    return 1 + 0.02 * values


def share(kind: str, steps: int, factor: float, cases: int) -> float:
    rng = np.random.default_rng([steps, len(kind), int(factor * 100)])
    hits = 0
    for _ in range(cases):
        a, b = (noise(kind, steps, rng) * f for f in (1.0, factor))
        ones = np.ones(steps)
        found = compare_means(Sample(a[:, None], ones), Sample(b[:, None], ones))
        hits += found is not None and bool(found.difference[0, 0] > 0)
    return hits / cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    cases = parser.parse_args().cases
    print(f"| noise of the steps | {' | '.join(f'{n} steps' for n in STEPS)} |")
    print("|---" * (len(STEPS) + 1) + "|")
    for kind in ("normal, 2 %", "lognormal, 10 %", "stalls: 1 in 10, ≤ 60 %", "drift, 2 %"):
        cells = [
            f"{100 * share(kind, n, 1.0, cases):.1f} / {100 * share(kind, n, 1.05, cases):.0f}"
            for n in STEPS
        ]
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
