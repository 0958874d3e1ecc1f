"""Primitives of Triton-distributed (arXiv 2504.19442) in plain Triton: put, get, notify, wait.

Every rank allocates the same places of symmetric memory (`workloads.symmetric`). A kernel is given
``team``, int64 on the device:

    [0]      this rank
    [1]      number of ranks
    [2]      address of two int32 of this rank: stop, raised by the host, and cut short, its answer
    [3 + r]  address of rank r's symmetric memory, in this process

A signal is an int32 in symmetric memory, 0 at first. It holds the step whose data have come, is
written by one program of one rank and never reset: a wait for step 7 cannot take step 6 for it.
Steps are compared by their difference, so that they may pass 2³¹.

They run on CUDA, HIP and, with ``TRITON_INTERPRET=1``, between processes on CPUs.
"""

# Pointers and sizes of a kernel are Triton's to type.
# ruff: noqa: ANN001, ANN201
from __future__ import annotations

import triton
import triton.language as tl


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
def get(target, place, offset, count, peer, team, BLOCK: tl.constexpr):
    """Copy ``count`` elements from ``place + offset`` in another rank's memory, behind a wait."""
    source = symm_at(place, peer, team) + offset
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)
