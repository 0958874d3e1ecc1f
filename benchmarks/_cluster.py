"""A Ray cluster on this machine: nodes of one core each, started by `ray start`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_START = "import sys; from ray.scripts.scripts import main; sys.exit(main())"
_PATIENCE_S = 120
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    "RAY_enable_worker_prestart": "0",
    # A token in ~/.ray would be the head's alone.
    "RAY_AUTH_MODE": "disabled",
}


@contextlib.contextmanager
def cluster(nodes_count: int) -> Iterator[str]:
    """Start so many nodes for the length of the block; yield its address."""
    nodes: list[subprocess.Popen[bytes]] = []
    # Sockets have short paths only.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as made:
        folder = Path(made)
        guard = folder / "guard"
        guard.mkdir()
        # AMD's package without its library ends each of Ray's processes.
        (guard / "amdsmi.py").write_text('raise ImportError("not here")\n')
        environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": f"{guard}:{Path.cwd()}"}
        os.environ.update(_ENVIRONMENT)  # of the commands that join it
        head = ["--head", "--port=0", "--include-dashboard=false", f"--temp-dir={folder}"]
        try:
            nodes.append(_node(head, folder / "log-0", environment))
            address = (folder / "ray_current_cluster").read_text().strip()
            for number in range(1, nodes_count):
                log = folder / f"log-{number}"
                nodes.append(_node([f"--address={address}"], log, environment))
            yield address
        finally:
            for node in nodes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(node.pid, signal.SIGKILL)
                node.wait()


def _node(options: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    size = ["--num-cpus=1", "--object-store-memory=500000000", "--block"]
    with log.open("w") as file:
        node = subprocess.Popen(
            [sys.executable, "-c", _START, "start", *options, *size],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,
        )
    until = time.monotonic() + _PATIENCE_S
    while "runtime started" not in log.read_text():
        if node.poll() is not None or time.monotonic() > until:
            node.kill()
            raise RuntimeError(f"no node of Ray: {log.read_text()[-1000:]}")
        time.sleep(0.1)
    return node
