"""A matrix product whose tiles wait for the flag of the rows that they need.

The copy engine (or other ranks) bring the rows of A in chunks and raise a flag for each; the kernel
starts at once, and each tile spins on the flag of its own chunk. Tiles start with the chunk that is
here first: ``pid_m = (pid_m + first_tile) mod tiles``, the swizzle of Triton-distributed (arXiv
2504.19442). It runs on CUDA, HIP and, with ``TRITON_INTERPRET=1``, in Triton's interpreter.
"""

# Pointers and sizes of a kernel are Triton's to type.
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 32


@triton.jit
def _kernel(
    a,
    b,
    c,
    flags,
    M,
    N,
    K,
    rows_per_chunk,
    first_tile,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    # All columns of a row of tiles before the next row: a chunk is used up while in the cache.
    tile_m = (pid // tiles_n + first_tile) % tiles_m
    tile_n = pid % tiles_n

    # The last row decides: rows come in order, and a tile may reach into the next chunk.
    last_row = tl.minimum(tile_m * BLOCK_M + BLOCK_M, M) - 1
    first_chunk = (tile_m * BLOCK_M) // rows_per_chunk
    for chunk in range(first_chunk, last_row // rows_per_chunk + 1):
        # An atomic is not served from a stale cache; acquire keeps the loads below behind it.
        while tl.atomic_add(flags + chunk, 0, sem="acquire", scope="sys") == 0:
            pass

    # Wide: rows × columns of a large matrix are past 2³¹.
    rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        inner = (k + tl.arange(0, BLOCK_K)).to(tl.int64)
        left = tl.load(
            a + rows[:, None] * K + inner[None, :],
            mask=(rows[:, None] < M) & (inner[None, :] < K),
            other=0.0,
        )
        right = tl.load(
            b + inner[:, None] * N + columns[None, :],
            mask=(inner[:, None] < K) & (columns[None, :] < N),
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    tl.store(
        c + rows[:, None] * N + columns[None, :],
        total.to(c.dtype.element_ty),
        mask=(rows[:, None] < M) & (columns[None, :] < N),
    )


def matmul_on_flags(
    a: Tensor, b: Tensor, flags: Tensor, *, rows_per_chunk: int, first_row: int = 0
) -> Tensor:
    """Multiply a [M, K] by b [K, N], both contiguous, while the rows of a arrive.

    Args:
        a: rows of chunk i may be written until ``flags[i]`` is raised.
        b: all here.
        flags: int32 [chunks], 0 until the chunk is here.
        rows_per_chunk: the last chunk may be shorter.
        first_row: where to begin: rows that are here already.
    """
    m, k = a.shape
    n = b.shape[1]
    if not (a.is_contiguous() and b.is_contiguous()):
        raise ValueError("a and b must be contiguous: the kernel addresses them by rows")
    if len(flags) * rows_per_chunk < m:
        raise ValueError(f"{len(flags)} flags of {rows_per_chunk} rows do not cover {m} rows")
    c = torch.empty(m, n, dtype=a.dtype, device=a.device)
    tiles = triton.cdiv(m, BLOCK_M) * triton.cdiv(n, BLOCK_N)
    _kernel[(tiles,)](
        a,
        b,
        c,
        flags,
        m,
        n,
        k,
        rows_per_chunk,
        triton.cdiv(first_row, BLOCK_M),  # the first tile that is here whole
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
    )
    return c
