"""The kernels on symmetric memory, compiled ahead of time for GPUs that are not here.

Between two GPUs only acquire and release at the scope of the system order data and signal, and no
test in an interpreter on one host can miss them: they are looked for in the compiled result.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence

import pytest

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")
CONSTANTS = {
    "LANES": 7,
    "ELEMENTS": 1024,
    "BLOCK_M": 64,
    "BLOCK_N": 64,
    "BLOCK_K": 32,
}
POINTERS = {
    "team": "i64",
    "x w y incoming": "bf16",
    "tickets signals sends order": "i32",
}
"""Names of arguments that point to something, in any kernel, and to what."""


def compiled(name: str, target: str, **changed: object) -> str:
    """Compile a kernel of `workloads.tiles` for a target, and return its assembly."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from chopper.workloads import tiles

    kernel, hip = getattr(tiles, name), target.startswith("gfx")
    constants = {**CONSTANTS, "HIP": hip, **changed}
    pointers = {n: of for names, of in POINTERS.items() for n in names.split()}
    signature, given, aligned = {}, {}, {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], given[place,] = "constexpr", constants[argument]
        elif argument in pointers:
            signature[argument], aligned[place,] = f"*{pointers[argument]}", 16
        else:
            signature[argument] = "i32"
            if argument in ("N", "K"):
                aligned[place,] = 16
    attributes = {place: [["tt.divisibility", by]] for place, by in aligned.items()}
    source = ASTSource(kernel, signature=signature, constexprs=given, attrs=attributes)
    arch = GPUTarget("hip", target, 64) if hip else GPUTarget("cuda", int(target[3:]), 32)
    # Said, because Triton 3.9 warns of another default to come.
    made = triton.compile(source, target=arch, options={"enable_fp_fusion": True})
    assert made.asm["hsaco" if hip else "cubin"][:4] == b"\x7fELF"
    return str(made.asm["amdgcn" if hip else "ptx"])


@pytest.fixture(scope="session")
def assembly(tmp_path_factory) -> Iterator[dict[tuple[str, str], str]]:
    """What has been compiled in this session, by kernel and target."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield {}


KERNELS = ("gather_matmul_kernel", "matmul_scatter_kernel")


class Program:
    """Instructions of a kernel, and which may come before and after each."""

    def __init__(self, assembly: str) -> None:
        self.lines: list[str] = []
        labels, jumps, ends = {}, {}, set()
        for line in assembly.splitlines():
            text = re.sub(r"(//|;).*", "", line).strip()
            if label := re.fullmatch(r"([.$]L\w+):", text):
                labels[label[1]] = len(self.lines)
            elif text and text[0] not in ".{}$" and text[-1] != ":":
                if jump := re.fullmatch(
                    r"(@\S+ )?(bra|s_c?branch)\S* ([.$]L\w+)", text.rstrip(";")
                ):
                    jumps[len(self.lines)] = jump[3]
                    if not jump[1] and jump[2] != "s_cbranch":
                        ends.add(len(self.lines))
                elif text in ("ret", "s_endpgm"):
                    ends.add(len(self.lines))
                self.lines.append(re.sub(r"^@!?%p\d+ ", "", text))
        after = {i: [i + 1] for i in range(len(self.lines) - 1) if i not in ends}
        for i, target in jumps.items():
            after.setdefault(i, []).append(labels[target])
        before: dict[int, list[int]] = {}
        for i, successors in after.items():
            for successor in successors:
                before.setdefault(successor, []).append(i)
        self.next = {"acquire": after, "release": before}

    def fault(self, start: int, what: str, wanted: Sequence[str], never: str) -> str | None:
        """Say what is reached on any way from a signal before all that is wanted; else None.

        An acquire is followed forwards, a release backwards.
        """
        todo, seen = [(i, 0) for i in self.next[what].get(start, [])], set()
        while todo:
            i, stage = todo.pop()
            if re.match(never, self.lines[i]):
                return f"{what}: no {wanted[stage]} before {self.lines[i]}"
            stage += bool(re.match(wanted[stage], self.lines[i]))
            if stage < len(wanted) and (i, stage) not in seen:
                seen.add((i, stage))
                todo += [(n, stage) for n in self.next[what].get(i, [])]
        return None


PTX = {
    # One thread sets the signal, so a barrier lies between all threads' stores and its release.
    "release": (r"atom\.global\.sys\.release\.exch", (r"bar\.sync",), r"st\.global|cp\.async"),
    # One thread has polled, so a barrier lies between its acquire and all threads' loads.
    "acquire": (
        r"(ld\.global\.sys\.acquire|atom\.global\.sys\.acquire)",
        (r"bar\.sync",),
        r"ld\.global\.(?!sys)|ld\.volatile|cp\.async",
    ),
}
GCN = {
    # Backwards: the second-level cache is written back before the signal, each wave's own stores
    # have arrived before the barrier.
    "release": (
        r"global_atomic_swap .*\bsc1",
        (r"s_waitcnt vmcnt\(0\)", r"buffer_wbl2 sc0 sc1", r"s_barrier", r"s_waitcnt vmcnt\(0\)"),
        r"(global|buffer|flat)_store",
    ),
    # Caches forget what they had before the barrier behind which all waves load.
    "acquire": (
        r"global_atomic_add .*\bsc0 sc1",
        (r"s_waitcnt vmcnt\(0\)", r"buffer_inv sc0 sc1", r"s_barrier"),
        r"(global|buffer|flat)_load",
    ),
}


def faults(assembly: str, target: str) -> list[str]:
    """Return what is missing of the order between data and signals."""
    program, found = Program(assembly), []
    for what, (signal, wanted, never) in (GCN if target.startswith("gfx") else PTX).items():
        places = [i for i, line in enumerate(program.lines) if re.match(signal, line)]
        if not places:
            found.append(f"{what}: none")
        found += [fault for i in places if (fault := program.fault(i, what, wanted, never))]
    # Neither the cache of read-only data nor that of scalars is renewed by acquire: the second may
    # hold the kernel's arguments, as what is loaded first is one.
    bases = [re.sub(r"s_load\w+ \S+ (\S+), .*", r"\1", line) for line in program.lines]
    arguments = next((base for base in bases if base.startswith("s[")), "none")
    wrong = rf"ld\.global\.nc|s_buffer_load|s_load_\w+ \S+ (?!{re.escape(arguments)})"
    return found + [f"stale: {line}" for line in program.lines if re.match(wrong, line)]


BREAKS = {
    "sm_90": (
        (r"sys\.release", "gpu.release", "release: none"),
        (r"sys\.acquire", "gpu.relaxed", "acquire: none"),
        (r"bar\.sync", "nop", r"release: no bar\.sync before st.global"),
        (r"bar\.sync", "nop", r"acquire: no bar\.sync before ld.global"),
        (r"ld\.global\.b32", "ld.global.nc.b32", "stale"),
    ),
    "gfx942": (
        (r"buffer_wbl2 sc0 sc1", "buffer_wbl2 sc1", "release: no buffer_wbl2"),
        (r"buffer_inv sc0 sc1", "", "acquire: no buffer_inv"),
        (r"s_barrier", "s_nop 0", "release: no s_barrier before global_store"),
        (r"s_barrier", "s_nop 0", "acquire: no s_barrier before global_load"),
        (r"s_load_dwordx4 (\S+) s\[0:1\]", r"s_load_dwordx4 \1 s[8:9]", "stale"),
    ),
}


@pytest.mark.parametrize(
    "target", [t if t in BREAKS else pytest.param(t, marks=pytest.mark.long) for t in TARGETS]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_signals_release_what_was_stored_and_acquire_what_is_read(kernel, target, assembly):
    text = assembly[kernel, target] = compiled(kernel, target)
    assert faults(text, target) == []


@pytest.mark.parametrize(
    ("target", "taken", "put", "fault"),
    [(target, *broken) for target, all_of in BREAKS.items() for broken in all_of],
)
def test_what_lacks_an_instruction_is_found(target, taken, put, fault, assembly):
    kernel = "matmul_scatter_kernel"
    if (kernel, target) not in assembly:
        assembly[kernel, target] = compiled(kernel, target)
    broken, count = re.subn(taken, put, assembly[kernel, target])
    assert count
    assert any(found.startswith(fault) for found in faults(broken, target))


def test_on_amd_a_notify_that_does_not_await_each_waves_stores_is_found(assembly):
    found = faults(compiled("matmul_scatter_kernel", "gfx942", HIP=False), "gfx942")
    assert len(found) == 1
    assert found[0].startswith("release: no s_waitcnt vmcnt\\(0\\) before global_store")
