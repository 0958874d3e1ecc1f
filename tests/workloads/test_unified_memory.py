"""Unified memory without a GPU: the allocator's C code on a runtime that is made here.

What torch and CUDA do with it has not been seen on a GPU.
"""

from __future__ import annotations

import ctypes
import subprocess

import pytest

torch = pytest.importorskip("torch")

from chopper.experiments.prepare import WorkloadUnavailable, prepare  # noqa: E402
from chopper.workloads import unified_memory  # noqa: E402

RUNTIME = """
#include <stdlib.h>
static int held;
int cudaMallocManaged(void **pointer, size_t bytes, unsigned int flags) {
  if (flags != 1) return 1;              /* cudaErrorInvalidValue */
  if (bytes > 1 << 20) return 2;         /* cudaErrorMemoryAllocation */
  held++;
  return (*pointer = malloc(bytes)) ? 0 : 2;
}
int cudaFree(void *pointer) { held--; free(pointer); return 0; }
int held_count(void) { return held; }
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    compiler = unified_memory.compiler()
    if compiler is None:
        pytest.skip("there is no C compiler")
    path = tmp_path_factory.mktemp("managed")
    (path / "runtime.c").write_text(RUNTIME)
    runtime = path / "libcudart.so.0"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(runtime), str(path / "runtime.c")], check=True
    )
    return unified_memory.build(path), ctypes.CDLL(str(runtime))


def test_memory_comes_from_the_runtime_and_goes_back(built):
    file, runtime = built
    memory = unified_memory.Managed(unified_memory.load(file, runtime))
    # As torch calls them, with a device and a stream.
    library = ctypes.CDLL(str(file))
    allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(
        (unified_memory.ALLOCATE, library)
    )
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(
        (unified_memory.FREE, library)
    )

    first, second = allocate(4096, 0, None), allocate(1024, 1, 0xABC)
    ctypes.memset(first, 7, 4096)
    ctypes.memset(second, 8, 1024)
    assert ctypes.string_at(first, 4096) == b"\7" * 4096
    assert (memory.live_bytes, memory.peak_bytes, runtime.held_count()) == (5120, 5120, 2)
    assert allocate(2 << 20, 0, None) is None  # torch raises OutOfMemoryError then
    free(first, 4096, 0, None)
    free(None, 4096, 0, None)
    assert (memory.live_bytes, memory.peak_bytes, runtime.held_count()) == (1024, 5120, 1)
    free(second, 1024, 1, None)
    assert (memory.live_bytes, runtime.held_count()) == (0, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_on_a_cpu_it_is_refused_in_one_line():
    with pytest.raises(WorkloadUnavailable) as refused:
        prepare("offload", variants="unified")
    assert str(refused.value) == (
        "offload unified: needs a GPU: on a CPU there is one memory, so nothing migrates"
    )
    with (
        pytest.raises(unified_memory.Unavailable, match="needs a GPU"),
        unified_memory.pool(torch.device("cpu")),
    ):
        pass


def test_a_compiler_that_is_missing_or_fails_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(unified_memory, "compiler", lambda: None)
    assert unified_memory.problem() == "needs a C compiler for its allocator: install cc, or set CC"
    monkeypatch.setattr(unified_memory, "compiler", lambda: "false")
    with pytest.raises(unified_memory.Unavailable, match=r"unified_memory\.c: false fails"):
        unified_memory.build(tmp_path)
