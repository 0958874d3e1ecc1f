"""Estimates of memory against what PyTorch's trackers, and real training on this machine, peak at.

    python -m benchmarks.memory                       # all of it: about 7 minutes of two cores
    python -m benchmarks.memory --tracked 40 --seed 7 # more random models under fake tensors
    python -m benchmarks.memory --real                # only real runs, two ranks over gloo
    python -m benchmarks.memory --experts             # mixtures of experts, tracked and real
    python -m benchmarks.memory --docs docs/concepts/estimates/memory.md   # writes its tables

Tracked: random models (width, depth, heads, vocabulary, batch, sequence) under fake tensors, each
with a random strategy that MemTracker or FSDPMemTracker follows. Real: random models trained by two
processes, each strategy of them, where every allocation counts; the highest of the ranks is
compared. Prints each error; exit code 1 when one is beyond 5 %.

Terms of tensor parallelism, FSDP1 with checkpointing and DeepSpeed were found from errors of cases
drawn here, with seeds 1, 2, 11 and 21. The default seed was first drawn when the estimate was done:
its cases are held out, and so are those of any other seed.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._memory_shapes import architecture
from benchmarks.headlines import filled
from chopper import wording as fmt
from chopper.analyzers.estimates.memory import memory
from chopper.analyzers.estimates.training import Training

LIMIT = 0.05
RANKS = 2
BUCKETS_COUNT = (100_000, 1_000_000)
"""Elements of DeepSpeed's bucket: less and more than a weight; its default of 5e8 would be all that
there is to see."""
REAL = (
    ("ddp", "ddp", ("fp32", "autocast")),
    ("zero1-torch", "zero1-torch", ("fp32",)),
    ("fsdp1", "fsdp1", ("fp32", "mixed")),
    ("fsdp2", "fsdp2", ("fp32", "mixed")),
    ("deepspeed1", "zero1", ("fp32", "mixed", "mixed-fp32-grads")),
    ("deepspeed2", "zero2", ("fp32", "mixed", "mixed-fp32-grads")),
    ("deepspeed3", "zero3", ("fp32", "mixed", "mixed-fp32-grads")),
    ("tp", "tp", ("bf16", "fp32")),
    ("tp-sp", "tp-sp", ("bf16", "fp32")),
    ("tp-gathered", "tp-gathered", ("bf16", "fp32")),
)
"""How it is run, what the estimate calls it, and number formats that it takes here."""


def model(rng: random.Random, *, small: bool) -> dict[str, int]:
    """Shapes that neither the tests nor the estimate know."""
    head = rng.choice((32, 64))
    kv = rng.choice((1, 2, 4))
    heads = kv * rng.choice((1, 2, 4))
    while not (256 if small else 512) <= heads * head <= (640 if small else 4096):
        kv, heads = rng.choice((1, 2, 4, 8)), rng.choice((4, 6, 8, 12, 16, 24, 32))
        kv = max(k for k in (1, 2, 3, 4, 8) if heads % k == 0 and k <= kv)
    return {
        "dim": heads * head,
        "layer_count": rng.randint(2, 5 if small else 10),
        "head_count": heads,
        "kv_head_count": kv,
        "ffn_dim": 64 * rng.randint(8, 24 if small else 160),
        "vocabulary": rng.choice((512, 2048, 4096) if small else (64, 5000, 32000, 100_000)),
    }


def experts(rng: random.Random, layers: int, *, small: bool) -> dict[str, int]:
    """Experts, how many of them each token chooses, and the first layer that has some."""
    return {
        "count": rng.choice((4, 8, 16)),
        "chosen": rng.choice((1, 2, 4)),
        "width": 32 * rng.randint(4, 12 if small else 48),
        "shared": rng.choice((0, 256)),
        "first": rng.choice((0, 0, 1)) if layers > 2 else 0,
    }


def tracked_cases(count: int, rng: random.Random) -> dict[str, dict[str, Any]]:
    """Random models, each with a strategy that a tracker follows, in turn."""
    kinds = (
        ("single", ("bf16", "fp32", "autocast")),
        ("fsdp2", ("mixed", "fp32")),
        ("tp", ("bf16", "fp32")),
        ("tp-sp", ("bf16", "fp32")),
        ("tp-gathered", ("bf16", "fp32")),
    )
    found = {}
    for i in range(count):
        strategy, precisions = kinds[i % len(kinds)]
        parallel = strategy.startswith("tp")
        of = model(rng, small=False)
        while parallel and (of["kv_head_count"] % 4 or of["vocabulary"] % 4):
            of = model(rng, small=False)
        case = {
            "model": of,
            "strategy": strategy,
            "ranks": 4,
            "batch": rng.choice((1, 2, 3, 4, 8)),
            "sequence": rng.choice((256, 384, 1024, 2048)),
            "precision": rng.choice(precisions),
            "checkpoint": "none" if parallel else rng.choice(("none", "full", "selective")),
            "optimizer": rng.choice(("loop", "sgd"))
            if parallel
            else rng.choice(("loop", "foreach")),
        }
        found[name_of(case)] = case
    return found


EXPERTS_TRACKED = (
    ("single", "bf16", "none"),
    ("single", "bf16", "full"),
    ("single", "fp32", "none"),
    ("fsdp2", "mixed", "none"),
    ("fsdp2", "fp32", "full"),
)
EXPERTS_REAL = (
    ("ddp", "fp32", "none", 1),
    ("ddp", "fp32", "full", 1),
    ("fsdp1", "fp32", "none", 1),
    ("fsdp2", "fp32", "none", 1),
    ("fsdp2", "mixed", "full", 1),
    ("ddp", "fp32", "none", RANKS),
    ("ddp", "fp32", "full", RANKS),
    ("fsdp2", "fp32", "none", RANKS),
    ("fsdp2", "mixed", "full", RANKS),
)
"""Strategy, number format, checkpointing, and ranks over which experts are cut."""


def expert_cases(
    each: int, rng: random.Random
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Random mixtures of experts for a tracker, and for real runs."""
    tracked, real = {}, {}
    for _ in range(each):
        for strategy, precision, checkpoint in EXPERTS_TRACKED:
            of = model(rng, small=False)
            case = {
                "model": of,
                "experts": experts(rng, of["layer_count"], small=False),
                "strategy": strategy,
                "ranks": 4,
                "batch": rng.choice((1, 2, 4)),
                "sequence": rng.choice((256, 384, 1024)),
                "precision": precision,
                "checkpoint": checkpoint,
                "optimizer": "loop",
            }
            tracked[name_of(case)] = case
        for strategy, precision, checkpoint, ep in EXPERTS_REAL:
            of = model(rng, small=True)
            case = {
                "model": of,
                "experts": {**experts(rng, of["layer_count"], small=True), "ep": ep},
                "strategy": strategy,
                "ranks": RANKS,
                "batch": rng.choice((2, 4)),
                "sequence": rng.choice((256, 512)),
                "precision": precision,
                "checkpoint": checkpoint,
                "bucket_views": False,
                "bucket_count": BUCKETS_COUNT[0],
            }
            real[name_of(case)] = case
    return tracked, real


def real_cases(per_strategy: int, rng: random.Random) -> dict[str, dict[str, Any]]:
    """Random small models, each strategy and number format of `REAL`."""
    found = {}
    for strategy, _, precisions in REAL:
        for i in range(per_strategy):
            for precision in precisions:
                of = model(rng, small=True)
                parallel = strategy.startswith("tp")
                while parallel and of["kv_head_count"] % RANKS:
                    of = model(rng, small=True)
                case = {
                    "model": of,
                    "strategy": strategy,
                    "ranks": RANKS,
                    "batch": rng.choice((2, 4)),
                    "sequence": rng.choice((256, 512)),
                    "precision": precision,
                    "checkpoint": "none" if parallel else ("none", "full")[i % 2],
                    "bucket_views": False,
                    "bucket_count": rng.choice(BUCKETS_COUNT),
                }
                found[name_of(case)] = case
    return found


def name_of(case: dict[str, Any]) -> str:
    of = case["model"]
    return (
        f"{case['strategy']} {case['precision']} {case['checkpoint']}: {of['layer_count']} × "
        f"{of['dim']}, {of['head_count']}/{of['kv_head_count']} heads, ffn {of['ffn_dim']}, "
        f"vocabulary {of['vocabulary']}, {case['batch']} × {case['sequence']}{_experts_of(case)}"
    )


def _experts_of(case: dict[str, Any]) -> str:
    of = case.get("experts")
    if not of:
        return ""
    cut = f" over {of['ep']}" if of.get("ep", 1) > 1 else ""
    shared = f", shared {of['shared']}" if of["shared"] else ""
    first = f", from layer {of['first']}" if of["first"] else ""
    return f", {of['chosen']} of {of['count']} experts of {of['width']}{cut}{shared}{first}"


def estimated(case: dict[str, Any]) -> int:
    """What the estimate says of a case."""
    strategy = {run: name for run, name, _ in REAL}.get(case["strategy"], case["strategy"])
    parallel = strategy.startswith("tp")
    optimizer = case.get("optimizer", "loop")
    single = strategy == "single" or parallel
    return memory(
        Training(
            architecture=architecture(case["model"], case.get("experts")),
            expert_parallel_count=(case.get("experts") or {}).get("ep", 1),
            batch_count=case["batch"],
            sequence_count=case["sequence"],
            strategy="single" if parallel else strategy,
            ranks_count=1 if single else case["ranks"],
            tensor_parallel_count=case["ranks"] if parallel else 1,
            sequence_parallel=strategy == "tp-sp",
            gathers_logits=strategy == "tp-gathered",
            checkpoint=case["checkpoint"],
            precision=case["precision"],
            optimizer="sgd" if optimizer == "sgd" else "adamw",
            optimizer_kind="foreach" if optimizer == "foreach" else "loop",
            kernels="cpu",
            fragmentation_ratio=0,
            bucket_count=case.get("bucket_count", BUCKETS_COUNT[0]),
        )
    ).allocated_bytes


def track(cases: dict[str, dict[str, Any]], *, unmodified: bool) -> dict[str, int | str]:
    """Peaks under fake tensors, of a program of its own."""
    words = ["--unmodified"] if unmodified else []
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks._memory_track", json.dumps(cases), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found: dict[str, int | str] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(cases: dict[str, dict[str, Any]]) -> dict[str, int | str]:
    """Highest peak of the ranks of real runs: ranks differ where they own different parts."""
    with tempfile.TemporaryDirectory() as folder:
        requests = [
            {"rank": r, "ranks": RANKS, "store": str(Path(folder) / "store"), "cases": cases}
            for r in range(RANKS)
        ]
        programs = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks._memory_run", json.dumps(request)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for request in requests
        ]
        said = [program.communicate() for program in programs]
    for program, (_, errors) in zip(programs, said, strict=True):
        if program.returncode:
            raise SystemExit(errors[-2000:])
    by_rank = [json.loads(out.splitlines()[-1]) for out, _ in said]
    return {
        name: value if isinstance(value, str) else max(of[name] for of in by_rank)
        for name, value in by_rank[0].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tracked", type=int, default=25, help="random models under fake tensors")
    parser.add_argument("--real", action="store_true", help="only real runs")
    parser.add_argument("--experts", action="store_true", help="only mixtures of experts")
    parser.add_argument("--models", type=int, default=2, help="real models per strategy")
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument(
        "--unmodified", action="store_true", help="MemTracker counts DTensor's shapes, as it is"
    )
    parser.add_argument("--docs", type=Path, help="page whose tables are written")
    parser.add_argument("--json", action="store_true", dest="as_json")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    parts = []
    if args.experts:
        tracked, cases = expert_cases(args.models, rng)
        parts.append(
            ("tracked under fake tensors", tracked, track(tracked, unmodified=args.unmodified))
        )
    elif not args.real:
        cases = tracked_cases(args.tracked, rng)
        parts.append(
            ("tracked under fake tensors", cases, track(cases, unmodified=args.unmodified))
        )
    if not args.experts:
        cases = real_cases(args.models, rng)
    parts.append((f"real, {RANKS} ranks over gloo, highest of the ranks", cases, run(cases)))
    rows = []
    errors: Errors = {}
    for title, of, found in parts:
        if not args.as_json:
            print(f"{title}\n{'measured':>12} {'estimate':>12}   error  case")
        for name, measured in found.items():
            if isinstance(measured, str):
                print(f"{'–':>12} {'–':>12}       –  {name}: {measured}", file=sys.stderr)
                continue
            expected = estimated(of[name])
            error = expected / measured - 1
            rows.append({"case": name, "measured_bytes": measured, "error_ratio": error})
            errors.setdefault((title, group(of[name])), []).append((measured, error))
            if not args.as_json:
                print(
                    f"{measured / 2**20:8.1f} MiB {expected / 2**20:8.1f} MiB  {error:+6.1%}  "
                    f"{name}"
                )
    absolute = [abs(error) for cases_errors in errors.values() for _, error in cases_errors]
    beyond = sum(error > LIMIT for error in absolute)
    said = (
        f"{len(absolute)} cases, mean {fmt.percent(sum(absolute) / len(absolute), '.1f')}, "
        f"largest {fmt.percent(max(absolute), '.1f')}, beyond {fmt.percent(LIMIT, '.0f')}: {beyond}"
    )
    print(json.dumps(rows) if args.as_json else said)
    if args.docs is not None:
        words = "--experts " if args.experts else ""
        command = f"python -m benchmarks.memory {words}--seed {args.seed}"
        lines = [f"`{command}`: {said}.", "", *tables(errors)]
        mark = "benchmarks.memory --experts" if args.experts else "benchmarks.memory"
        args.docs.write_text(filled(args.docs.read_text(), mark, lines))
    raise SystemExit(1 if beyond else 0)


Errors = dict[tuple[str, str], list[tuple[int, float]]]
"""By part and group: measured bytes, and the estimate's error."""


def group(case: dict[str, Any]) -> str:
    """Cases of one row of the page."""
    checkpoint = "no" if case["checkpoint"] == "none" else case["checkpoint"]
    cut = (case.get("experts") or {}).get("ep", 1)
    with_cut = f" with `--ep {cut}`" if cut > 1 else ""
    return f"`{case['strategy']}`{with_cut}, {checkpoint} checkpointing"


def tables(errors: Errors) -> list[str]:
    """Lines of the page: each part's strategies, with the span of their errors."""
    lines = []
    for title in dict.fromkeys(title for title, _ in errors):
        of = {name: found for (part, name), found in errors.items() if part == title}
        sizes = [size / 2**20 for found in of.values() for size, _ in found]
        lines += [
            (
                f"| {title}; {min(sizes):,.0f} to {max(sizes):,.0f} MiB "
                "| cases | errors | beyond 5 % |"
            ),
            "|---|---:|---|---:|",
        ]
        for name, found in of.items():
            ratios = [error for _, error in found]
            span = " … ".join(
                dict.fromkeys(f"{ratio * 100:+.1f} %" for ratio in (min(ratios), max(ratios)))
            ).replace("-", "−")
            beyond = sum(abs(ratio) > LIMIT for ratio in ratios)
            lines.append(f"| {name} | {len(found)} | {span} | {beyond} |")
        lines.append("")
    return lines


if __name__ == "__main__":
    main()
