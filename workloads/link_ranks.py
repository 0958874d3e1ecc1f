"""Start a workload's ranks, two of them on a link of their own where the workload wants one.

    python -m chopper.workloads.link_ranks RANKS MODULE [options of the module]

It does not load torch, which takes longer than some of the runs.
"""

from __future__ import annotations

import importlib
import os
import sys

from chopper.workloads import link
from chopper.workloads.processes import run_ranks

LINKED_VARIABLE = "CHOPPER_WORKLOAD_LINKED"
"""Asked for once, here: inside a namespace the answer may differ."""


def main(ranks: int, module: str, words: list[str]) -> None:
    """Run the ranks to their end."""
    args = importlib.import_module(module).WORKLOAD.parse(words)
    # What a rank sends over CUDA does not come by the link.
    wanted = ranks == 2 and args.device == "cpu" and getattr(args, "rate", None) != "none"
    linked = wanted and link.unavailable() is None
    os.environ[LINKED_VARIABLE] = str(int(linked))
    run_ranks(module, ranks, words=words, linked=linked)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
    except KeyboardInterrupt:
        sys.exit(130)
