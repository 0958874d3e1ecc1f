"""A real Ray cluster on this machine: nodes of `ray start`, of one core each."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from chopper.fresh_python import environment
from tests.waiting import PATIENCE_S, until

_START = "import sys; from ray.scripts.scripts import main; sys.exit(main())"


class Nodes:
    """Nodes of a cluster, each of a process group of its own.

    Attributes:
        address: of the cluster.
        guard: a folder that the nodes import from first.
        opened: a file for what their site notes, ``{log!r}`` in it.
        cache: the nodes' own.
    """

    def __init__(self, folder: Path, site: str, store_bytes: int) -> None:
        self._folder, self._groups = folder, list[subprocess.Popen[bytes]]()
        self._size = ("--num-cpus=1", f"--object-store-memory={store_bytes}")
        guard = folder / "guard"
        guard.mkdir()
        # AMD's package without its library ends each of Ray's processes.
        (guard / "amdsmi.py").write_text('raise ImportError("not here")\n')
        self.guard, self.opened = guard, folder / "opened"
        (guard / "sitecustomize.py").write_text(site.format(log=str(self.opened)))
        self.cache = folder / "cache"
        try:
            self.start("--head", "--port=0", "--include-dashboard=false", f"--temp-dir={folder}")
            current = folder / "ray_current_cluster"
            until(lambda: current.exists() and current.read_text(), "the cluster's address")
            self.address = current.read_text().strip()
        except BaseException:
            self.end()
            raise

    def start(self, *options: str, path: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a node; ``path`` comes first where it imports from."""
        log = self._folder / f"log-{len(self._groups)}"
        options = options or (f"--address={self.address}",)
        paths = [str(p) for p in (path, self.guard) if p is not None]
        with log.open("w") as file:
            node = subprocess.Popen(
                [sys.executable, "-c", _START, "start", *options, *self._size, "--block"],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(paths),
                    "RAY_USAGE_STATS_ENABLED": "0",
                    "XDG_CACHE_HOME": str(self.cache),
                    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
                    "RAY_enable_worker_prestart": "0",
                    # Else workers yield to whatever else this machine does, as no others do (15).
                    "RAY_worker_niceness": "0",
                    # A node that is gone is noticed soon.
                    "RAY_health_check_initial_delay_ms": "1000",
                    "RAY_health_check_period_ms": "500",
                    "RAY_health_check_timeout_ms": "3000",
                    "RAY_health_check_failure_threshold": "3",
                },
                start_new_session=True,
            )
        self._groups.append(node)
        until(lambda: "runtime started" in log.read_text() or node.poll() is not None, "a node")
        assert node.poll() is None, log.read_text()
        return node

    def kill(self, node: subprocess.Popen[bytes]) -> None:
        """End a node as a machine that fails does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        node.wait(PATIENCE_S)
        if node in self._groups:
            self._groups.remove(node)

    def end(self) -> None:
        for node in [*self._groups]:
            self.kill(node)


@contextlib.contextmanager
def started_nodes(
    count: int = 1, *, site: str = "", store_bytes: int = 100_000_000
) -> Iterator[Nodes]:
    """Start nodes for the length of the block, whose processes execute ``site`` first."""
    with (
        # Sockets have short paths only.
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder,
        # A token in ~/.ray would be the head's alone.
        environment({"RAY_AUTH_MODE": "disabled"}),
    ):
        nodes = Nodes(Path(folder), site, store_bytes)
        try:
            for _ in range(count - 1):
                nodes.start()
            yield nodes
        finally:
            nodes.end()
