from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.storage.s3_server import s3, server  # noqa: F401 - fixtures of several packages

ROOT = Path(__file__).resolve().parent.parent

# Kineto reads this once per process: whichever test starts its profiler first, the notes that it
# writes to stderr must not stand between a test and what chopper itself says there.
os.environ["KINETO_LOG_LEVEL"] = "99"

# Tests fill the cores already. Where two processes have a thread a core each, the threads of an
# operator wait for each other spinning, and most of the CPU time goes there.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests start hundreds of processes: each would compile all of the product where nothing keeps the
# compiled files.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell's background jobs ignore Ctrl-C, under nohup all ignore a hang-up, and both are passed on:
# signals end the programs that tests start, whoever started the tests.
for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(
            _number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL
        )

# How long an example takes says how busy the machine is.
settings.register_profile(
    "chopper", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("chopper")


_numbers = itertools.count()


def find_traces_dir() -> Path | None:
    """Return the optional catalogue of real traces, which CHOPPER_TRACES names."""
    named = os.environ.get("CHOPPER_TRACES")
    return Path(named) if named and Path(named).is_dir() else None


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    found = find_traces_dir()
    if found is None:
        pytest.skip("real traces not present: set CHOPPER_TRACES to a directory that holds them")
    return found


@pytest.fixture(autouse=True, scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tests neither read nor write what the user's own runs have left in the cache."""
    folder = tmp_path_factory.mktemp("caches")
    os.environ["XDG_CACHE_HOME"] = str(folder / "shared")
    return folder


@pytest.fixture(autouse=True)
def own_cache(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test sees no results of others, which may have changed how runs are attributed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches / str(next(_numbers))))


@pytest.fixture
def hostile_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with modules that fail whatever imports them in place of the real ones."""
    directory = tmp_path_factory.mktemp("hostile")
    for name in ("chopper", "torch", "numpy", "pyarrow", "msgspec", "psutil", "click", "ray"):
        (directory / f"{name}.py").write_text(
            "raise SystemExit(f'{__file__}: the current directory is imported from')\n"
        )
    return directory


@contextlib.contextmanager
def tmpfs(options: str) -> Iterator[Path]:
    """A file system in memory, for example ``size=64k`` or ``ro``.

    Not under pytest's own directories: a test that is killed leaves its mount behind, and no later
    session must stumble over it while it cleans up.
    """
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a tmpfs needs root")
    at = Path(tempfile.mkdtemp(prefix="chopper-tmpfs-"))
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)], capture_output=True, check=False
    )
    if done.returncode:
        at.rmdir()
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.decode().strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)
        at.rmdir()
