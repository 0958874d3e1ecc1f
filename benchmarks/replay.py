"""Predictions of the replay, against the model and against training on this machine.

    python -m benchmarks.replay [--synthetic | --real] [--magnitudes small,medium,large]
    python -m benchmarks.replay --events 1000000
    python -m benchmarks.replay --events 10000 --ranks 32

The first form prints the table of docs/concepts/replay.md: each injected cause is taken away in a
replay, and the predicted step time is compared with that of the job run again without it, for
training on this machine with the 95 % interval of the error; exit code 1 when a bar is missed. The
second times the replay of a synthetic run of that many device events. With ``--ranks``, a job of so
many, which all differ, is predicted by one graph of all and by contracted ones: what either takes,
and how far apart they are.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import _synthetic
from benchmarks.predictions import Prediction, real_cases, synthetic_cases
from chopper import pipeline
from chopper import wording as fmt
from chopper.experiments.judgement import others_while
from tests.known_causes.results import MAGNITUDES

LIMIT_S = 5.0
BUSY_CORES = 0.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--synthetic", action="store_true", help="only the model")
    parser.add_argument("--real", action="store_true", help="only training on this machine")
    parser.add_argument("--magnitudes", default=",".join(MAGNITUDES))
    parser.add_argument("--events", type=int, help="time the replay of so many device events")
    parser.add_argument("--ranks", type=int, default=1, help="of so many ranks each, with --events")
    parser.add_argument("--all", action="store_true", help="a row for each prediction")
    parser.add_argument("--rounds", type=int, default=3, help="recordings of each real case")
    options = parser.parse_args()
    shown = table if options.all else summary
    if options.events:
        timed(options.events) if options.ranks == 1 else compared(options.events, options.ranks)
        return
    cases: list[Prediction] = []
    if not options.real:
        cases += synthetic_cases(magnitudes=options.magnitudes.split(","))
        print(shown(cases))
    if not options.synthetic:
        with others_while() as others:
            real = real_cases(rounds=options.rounds)
        print(measured(real))
        if others.cores > BUSY_CORES:
            print(
                f"other programs used {others.cores:.1f} cores meanwhile: run it on a quiet machine"
            )
        cases += real
    scored = [case for case in cases if case.refused is None]
    missed = sum(not case.ok for case in cases)
    worst = max((abs(case.error_ratio) for case in scored), default=0.0)
    print(
        f"{len(cases)} predictions, {len(cases) - len(scored)} refused with a reason, "
        f"{missed} outside their bar; worst error {fmt.percent(worst, '.1f')}"
    )
    sys.exit(1 if missed else 0)


def table(cases: Sequence[Prediction]) -> str:
    """The cases as a table in Markdown."""
    lines = [
        "| removed | how | observed | predicted | truth | error |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for case in cases:
        error = fmt.percent(case.error_ratio, "+.1f") if case.refused is None else "refused"
        mark = "" if case.ok else " ✗"
        lines.append(
            f"| {case.name.replace('_', ' ')}, {case.magnitude}, {case.flavour} | `{case.change}` "
            f"| {case.observed_ns / 1e6:.2f} ms | {case.predicted_ns / 1e6:.2f} ms | "
            f"{case.truth_ns / 1e6:.2f} ms | {error}{mark} |"
        )
    return "\n".join(lines) + "\n"


def measured(cases: Sequence[Prediction]) -> str:
    """Cases whose truth was measured, with interval of the error and verdict, in Markdown."""
    lines = [
        (
            "| removed | how | pairs | observed | predicted | measured "
            "| error | 95 % interval | verdict |"
        ),
        "|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for case in cases:
        times = [case.observed_ns, case.predicted_ns, case.truth_ns]
        shown = ["–" if case.refused else f"{time / 1e6:.1f} ms" for time in times]
        error = "–" if case.refused else f"{fmt.percent(case.error_ratio, '+.1f')}"
        interval = (
            f"{fmt.percent(case.ci95_ratio[0], '+.1f')} … {fmt.percent(case.ci95_ratio[1], '+.1f')}"
            if case.ci95_ratio
            else "–"
        )
        lines.append(
            f"| {case.name.replace('_', ' ')}, {case.magnitude} | `{case.change}` | "
            f"{case.pairs_count or '–'} | {' | '.join(shown)} | {error} | {interval} | "
            f"{case.verdict} |"
        )
    return "\n".join(lines) + "\n"


def summary(cases: Sequence[Prediction]) -> str:
    """One row for each injection: its last case, and the worst error of all, in Markdown."""
    lines = [
        "| removed | how | cases | observed | predicted | truth | worst error |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for name in dict.fromkeys(case.name for case in cases):
        mine = [case for case in cases if case.name == name]
        scored = [case for case in mine if case.refused is None]
        shown = (scored or mine)[-1]
        worst = max((case.error_ratio for case in scored), key=abs, default=None)
        error = "refused" if worst is None else f"{fmt.percent(worst, '+.1f')}"
        mark = "" if all(case.ok for case in mine) else " ✗"
        lines.append(
            f"| {name.replace('_', ' ')} | `{shown.change}` | {len(mine)} | "
            f"{shown.observed_ns / 1e6:.2f} ms | {shown.predicted_ns / 1e6:.2f} ms | "
            f"{shown.truth_ns / 1e6:.2f} ms | {error}{mark} |"
        )
    return "\n".join(lines) + "\n"


def timed(events: int) -> None:
    """Seconds of the graph with its unmodified replay, of one more replay, of every cause's."""
    from chopper.analyzers.replay.replay import Replay

    with tempfile.TemporaryDirectory(prefix="chopper-replay-") as work:
        _synthetic.write_run(Path(work) / "run", events)
        attribution = pipeline.attribute(Path(work) / "run")
        marks = [time.perf_counter()]
        replay = Replay(attribution)
        marks.append(time.perf_counter())
        replay.gives_back(["idle.preparation"])
        marks.append(time.perf_counter())
        causes = replay.recoverable()
        marks.append(time.perf_counter())
    graph = replay.base.graph
    print(
        f"{replay.base.events_count:,} device events: {len(graph.time_ns):,} moments, "
        f"{len(graph.source):,} edges"
    )
    for label, low, high in (
        ("graph and unmodified replay", 0, 1),
        ("one change", 1, 2),
        (f"what each of {len(causes)} causes gives back", 2, 3),
    ):
        print(f"{label}: {marks[high] - marks[low]:.2f} s")
    print(f"wanted: at most {LIMIT_S:.0f} s for the graph and one change")


def compared(events: int, ranks: int) -> None:
    """Seconds of attribution and every cause's saving, by one graph and by contracted ones."""
    from chopper.analyzers.replay.replay import recoverable, replay_or_reason

    run = _synthetic.run(events, ranks)
    taken, found = {}, {}
    for how, most_rows in (("one graph", 1 << 62), ("contracted", 0)):
        pipeline.MOST_ROWS = most_rows
        start_s = time.perf_counter()
        attribution = pipeline.attribute(run)
        replay = replay_or_reason(attribution)
        found[how] = recoverable(attribution, replay)
        taken[how] = time.perf_counter() - start_s
        print(f"{ranks} ranks, {how}: {taken[how]:.2f} s for {len(found[how])} causes")
    step_ns = attribution.observed_ns / attribution.windows.num_rows
    pairs = ((saving, found["contracted"][cause]) for cause, saving in found["one graph"].items())
    apart = max(abs((a.step_ns or 0) - (b.step_ns or 0)) for a, b in pairs) / step_ns
    print(f"contracted takes {taken['contracted'] / taken['one graph']:.2f} of it; ", end="")
    print(f"predictions differ by at most {fmt.ratio(apart)} of a step (wanted: 1 %)")


if __name__ == "__main__":
    main()
