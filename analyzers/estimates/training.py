"""The options of a memory estimate, and bytes per parameter."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import msgspec

from chopper.analyzers.estimates import Option
from chopper.errors import UsageError
from chopper.models.architectures import Architecture
from chopper.quantities import one_of

Strategy = Literal["single", "ddp", "zero1", "zero1-torch", "zero2", "zero3", "fsdp1", "fsdp2"]
Checkpoint = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "parameters", "activations"]
Precision = Literal["bf16", "fp32", "autocast", "mixed", "mixed-fp32-grads"]

SHARDS_PARAMETERS = frozenset(("zero3", "fsdp1", "fsdp2"))
SHARDS_GRADIENTS = SHARDS_PARAMETERS | {"zero2"}
SHARDS_OPTIMIZER = SHARDS_GRADIENTS | {"zero1", "zero1-torch"}
HAS_BUCKETS = frozenset(("ddp", "zero1-torch"))
DEEPSPEED = frozenset(("zero1", "zero2", "zero3"))
FSDP = frozenset(("fsdp1", "fsdp2"))
_MOST_RANKS = 10**7


class Training(msgspec.Struct, kw_only=True, frozen=True):
    """One step of training, as far as memory depends on it; annotated fields are options."""

    architecture: Architecture
    batch_count: Annotated[int, Option("Sequences per rank.")] = 1
    sequence_count: Annotated[int, Option("Tokens per sequence.")] = 2048
    strategy: Annotated[
        Strategy,
        Option("single, ddp, zero1, zero2, zero3 (DeepSpeed), zero1-torch, fsdp1 or fsdp2."),
    ] = "single"
    ranks_count: Annotated[int, Option("Data-parallel ranks.")] = 1
    tensor_parallel_count: Annotated[int, Option("Tensor-parallel ranks.", "tp")] = 1
    sequence_parallel: Annotated[bool, Option("Sequence parallelism with --tp.", "sp")] = False
    expert_parallel_count: Annotated[
        int, Option("Expert-parallel ranks, out of --ranks: each holds part of the experts.", "ep")
    ] = 1
    imbalance_ratio: Annotated[
        float, Option("Load of the busiest rank's experts, relative to an even share.")
    ] = 1.0
    checkpoint: Annotated[
        Checkpoint,
        Option("Recomputation: none, selective (every other product kept) or full."),
    ] = "none"
    precision: Annotated[
        Precision,
        Option(
            "bf16, fp32, autocast, mixed, or mixed-fp32-grads.  [default: mixed; of a module bf16]"
        ),
    ] = "mixed"
    optimizer: Annotated[Literal["adamw", "sgd"], Option("adamw or sgd.")] = "adamw"
    optimizer_kind: Annotated[
        Literal["fused", "foreach", "loop"],
        Option("How the update runs (fused, foreach, loop); foreach holds a temporary copy."),
    ] = "fused"
    offload: Annotated[
        tuple[Offload, ...],
        Option(
            "optimizer, parameters or activations on the host; may be repeated.", metavar="WHAT"
        ),
    ] = ()
    loss: Annotated[
        Literal["native", "fp32", "chunked"],
        Option("Cross-entropy in native precision, fp32, or chunked (8 parts, fp32)."),
    ] = "fp32"
    attention: Annotated[
        Literal["flash", "math"], Option("flash (fused) or math (with its matrix of scores).")
    ] = "flash"
    kernels: Annotated[
        Literal["gpu", "cpu"],
        Option("Operators of a gpu, or of a cpu, where norms and dropout keep more."),
    ] = "gpu"
    gathers_logits: Annotated[
        bool,
        Option(
            "With --tp: each rank gathers all logits for its loss, as without loss_parallel().",
            "gathered-logits",
        ),
    ] = False
    keeps_logits: Annotated[
        bool, Option("The program keeps its logits until after the backward pass.")
    ] = False
    fragmentation_ratio: Annotated[
        float,
        Option("Fragmentation: share of temporary memory that the allocator holds in addition."),
    ] = 0.15
    workspace_bytes: Annotated[int, Option("Memory of libraries and the context, per rank.")] = 0
    bucket_count: Annotated[int, Option("DeepSpeed's reduce_bucket_size.", metavar="ELEMENTS")] = (
        500_000_000
    )

    def __post_init__(self) -> None:
        """Refuse values that are not positive, unknown or contradictory."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name.endswith("_count") and value < 1:
                what = name.removesuffix("_count").replace("_", " ")
                raise UsageError(f"{what}: found {value}, expected 1 or more")
        for name, choices in _choices().items():
            value = getattr(self, name)
            for each in value if name == "offload" else (value,):
                what = name.replace("_", " ")
                if one_of(what, each, choices) != each:
                    raise UsageError(f"{what} {each!r}: expected one of {', '.join(choices)}")
        for wrong, text in (*self._contradictions(), *self._contradictions_of_experts()):
            if wrong:
                raise UsageError(text)

    @property
    def tokens_count(self) -> int:
        """Tokens of a rank."""
        return self.batch_count * self.sequence_count

    @property
    def autocast(self) -> bool:
        """Products run in a narrower type than their weights, each on a copy of its own."""
        return self.precision == "autocast"

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        """Yield (whether the options contradict each other, the message)."""
        a, tp, kv = self.architecture, self.tensor_parallel_count, self.architecture.kv_heads_count
        fsdp = self.strategy in FSDP
        yield (
            self.strategy == "single" and self.ranks_count > 1,
            f"strategy single has 1 rank, found {self.ranks_count}; "
            "choose ddp, zero1, zero2, zero3, fsdp1 or fsdp2",
        )
        yield (
            self.gathers_logits and tp == 1,
            "logits are whole without tensor parallelism; there is nothing to gather",
        )
        yield (
            self.sequence_parallel and tp == 1,
            "sequence parallelism needs tensor parallelism of 2 or more",
        )
        yield (
            a.heads_count % tp > 0,
            f"tensor parallelism {tp} does not divide {a.name}'s {a.heads_count} heads",
        )
        yield (
            kv % tp > 0 and tp % kv > 0,
            f"tensor parallelism {tp} neither divides {a.name}'s {kv} key and value heads nor "
            "is a multiple of them",
        )
        yield (
            self.ranks_count > _MOST_RANKS,
            f"ranks: found {self.ranks_count}, expected at most {_MOST_RANKS}",
        )
        moved = ", ".join(part for part in self.offload if part != "none")
        yield (
            "none" in self.offload and len(self.offload) > 1,
            f"offload none contradicts {moved}; give one of them",
        )
        positions = a.positions_count - a.positions_unused_count
        yield (
            a.positions_count > 0 and positions < self.sequence_count,
            f"sequence: found {self.sequence_count}, but {a.name} has {positions} positions",
        )
        yield (
            "parameters" in self.offload and self.strategy not in SHARDS_PARAMETERS,
            f"offload of parameters needs a strategy that shards them, found {self.strategy}; "
            "choose zero3, fsdp1 or fsdp2",
        )
        yield (
            fsdp and self.precision == "mixed-fp32-grads",
            f"precision mixed-fp32-grads is DeepSpeed's; {self.strategy} has mixed",
        )
        yield (
            fsdp and self.precision == "autocast",
            f"precision autocast contradicts {self.strategy}; it has mixed",
        )
        yield (
            self.optimizer == "sgd" and self.precision.startswith("mixed") and not fsdp,
            "optimizer sgd with a master copy is not modelled; choose bf16 or fp32",
        )
        yield (
            not 0 <= self.fragmentation_ratio < 1,
            f"fragmentation: found {self.fragmentation_ratio:g}, expected 0 to 1",
        )

    def _contradictions_of_experts(self) -> Iterator[tuple[bool, str]]:
        a, ep = self.architecture, self.expert_parallel_count
        count = a.experts.count if a.experts is not None else 0
        yield (
            count > 0 and self.precision == "autocast",
            f"precision autocast is not modelled for experts ({a.name}): grouped products take "
            "no part in it; choose mixed, bf16 or fp32",
        )
        yield (
            ep == 1 and self.imbalance_ratio != 1,
            f"imbalance {self.imbalance_ratio:g} needs expert parallelism: a rank with all "
            "experts gets all rows, whatever the routing",
        )
        yield (
            not 1 <= self.imbalance_ratio <= ep,
            f"imbalance: found {self.imbalance_ratio:g}, expected 1 (balanced) to {ep} (all "
            f"rows to one of {ep} expert-parallel ranks)",
        )
        yield ep > 1 and not count, f"expert parallelism {ep}: {a.name} has no experts"
        yield (
            count % ep > 0 or self.ranks_count % ep > 0,
            f"expert parallelism {ep} must divide {a.name}'s {count} experts and the "
            f"{self.ranks_count} data-parallel ranks, of which it takes its own",
        )
        yield (
            ep > 1 and self.strategy in DEEPSPEED,
            f"expert parallelism contradicts {self.strategy}: DeepSpeed's own layers of experts "
            "are not modelled; choose ddp, zero1-torch, fsdp1 or fsdp2",
        )


@cache
def _choices() -> dict[str, tuple[str, ...]]:
    """Return the words that each option takes, by its annotation."""
    choices = {}
    for name, annotation in get_type_hints(Training).items():
        for of in (annotation, *get_args(annotation)):
            if get_origin(of) is Literal:
                choices[name] = get_args(of)
    return choices


class Widths(msgspec.Struct, kw_only=True, frozen=True):
    """Bytes of one parameter's state: weight, gradient, master copy, moments."""

    weight: int
    gradient: int
    master: int
    moments: int
    compute: int
    reduce: int
    accumulated: int = 0
    """Of a gradient in another type, into which it is added."""

    @property
    def total(self) -> int:
        """Bytes of one parameter with all of its states."""
        return self.weight + self.gradient + self.accumulated + self.master + self.moments


def widths(training: Training) -> Widths:
    """Bytes per parameter of each state.

    Pure bf16 AdamW 8, fp32 and autocast 16 (DeepSpeed 20), mixed with a master copy 16 (FSDP: the
    float32 shard is the master), DeepSpeed with float32 gradients 20.
    """
    moments = 2 if training.optimizer == "adamw" else 0
    if training.precision == "bf16":
        return Widths(weight=2, gradient=2, master=0, moments=2 * moments, compute=2, reduce=2)
    if training.precision.startswith("mixed"):
        fsdp = training.strategy in FSDP
        width = 4 if fsdp else 2
        return Widths(
            weight=width,
            gradient=width,
            accumulated=4 if training.precision == "mixed-fp32-grads" else 0,
            master=0 if fsdp else 4,
            moments=4 * moments,
            compute=2,
            reduce=width,
        )
    return Widths(
        weight=4,
        gradient=4,
        # DeepSpeed updates a float32 copy of its own also where the weights are float32.
        master=4 if training.strategy in DEEPSPEED else 0,
        moments=4 * moments,
        compute=2 if training.precision == "autocast" else 4,
        reduce=4,
    )
