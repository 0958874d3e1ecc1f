"""Start a workload's ranks, and clear away what their Ray leaves behind.

    python -m chopper.workloads.ray_ranks RANKS MODULE [options of the module]

A signal that ends all processes ends Ray's, too, and a rank that loses them is ended by Ray's
library before it can remove their directory.
"""

from __future__ import annotations

import sys

from chopper.experiments.declarations import as_program
from chopper.workloads.processes import run_ranks
from chopper.workloads.ray_cluster import clear_leftovers


def main() -> None:
    """Run the ranks to their end."""
    try:
        run_ranks(sys.argv[2], int(sys.argv[1]), linked=False, words=sys.argv[3:])
    finally:
        clear_leftovers()


if __name__ == "__main__":
    as_program(main)
