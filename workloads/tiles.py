"""Matrix products in Triton whose tiles wait for the data that other ranks send.

Each is one kernel on the primitives of Triton-distributed (arXiv 2504.19442) in plain Triton: put,
notify, wait. Its programs draw tickets, so that those that have started are always the first
ones: programs that send have the lowest tickets and wait for nobody, and those that wait need only
what lower tickets send. So it ends whatever else fills the GPU, in whatever order a GPU starts
programs, and in Triton's interpreter, which runs one after the other.

    gather_matmul    Y = all_gather(X) · W: programs put chunks into the others' memory, a tile of Y
                     waits for the chunks that its rows need
    matmul_scatter   Y = reduce_scatter(X · W): a tile of the partial product is stored into the
                     memory of the rank that owns its rows, which adds what comes

Orders of what a rank sends and of its tiles:

    rows    peers by number, which is the same order on every rank: no swizzle
    ring    peer after peer, each rank from its own neighbour on: the swizzle of Triton-distributed,
            ``pid_m = (pid_m + rank · pid_ms_per_rank) mod num_pid_m``

Every rank allocates the same places of symmetric memory (`workloads.symmetric`). A kernel is given
``team``, int64 on the device:

    [0]      this rank
    [1]      number of ranks
    [2]      address of two int32 of this rank: stop, raised by the host, and cut short, its answer
    [3 + r]  address of rank r's symmetric memory, in this process

A signal is an int32 in symmetric memory, 0 at first. It holds the step whose data have come, is
written by one program of one rank and never reset: a wait for step 7 cannot take step 6 for it.

They run on CUDA, HIP and, with ``TRITON_INTERPRET=1``, between processes on CPUs.
"""

# Pointers and sizes of a kernel are Triton's to type.
# ruff: noqa: ANN001, ANN201
from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from chopper.workloads.symmetric import Place, SymmetricMemory

Order = Literal["rows", "ring"]
Piece = tuple[int, int]
"""(rank that it goes to or comes from, which of its pieces)."""

HIP = torch.version.hip is not None
ELEMENTS = 1024
"""That a program moves at once."""


class Blocks(NamedTuple):
    """Sides of a tile and its step along the inner dimension."""

    m: int
    n: int
    k: int

    @classmethod
    def of(cls, device: torch.device) -> Blocks:
        """Return those of a device: the interpreter's time is that of its operations."""
        return cls(256, 256, 256) if device.type == "cpu" else cls(64, 64, 32)


def turns(order: Order, rank: int, ranks: int, pieces: int, *, to: bool = True) -> list[Piece]:
    """Return what a rank exchanges with all others, in order.

    Args:
        to: True: pieces that it sends; False: pieces that it receives, in the order of arrival.
    """
    peers = [peer for peer in range(ranks) if peer != rank]
    if order == "ring":
        peers = [(rank + (i if to else -i)) % ranks for i in range(1, ranks)]
    return [(peer, piece) for peer in peers for piece in range(pieces)]


def visits(order: Order, rank: int, ranks: int, tiles: int, *, own_first: bool) -> list[Piece]:
    """Return a rank's row tiles of all ranks, in order.

    Args:
        own_first: True: tiles that need no other rank come first; False: tiles that other ranks
            wait for come first.
    """
    if order == "rows":
        return [(owner, tile) for owner in range(ranks) for tile in range(tiles)]
    own_tiles = [(rank, tile) for tile in range(tiles)]
    other_tiles = turns(order, rank, ranks, tiles, to=not own_first)
    return own_tiles + other_tiles if own_first else other_tiles + own_tiles


@triton.jit
def rank(team):
    """Return this rank."""
    return tl.load(team).to(tl.int32)


@triton.jit
def ranks(team):
    """Return the number of ranks."""
    return tl.load(team + 1).to(tl.int32)


@triton.jit
def symm_at(place, peer, team):
    """Return the pointer to the same place in another rank's memory.

    ``place`` begins on a multiple of 16 bytes, which a GPU loads or stores at once: Triton takes
    this on trust.
    """
    offset = place.to(tl.int64) - tl.load(team + 3 + tl.load(team))
    return tl.multiple_of((tl.load(team + 3 + peer) + offset).to(place.dtype), 16)


@triton.jit
def signal_at(signal, peer, team):
    """Return the pointer to the same signal in another rank's memory; they lie 4 bytes apart."""
    offset = signal.to(tl.int64) - tl.load(team + 3 + tl.load(team))
    return (tl.load(team + 3 + peer) + offset).to(signal.dtype)


@triton.jit
def notify(signal, step, peer, team, HIP: tl.constexpr):
    """Set another rank's signal, behind all that this program has stored.

    Only one thread sets it, so the others' stores must come before: the barrier orders them, and
    release at the scope of the system carries them to the other device.
    """
    if HIP:
        # An AMD wave's release waits for its own stores alone, and the barrier for none: each wave
        # must see its own complete first (as LLVM's barriers do since llvm-project#160501, gfx10+).
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32 $0, $1", "=v,v", [step], tl.int32, False, 1
        )
    tl.debug_barrier()
    tl.atomic_xchg(signal_at(signal, peer, team), step, sem="release", scope="sys")


@triton.jit
def wait(signal, step, team):
    """Wait until a signal of this rank has come to ``step``; loads below see what came with it.

    It ends, too, when the host raises stop: another rank has gone, or it took too long. Then it
    says so in cut short, and what is computed from here on is worth nothing; a notify behind it
    would pass that on.
    """
    # An atomic is not served from a stale cache; compilers for NVIDIA make it a load that acquires.
    ahead = tl.atomic_add(signal, 0, sem="acquire", scope="sys") - step
    if ahead < 0:
        stops = tl.load(team + 2).to(tl.pointer_type(tl.int32))
        polls = 0
        stop = 0
        while (ahead < 0) & (stop == 0):
            polls += 1
            if polls % 64 == 0:  # it lies in the host's memory, a long way from a GPU
                stop = tl.load(stops, volatile=True)
            # Once more after stop was seen: what a rank sent before it ended has come.
            ahead = tl.atomic_add(signal, 0, sem="acquire", scope="sys") - step
        if ahead < 0:
            tl.store(stops + 1, 1)
    # One thread has polled; no other may load before.
    tl.debug_barrier()


@triton.jit
def put(place, offset, source, count, peer, team, BLOCK: tl.constexpr):
    """Copy ``count`` elements to ``place + offset`` in another rank's memory, for a notify behind.

    Only ``place`` begins on a multiple of 16 bytes; the offset is any number of elements.
    """
    target = symm_at(place, peer, team) + offset
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


@triton.jit
def draw(tickets):
    """Return this program's place among those of the kernel, by their start."""
    return tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")


@triton.jit
def product(
    a,
    b,
    first_row,
    first_column,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return a tile of a [M, K] · b [K, N] in float32."""
    # Wide: rows × columns of a large matrix are past 2³¹.
    rows = (first_row + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = first_column + tl.arange(0, BLOCK_N)
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
    return total


@triton.jit
def at_tile(first_row, first_column, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the offsets of a tile in a matrix [M, N], and which of them are in it."""
    rows = (first_row + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = first_column + tl.arange(0, BLOCK_N)
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    return rows[:, None] * N + columns[None, :], mask


@triton.jit
def gather_matmul_kernel(
    team,
    tickets,
    x,  # place [ranks, rows, K], own rows in it
    signals,  # [ranks, chunks]
    w,
    y,
    sends,  # [turns] rank × chunks + chunk
    order,  # [ranks × row tiles] owner × row tiles + tile
    turns_count,
    rows,
    N,
    K,
    rows_per_chunk,
    step,
    LANES: tl.constexpr,
    ELEMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HIP: tl.constexpr,
):
    """Put own rows into the others' memory in ``LANES`` programs; compute a tile in each other."""
    ticket = draw(tickets)
    me = rank(team)
    chunks = tl.cdiv(rows, rows_per_chunk)
    if ticket < LANES:
        for turn in range(ticket, turns_count, LANES):
            piece = tl.load(sends + turn)
            chunk = piece % chunks
            first = chunk * rows_per_chunk
            count = tl.minimum(rows_per_chunk, rows - first) * K
            offset = (me * rows + first).to(tl.int64) * K
            put(x, offset, x + offset, count, piece // chunks, team, ELEMENTS)
            notify(signals + me * chunks + chunk, step, piece // chunks, team, HIP)
    else:
        tiles_m = tl.cdiv(rows, BLOCK_M)
        tiles_n = tl.cdiv(N, BLOCK_N)
        # All columns of a row of tiles before the next: rows are used up while in the cache.
        tile = ticket - LANES
        visit = tl.load(order + tile // tiles_n)
        owner = visit // tiles_m
        row = visit % tiles_m * BLOCK_M
        column = tile % tiles_n * BLOCK_N
        if owner != me:
            # A tile may reach into the next chunk, and a chunk into the next tile.
            last = tl.minimum(row + BLOCK_M, rows) - 1
            for chunk in range(row // rows_per_chunk, last // rows_per_chunk + 1):
                wait(signals + owner * chunks + chunk, step, team)
        skip = (owner * rows).to(tl.int64)
        total = product(x + skip * K, w, row, column, rows, N, K, BLOCK_M, BLOCK_N, BLOCK_K)
        at, mask = at_tile(row, column, rows, N, BLOCK_M, BLOCK_N)
        tl.store(y + skip * N + at, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def matmul_scatter_kernel(
    team,
    tickets,
    incoming,  # place [ranks, rows, N]
    signals,  # [ranks, tiles]
    x,
    w,
    y,
    order,  # [ranks × row tiles] owner × row tiles + tile
    rows,
    N,
    K,
    step,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HIP: tl.constexpr,
):
    """Compute tiles of the partial product for their owners, then add those of own rows."""
    ticket = draw(tickets)
    me = rank(team)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    column = ticket % tiles_n * BLOCK_N
    if ticket < ranks(team) * tiles:
        visit = tl.load(order + ticket // tiles_n)
        owner = visit // tiles_m
        tile_m = visit % tiles_m
        row = tile_m * BLOCK_M
        skip = (owner * rows).to(tl.int64) * K
        total = product(x + skip, w, row, column, rows, N, K, BLOCK_M, BLOCK_N, BLOCK_K)
        at, mask = at_tile(row, column, rows, N, BLOCK_M, BLOCK_N)
        to = symm_at(incoming, owner, team) + (me * rows).to(tl.int64) * N
        tl.store(to + at, total.to(incoming.dtype.element_ty), mask=mask)
        notify(signals + me * tiles + tile_m * tiles_n + ticket % tiles_n, step, owner, team, HIP)
    else:
        tile = ticket - ranks(team) * tiles
        at, mask = at_tile(tile // tiles_n * BLOCK_M, column, rows, N, BLOCK_M, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for source in range(ranks(team)):  # by number, as they come: sums are the same every time
            wait(signals + source * tiles + tile, step, team)
            part = incoming + (source * rows).to(tl.int64) * N
            total += tl.load(part + at, mask=mask).to(tl.float32)
        tl.store(y + at, total.to(y.dtype.element_ty), mask=mask)


def _pieces(pieces: Sequence[Piece], of_each: int, device: torch.device) -> Tensor:
    numbers = [peer * of_each + piece for peer, piece in pieces]
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def _tickets(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


class WaitingProduct:
    """Y = X · W, X [ranks × rows, K] in symmetric memory, as its rows come.

    Args:
        lanes: chunks that it puts at a time; 0 where the host brings them and sets the signals.
    """

    def __init__(
        self,
        order: Order,
        rank: int,
        ranks: int,
        rows: int,
        *,
        rows_per_chunk: int,
        lanes: int,
        device: torch.device,
        blocks: Blocks | None = None,
    ) -> None:
        self.blocks = blocks or Blocks.of(device)
        self.rows, self.rows_per_chunk, self.lanes = rows, rows_per_chunk, lanes
        chunks, tiles = triton.cdiv(rows, rows_per_chunk), triton.cdiv(rows, self.blocks.m)
        self.sends = _pieces(turns(order, rank, ranks, chunks), chunks, device)
        self.visits = _pieces(visits(order, rank, ranks, tiles, own_first=True), tiles, device)

    def __call__(
        self, team: Tensor, x: Tensor, signals: Tensor, w: Tensor, y: Tensor, step: int
    ) -> Tensor:
        """Launch it; W [K, N] and Y [ranks × rows, N] are contiguous."""
        (k, n), blocks = w.shape, self.blocks
        tiles = len(self.visits) * triton.cdiv(n, blocks.n)
        gather_matmul_kernel[(self.lanes + tiles,)](
            team,
            _tickets(w.device),
            x,
            signals,
            w,
            y,
            self.sends,
            self.visits,
            len(self.sends),
            self.rows,
            n,
            k,
            self.rows_per_chunk,
            step,
            LANES=self.lanes,
            ELEMENTS=ELEMENTS,
            BLOCK_M=blocks.m,
            BLOCK_N=blocks.n,
            BLOCK_K=blocks.k,
            HIP=HIP,
        )
        return y


class GatherProduct:
    """Y = all_gather(X) · W in one kernel, X [rows, K] of each rank."""

    def __init__(
        self,
        order: Order,
        shard: Tensor,
        *,
        rows_per_chunk: int,
        blocks: Blocks | None = None,
    ) -> None:
        rows, device, of = len(shard), shard.device, dist.get_world_size()
        buffer = Place((of, *shard.shape), shard.dtype)
        chunks = triton.cdiv(rows, rows_per_chunk)
        self.memory = SymmetricMemory("all_gather_matmul", device, {"x": buffer}, signals=chunks)
        self.product = WaitingProduct(
            order,
            self.memory.rank,
            of,
            rows,
            rows_per_chunk=rows_per_chunk,
            lanes=max(of - 1, 1),
            device=device,
            blocks=blocks,
        )

    def __call__(self, shard: Tensor, w: Tensor, y: Tensor) -> Tensor:
        """Multiply all ranks' rows by W into Y [ranks × rows, N]."""
        memory = self.memory
        with memory.next_step() as step:
            memory["x"][memory.rank].copy_(shard)
            self.product(memory.team, memory["x"], memory.signals, w, y, step)
        return y


class ProductScatter:
    """Y = reduce_scatter(X · W) in one kernel, X [ranks × rows, K] and W [K, N] of each rank."""

    def __init__(self, order: Order, y: Tensor, *, blocks: Blocks | None = None) -> None:
        (rows, n), device, of = y.shape, y.device, dist.get_world_size()
        self.blocks = blocks or Blocks.of(device)
        row_tiles = triton.cdiv(rows, self.blocks.m)
        self.tiles = row_tiles * triton.cdiv(n, self.blocks.n)
        places = {"incoming": Place((of, rows, n), y.dtype)}
        self.memory = SymmetricMemory("matmul_reduce_scatter", device, places, signals=self.tiles)
        order_of_tiles = visits(order, self.memory.rank, of, row_tiles, own_first=False)
        self.visits = _pieces(order_of_tiles, row_tiles, device)

    def __call__(self, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        """Multiply X by W, and add all ranks' own rows of it into Y [rows, N]."""
        memory, blocks, (k, n) = self.memory, self.blocks, w.shape
        with memory.next_step() as step:
            matmul_scatter_kernel[((memory.ranks + 1) * self.tiles,)](
                memory.team,
                _tickets(y.device),
                memory["incoming"],
                memory.signals,
                x,
                w,
                y,
                self.visits,
                len(y),
                n,
                k,
                step,
                BLOCK_M=blocks.m,
                BLOCK_N=blocks.n,
                BLOCK_K=blocks.k,
                HIP=HIP,
            )
        return y
