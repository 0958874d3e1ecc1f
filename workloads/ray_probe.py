"""Ask a Ray cluster for its id; whatever else listens there is given up on by SIGALRM.

    python -m chopper.workloads.ray_probe HOST:PORT SECONDS

In a process of its own: Ray's library tries for 40 s, warns meanwhile, and cannot be told to stop.
"""

from __future__ import annotations

import signal
import sys

from chopper.workloads.ray_cluster import load_ray


def main(address: str, patience_s: int) -> None:
    """Return when it has answered; end with exit code 1 and a line when it refuses."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    load_ray(address=address)
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    signal.alarm(patience_s)  # not before: on a busy machine, loading takes long
    try:
        GcsClient(address=address)
    except Exception as exc:  # noqa: BLE001 - Ray raises whatever its parts do
        print(" ".join(str(exc).split()))
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
