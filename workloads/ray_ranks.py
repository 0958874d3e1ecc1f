"""Start a workload's ranks, and clear away what their Ray leaves behind.

    python -m chopper.workloads.ray_ranks RANKS MODULE [options of the module]

A signal that ends all processes ends Ray's, too, and a rank that loses them is ended by Ray's
library before it can remove their directory.
"""

from __future__ import annotations

import sys

from chopper.workloads.processes import run_ranks
from chopper.workloads.ray_cluster import clear_leftovers

if __name__ == "__main__":
    try:
        run_ranks(sys.argv[2], int(sys.argv[1]), linked=False, words=sys.argv[3:])
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        clear_leftovers()
