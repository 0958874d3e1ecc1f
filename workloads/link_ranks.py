"""Start a workload's ranks, two of them on a link of their own where the workload wants one.

    python -m chopper.workloads.link_ranks RANKS MODULE [options of the module]

It does not load torch, which takes longer than some of the runs.
"""

from __future__ import annotations

import importlib
import sys

from chopper.experiments.declarations import as_program
from chopper.workloads import link
from chopper.workloads.processes import run_ranks


def main() -> None:
    """Run the ranks to their end."""
    ranks, module, *words = sys.argv[1:]
    args = importlib.import_module(module).WORKLOAD.parse(words)
    # What a rank sends over CUDA does not come by the link.
    wanted = ranks == "2" and args.device == "cpu" and getattr(args, "rate", None) != "none"
    linked = wanted and link.unavailable() is None
    run_ranks(module, int(ranks), words=words, linked=linked)


if __name__ == "__main__":
    as_program(main)
