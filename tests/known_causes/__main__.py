"""Prove the attribution's accuracy on known causes: ``make validate``.

    python -m tests.known_causes [--synthetic | --real] [--quick] [--causes A,B] [--magnitudes A,B]

Causes are injected, one at a time and combined, into a model of a training job that accounts for
every nanosecond (--synthetic), and into real training on this machine (--real). The table shows for
each what was injected, what the attribution found, and what leaked into other causes. The exit code
is 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from chopper.causes import parents
from tests.known_causes import page, real, synthetic
from tests.known_causes.results import MAGNITUDES, Case

_SUITES = {"synthetic": synthetic, "real": real}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases and print their table; 1 if one missed its limits."""
    options = _options(arguments)
    started = time.perf_counter()
    done: list[Case] = []
    for name, injections in options.injections.items():
        for case in _SUITES[name].run_cases(
            injections=injections,
            magnitudes=options.magnitudes,
            seed=options.seed,
            quick=options.quick,
        ):
            done.append(case)
            if case.status == "missed" or len(done) % 25 == 0:
                seconds = time.perf_counter() - started
                what = f"{case.injection} {case.magnitude} {case.flavour}: {case.status}"
                print(f"{len(done)} cases, {seconds:.0f} s: {what}", file=sys.stderr)
    print(page.render(done))
    return int(any(case.status == "missed" for case in done))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.known_causes")
    suite = parser.add_mutually_exclusive_group()
    suite.add_argument("--synthetic", dest="suite", action="store_const", const="synthetic")
    suite.add_argument("--real", dest="suite", action="store_const", const="real")
    parser.add_argument("--causes", type=_list, help="injections, causes or their parents")
    parser.add_argument("--magnitudes", type=_list, default=MAGNITUDES, help=", ".join(MAGNITUDES))
    parser.add_argument("--seed", type=int, default=0, help="of noise and order")
    parser.add_argument("--quick", action="store_true", help="a subset: seconds, not minutes")
    options = parser.parse_args(arguments)
    names = {
        (suite, name): {name, cause, *parents(cause)}
        for suite in ([options.suite] if options.suite else _SUITES)
        for name, cause in _SUITES[suite].injections().items()
    }
    every = set().union(*names.values())
    wanted = every if options.causes is None else {*options.causes}
    for kind, unknown in (
        ("injection or cause", wanted - every),
        ("magnitude", {*options.magnitudes} - {*MAGNITUDES}),
    ):
        if unknown:
            parser.error(f"no {kind} is called {', '.join(sorted(unknown))}")
    options.injections = {}
    for (suite_name, name), of in names.items():
        if wanted & of:
            options.injections.setdefault(suite_name, []).append(name)
    return options


def _list(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main())
