"""Unified memory: what torch allocates, as pages that host and device share.

    with unified_memory.pool(device) as memory:
        model = ...                       # weights, gradients and activations are managed
    memory.peak_bytes

CUDA moves a page to whoever touches it, so that more can be allocated than the device holds: on x86
with PCIe by page faults, which is migration and not coherence; over a coherent link, as GH200's, a
page may be read where it is. The workload does not try more than the device holds: a driver out of
both memories takes other programs with it.

On top lies torch's caching allocator, through a ``MemPool`` whose memory comes from
``unified_memory.c``. torch's own ``torch.cuda.memory._use_uvm`` (2.13) does the same by callbacks
into Python, and needs the package cuda-python.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("unified_memory.c")
ALLOCATE, FREE = "chopper_managed_allocate", "chopper_managed_free"
_RUNTIMES = {
    # Name in a library's file, and its functions.
    "cuda": ("libcudart.so", "cudaMallocManaged", "cudaFree"),
    "hip": ("libamdhip64.so", "hipMallocManaged", "hipFree"),
}


class Unavailable(RuntimeError):
    """Unified memory is not available; the message says why."""


_ALIVE: list[object] = []
"""Allocators and pools: torch gives memory back to them until the process ends."""


def problem() -> str | None:
    """Name what this machine lacks for it, or None."""
    if not torch.cuda.is_available():
        return "needs a GPU: on a CPU there is one memory, so nothing migrates"
    if compiler() is None:
        return "needs a C compiler for its allocator: install cc, or set CC"
    return None


def compiler() -> str | None:
    """The C compiler: ``CC``, or the system's."""
    return shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")


def build(into: Path) -> Path:
    """Compile the allocator into a directory; no header or library of CUDA is needed."""
    cc = compiler()
    if cc is None:
        raise Unavailable("no C compiler: install cc, or set CC")
    library = into / "managed.so"
    words = [cc, "-std=c11", "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise Unavailable(f"{SOURCE.name}: {cc} fails: {errors[-1]}")
    return library


def load(library: Path, runtime: ctypes.CDLL, kind: str = "cuda") -> ctypes.CDLL:
    """The allocator, which takes its memory from this runtime."""
    _, allocate, free = _RUNTIMES[kind]
    allocator = ctypes.CDLL(str(library))
    allocator.chopper_managed_use.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    allocator.chopper_managed_use.restype = None
    for name in ("live_bytes", "peak_bytes"):
        getattr(allocator, f"chopper_managed_{name}").restype = ctypes.c_int64
    functions = (getattr(runtime, name) for name in (allocate, free))
    allocator.chopper_managed_use(*(ctypes.cast(f, ctypes.c_void_p) for f in functions))
    return allocator


def loaded_runtime(maps: str, kind: str) -> str | None:
    """File of the runtime that a process has loaded: another copy would have another context."""
    name = _RUNTIMES[kind][0]
    for line in maps.splitlines():
        path = line.rpartition(" ")[2]
        if Path(path).name.startswith(name):
            return path
    return None


@dataclass(frozen=True)
class Managed:
    """Bytes that were allocated as managed memory."""

    library: ctypes.CDLL

    @property
    def live_bytes(self) -> int:
        """Now, by torch's segments."""
        return int(self.library.chopper_managed_live_bytes())

    @property
    def peak_bytes(self) -> int:
        """At most, by torch's segments."""
        return int(self.library.chopper_managed_peak_bytes())


@contextlib.contextmanager
def pool(device: torch.device) -> Iterator[Managed]:
    """Make what this thread allocates on the device inside managed memory, in backward too."""
    lacking = problem()
    if lacking is not None:
        raise Unavailable(lacking)
    kind = "hip" if torch.version.hip else "cuda"
    torch.cuda.init()
    path = loaded_runtime(Path("/proc/self/maps").read_text(), kind)
    if path is None:
        raise Unavailable(f"torch has loaded no {_RUNTIMES[kind][0]}: its runtime is built in")
    with tempfile.TemporaryDirectory(prefix="chopper-managed-") as scratch:
        # A library that is loaded outlives its file.
        file = build(Path(scratch))
        library = load(file, ctypes.CDLL(path), kind)
        allocator = torch.cuda.memory.CUDAPluggableAllocator(str(file), ALLOCATE, FREE)
    memory = torch.cuda.MemPool(allocator.allocator())
    _ALIVE.append((library, allocator, memory))
    # A pool serves the thread that entered it: backward has to run here, not in autograd's threads.
    with torch.autograd.set_multithreading_enabled(False), torch.cuda.use_mem_pool(memory, device):
        yield Managed(library)


def migration_bytes_per_s(
    device: torch.device, size_bytes: int, *, repeats: int = 5
) -> dict[str, float]:
    """Rate at which managed memory that the host wrote comes to the device, by access pattern.

    ``in order`` and ``scattered`` read each page once through the device's page faults; ``copied``
    is the explicit copy that they stand against, ``resident`` a second read. Called in a `pool`.
    """
    count = size_bytes // 4
    shared = torch.zeros(count, device=device)
    host = _host_view(shared)
    page = 4096 // 4
    scattered = torch.randperm(count // page, device=device)
    pinned = torch.ones(count, pin_memory=True)
    into = torch.empty_like(shared)
    patterns: dict[str, tuple[bool, Callable[[], object]]] = {
        "in order": (True, lambda: shared.sum()),
        "scattered": (True, lambda: shared.view(-1, page).index_select(0, scattered).sum()),
        "resident": (False, lambda: shared.sum()),
        "copied": (False, lambda: into.copy_(pinned, non_blocking=True)),
    }
    rates = {}
    for name, (written, read) in patterns.items():
        times_s = []
        for _ in range(repeats + 1):
            torch.cuda.synchronize(device)
            if written:
                host.fill_(1.0)  # the pages go to the host
            begin = time.perf_counter()
            read()
            torch.cuda.synchronize(device)
            times_s.append(time.perf_counter() - begin)
        rates[name] = size_bytes / statistics.median(times_s[1:])
    return rates


def _host_view(shared: Tensor) -> Tensor:
    words = (ctypes.c_float * shared.numel()).from_address(shared.data_ptr())
    return torch.frombuffer(words, dtype=torch.float32)
