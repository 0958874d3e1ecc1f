"""Peak memory of a training step, per rank and category, by running it symbolically.

M = parameters + gradients + optimizer + activations + logits + communication + temporaries,
at the moment at which their sum is largest, + fragmentation. Parallel strategies decide which of
them are whole, sharded, gathered for a while, or on the host.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

import msgspec

from chopper.analyzers.estimates import Estimate
from chopper.analyzers.estimates.blocks import Layout, block, head
from chopper.analyzers.estimates.tape import (
    CATEGORIES,
    Buffer,
    Kept,
    Ledger,
    backward,
    forward,
)
from chopper.architectures import Architecture
from chopper.errors import UsageError
from chopper.quantities import MAX_INT

Strategy = Literal["single", "ddp", "zero1", "zero1-torch", "zero2", "zero3", "fsdp1", "fsdp2"]
Checkpoint = Literal["none", "selective", "full"]
Precision = Literal["bf16", "fp32", "autocast", "mixed", "mixed-fp32-grads"]
Offload = Literal["none", "optimizer", "parameters", "activations"]
Loss = Literal["native", "fp32", "chunked"]
Optimizer = Literal["adamw", "sgd"]
OptimizerKind = Literal["fused", "foreach", "loop"]

_SHARDS_PARAMETERS = frozenset(("zero3", "fsdp1", "fsdp2"))
_SHARDS_GRADIENTS = _SHARDS_PARAMETERS | {"zero2"}
_SHARDS_OPTIMIZER = _SHARDS_GRADIENTS | {"zero1", "zero1-torch"}
_HAS_BUCKETS = frozenset(("ddp", "zero1-torch"))
_DEEPSPEED = frozenset(("zero1", "zero2", "zero3"))
_FSDP = frozenset(("fsdp1", "fsdp2"))
_LOSS_CHUNKS = 8
_MOST_RANKS = 10**7


class Training(msgspec.Struct, kw_only=True, frozen=True):
    """One step of training, as far as memory depends on it."""

    architecture: Architecture
    batch_count: int = 1
    """Sequences per rank."""
    sequence_count: int = 2048
    strategy: Strategy = "single"
    ranks_count: int = 1
    """Data-parallel ranks, over which states are sharded."""
    tensor_parallel_count: int = 1
    sequence_parallel: bool = False
    checkpoint: Checkpoint = "none"
    precision: Precision = "mixed"
    optimizer: Optimizer = "adamw"
    optimizer_kind: OptimizerKind = "fused"
    offload: tuple[Offload, ...] = ()
    loss: Loss = "fp32"
    attention: Literal["flash", "math"] = "flash"
    kernels: Literal["gpu", "cpu"] = "gpu"
    """Whose operators: on a CPU, norms and dropout keep more."""
    keeps_logits: bool = False
    """The program holds its logits until after the backward."""
    fragmentation_ratio: float = 0.15
    """Of what is not there from the first to the last moment."""
    workspace_bytes: int = 0
    """Of libraries, per rank: cuBLAS, NCCL, the context."""

    def __post_init__(self) -> None:
        """Refuse what is not positive, unknown, or cannot go together.

        Raises:
            UsageError: says which.
        """
        for name in ("batch_count", "sequence_count", "ranks_count", "tensor_parallel_count"):
            value = getattr(self, name)
            if value < 1:
                raise UsageError(
                    f"{name.removesuffix('_count').replace('_', ' ')}: found {value}, expected 1 or more"
                )
        for what, value, known in (
            ("strategy", self.strategy, Strategy),
            ("checkpointing", self.checkpoint, Checkpoint),
            ("precision", self.precision, Precision),
            ("optimizer", self.optimizer, Optimizer),
            ("loss", self.loss, Loss),
        ):
            _known(what, value, get_args(known))
        for part in self.offload:
            _known("offload", part, get_args(Offload))
        if self.strategy == "single" and self.ranks_count > 1:
            raise UsageError(
                f"strategy single has 1 rank, found {self.ranks_count}; "
                "choose ddp, zero1, zero2, zero3, fsdp1 or fsdp2"
            )
        if self.sequence_parallel and self.tensor_parallel_count == 1:
            raise UsageError("sequence parallelism needs tensor parallelism of 2 or more")
        a = self.architecture
        if self.tensor_parallel_count > a.heads_count or a.heads_count % self.tensor_parallel_count:
            raise UsageError(
                f"tensor parallelism {self.tensor_parallel_count} does not divide "
                f"{a.name}'s {a.heads_count} heads"
            )
        kv, tp = a.kv_heads_count, self.tensor_parallel_count
        if kv % tp and tp % kv:
            raise UsageError(
                f"tensor parallelism {tp} neither divides {a.name}'s {kv} key and value heads nor is a "
                "multiple of them"
            )
        if self.ranks_count > _MOST_RANKS:
            raise UsageError(f"ranks: found {self.ranks_count}, expected at most {_MOST_RANKS}")
        if "none" in self.offload and len(self.offload) > 1:
            others = ", ".join(part for part in self.offload if part != "none")
            raise UsageError(f"offload none contradicts {others}; give one of them")
        if 0 < a.positions_count < self.sequence_count:
            raise UsageError(
                f"sequence: found {self.sequence_count}, but {a.name} has {a.positions_count} positions"
            )
        if "parameters" in self.offload and self.strategy not in _SHARDS_PARAMETERS:
            raise UsageError(
                f"offload of parameters needs a strategy that shards them, found {self.strategy}; "
                "choose zero3, fsdp1 or fsdp2"
            )
        if self.strategy in _FSDP and self.precision == "mixed-fp32-grads":
            raise UsageError(
                f"precision mixed-fp32-grads is DeepSpeed's; {self.strategy} has mixed"
            )
        if self.strategy in _FSDP and self.precision == "autocast":
            raise UsageError(f"precision autocast contradicts {self.strategy}; it has mixed")
        if (
            self.optimizer == "sgd"
            and self.precision.startswith("mixed")
            and self.strategy not in _FSDP
        ):
            raise UsageError(
                "optimizer sgd with a master copy is not modelled; choose bf16 or fp32"
            )
        if not 0 <= self.fragmentation_ratio < 1:
            raise UsageError(f"fragmentation: found {self.fragmentation_ratio:g}, expected 0 to 1")


def _known(what: str, value: str, known: tuple[str, ...]) -> None:
    from chopper.quantities import one_of

    if value not in known:
        one_of(what, value, known)
        raise UsageError(f"{what} {value!r}: expected one of {', '.join(known)}")


class Widths(msgspec.Struct, kw_only=True, frozen=True):
    """Bytes of one parameter's state, by what it is."""

    weight: int
    gradient: int
    master: int
    moments: int
    compute: int
    reduce: int

    @property
    def total(self) -> int:
        """Of one parameter with everything."""
        return self.weight + self.gradient + self.master + self.moments


def widths(training: Training) -> Widths:
    """Bytes per parameter of each state.

    Pure bf16 AdamW 8, fp32 and autocast 16 (DeepSpeed 20), mixed with a master copy 16 (FSDP: the
    float32 shard is the master), DeepSpeed with float32 gradients 20.
    """
    two = 2 if training.optimizer == "adamw" else 0
    fsdp = training.strategy in _FSDP
    if training.precision == "bf16":
        return Widths(weight=2, gradient=2, master=0, moments=2 * two, compute=2, reduce=2)
    if training.precision == "mixed" and fsdp:
        return Widths(weight=4, gradient=4, master=0, moments=4 * two, compute=2, reduce=4)
    if training.precision == "mixed":
        return Widths(weight=2, gradient=2, master=4, moments=4 * two, compute=2, reduce=2)
    if training.precision == "mixed-fp32-grads":
        return Widths(weight=2, gradient=2, master=8, moments=4 * two, compute=2, reduce=2)
    compute = 2 if training.precision == "autocast" else 4
    # DeepSpeed updates a float32 copy of its own also where the weights are float32.
    master = 4 if training.strategy in _DEEPSPEED else 0
    return Widths(weight=4, gradient=4, master=master, moments=4 * two, compute=compute, reduce=4)


class Fit(msgspec.Struct, kw_only=True, frozen=True):
    """What is the most that fits."""

    capacity_bytes: int
    """Of the device, less what is left free."""
    fits: bool
    largest_batch_count: int | None
    """With the sequence as given; null: not even 1."""
    largest_sequence_count: int | None
    """With the batch as given, in steps of 64; null: not even 64."""
    largest_model: str | None
    """Of the catalogue, by parameters, trained the same way; null: none fits."""
    largest_parameters_count: int | None
    """The same architecture with more or fewer layers; null: not one layer fits."""


class Memory(Estimate, kw_only=True, frozen=True):
    """Peak memory of one rank, and what it is made of."""

    SCHEMA: ClassVar[str] = "chopper.estimate.memory/1"

    training: Training | None
    """Null for a captured module."""
    captured: dict[str, Any] | None = None
    """For a captured module: what was captured, and by which torch."""
    parameters_count: int
    allocated_bytes: int
    """The peak without pools, fragmentation and workspaces: what ``max_memory_allocated`` counts."""
    peak_bytes: int
    """With them: what ``max_memory_reserved`` and the driver see."""
    categories_bytes: dict[str, int]
    """Sums to `peak_bytes`."""
    phases_bytes: dict[str, int]
    """Highest of each phase, without fragmentation and workspaces."""
    peak_at: str
    steady_bytes: int
    """What stays from step to step."""
    host_bytes: int
    """Of this rank, what was offloaded."""
    fit: Fit | None = None
    """What fits a device, when one was named."""


ASSUMPTIONS = (
    "eager PyTorch: each operator's output is a tensor of its own; a compiler that fuses "
    "operators keeps less",
    "attention by a fused kernel keeps queries, keys, values, output and one float32 per row and head",
    "gradients are freed between steps (set_to_none), and the optimizer's state exists already",
    "blocks are the units of checkpointing and sharding; embedding, last norm and head are one unit",
    "on a GPU, what FSDP gathers and the gradients that it reduces are memory of streams of their "
    "own, which the caching allocator gives to no other (pools)",
    "fragmentation is a share of all that comes and goes; it is assumed, not derived",
)


TENSOR_PARALLEL_ASSUMPTION = (
    "each rank holds its part of the logits, with the loss in PyTorch's loss_parallel(); a program "
    "without it gathers them whole. An embedding's gradient is whole on each rank, as DTensor makes it"
)

_Left = tuple[Buffer | None, Kept, dict[str, Buffer], list[Buffer]]
"""Of one layer, for its backward: its input, what was kept, what is not recomputed, casts."""


class _Step:
    """One training step on the ledger; a fresh one for each estimate."""

    def __init__(self, training: Training) -> None:
        self.of = training
        self.a = training.architecture
        self.w = widths(training)
        self.ledger = Ledger()
        tp = training.tensor_parallel_count
        self.tp = tp
        autocast = training.precision == "autocast"
        self.layout = Layout(
            tokens_count=training.batch_count * training.sequence_count,
            sequence_count=training.sequence_count,
            batch_count=training.batch_count,
            element_bytes=self.w.compute,
            stream_bytes=4 if autocast else self.w.compute,
            autocast=autocast,
            tensor_parallel_count=tp,
            sequence_parallel=training.sequence_parallel,
            kernels=training.kernels,
            attention=training.attention,
        )
        self.block_ops = block(self.a, self.layout)
        self.head_ops = head(self.a, self.layout)
        h = self.layout.tokens_count * self.a.width
        self.x_bytes = (-(-h // tp) if training.sequence_parallel else h) * self.layout.stream_bytes
        # Weights of products and embeddings are cut by tensor parallelism, norms are not.
        norms = self.a.norms_per_layer_count * self.a.norm_count
        self.layer_count = -(-(self.a.layer_count - norms) // tp) + norms
        self.outer_count = -(-(self.a.outer_count - self.a.norm_count) // tp) + self.a.norm_count
        self.embedding_count = (
            -(-self.a.embedding_count // tp) + self.a.positions_count * self.a.width
        )
        self.local_count = self.a.layers_count * self.layer_count + self.outer_count
        self.gathered: dict[str, Buffer] = {}
        self.incoming: dict[str, Buffer] = {}
        self.last_incoming: Buffer | None = None
        self.last_reduced: Buffer | None = None
        self.cached: list[Buffer] = []
        self.whole_gradients: list[Buffer] = []
        self.host_bytes = 0
        # Stage 3 makes its part of the gradients once, in one piece.
        self.keeps_gradients = training.strategy == "zero3" and not training.offload

    def part(self, count: int, sharded: bool) -> int:
        """What one rank holds of so many parameters."""
        return -(-count // self.of.ranks_count) if sharded else count

    def run(self) -> Ledger:
        """The whole step."""
        ledger, of, w = self.ledger, self.of, self.w
        ledger.at = "between steps"
        own = self.part(self.local_count, of.strategy in _SHARDS_PARAMETERS)
        states = self.part(self.local_count, of.strategy in _SHARDS_OPTIMIZER)
        weights_bytes, states_bytes = own * w.weight, states * (w.master + w.moments)
        on_host = "parameters" in of.offload
        if on_host:
            self.host_bytes += weights_bytes
        else:
            ledger.take("parameters", weights_bytes)
        if on_host or "optimizer" in of.offload:
            self.host_bytes += states_bytes
        else:
            ledger.take("optimizer", states_bytes)
        self.steady_bytes = ledger.total_bytes
        if of.strategy in _HAS_BUCKETS:
            # DDP's reduction buckets hold a copy of all gradients.
            ledger.take("communication", own * w.gradient)
            self.steady_bytes = ledger.total_bytes
        if self.keeps_gradients:
            ledger.take("gradients", own * w.gradient)
            self.steady_bytes = ledger.total_bytes
        x, kept = self.forward()
        self.backward(x, kept)
        self.optimizer(states)
        return ledger

    def forward(self) -> tuple[Buffer, list[_Left]]:
        """Embedding and layers; returns the last one's output and what backward needs."""
        ledger, of = self.ledger, self.of
        ledger.at = "forward"
        if of.strategy == "zero3":
            # Each module's own parameters are gathered before it and released after it
            # (zero/parameter_offload.py).
            self.gather("embedding", self.embedding_count)
        else:
            self.gather("outer", self.outer_count)
        x = ledger.take("activations", self.x_bytes)
        if self.a.positions_count:
            ledger.spike("temporary", self.x_bytes)
        self.release("embedding")
        left: list[_Left] = []
        for i in range(self.a.layers_count):
            self.gather(f"layer {i}", self.layer_count)
            casts = self.casts()
            out, kept = forward(ledger, self.block_ops, {"x": x}, keep=of.checkpoint == "none")
            chosen: dict[str, Buffer] = {}
            if of.checkpoint == "selective":
                # Kept at their making; they only start to count here, at the end of the block.
                chosen = {
                    op.writes: ledger.take("activations", op.size_bytes)
                    for op in self.block_ops
                    if op.saved and op.name in ("linear", "attention")
                }
            if of.checkpoint != "none":
                for cast in casts:
                    ledger.drop(cast)
                casts = []
            self.release(f"layer {i}")
            if "activations" in of.offload:
                self.to_host(kept, chosen, x)
            if of.checkpoint == "none" and "activations" not in of.offload:
                # Backward needs what the operators kept, not the block's input as such.
                ledger.drop(x)
                left.append((None, kept, chosen, casts))
            else:
                left.append((x, kept, chosen, casts))
            x = out
        return x, left

    def casts(self) -> list[Buffer]:
        """Autocast's narrow copies of a layer's weights, one owner for its cache, one for backward."""
        if not self.layout.autocast:
            return []
        made = self.ledger.take("parameters", self.layer_count * self.w.compute)
        self.cached.append(made)
        return [self.ledger.own(made)]

    def to_host(self, kept: Kept, chosen: dict[str, Buffer], x: Buffer) -> None:
        """What was kept leaves the device; it comes back, block by block, in backward."""
        moved = [*kept.tensors.values(), *kept.extra.values(), *chosen.values()]
        for buffer in [*moved, x]:
            if buffer.size_bytes:
                self.host_bytes += buffer.size_bytes
                self.ledger.now[buffer.category] -= buffer.size_bytes
                self.ledger.total_bytes -= buffer.size_bytes
                buffer.size_bytes = 0

    def gather(self, unit: str, count: int) -> None:
        """Bring a unit's parameters together for its use, where they are sharded."""
        of, ledger = self.of, self.ledger
        if of.strategy not in _SHARDS_PARAMETERS or unit in self.gathered:
            return
        if of.strategy == "zero3" and unit.startswith("layer"):
            count = max(op.weights_count for op in self.block_ops)
        size = count * self.w.compute
        if of.strategy == "fsdp2":
            incoming = self.incoming.pop(unit, None) or ledger.take(
                "communication", size, stream="gather"
            )
            self.end_of_gather()
            self.gathered[unit] = ledger.take("parameters", size)
            if self.ledger.at == "forward":
                # Held until the next copy out, which overlaps with the gather after it.
                self.last_incoming = incoming
            else:
                ledger.drop(incoming)
            return
        # FlatParameter and ZeRO gather into the memory that is then used.
        arrived = self.incoming.pop(unit, None)
        if arrived is not None:
            ledger.retype(arrived, "parameters")
        stream = "gather" if of.strategy == "fsdp1" else ""
        self.gathered[unit] = arrived or ledger.take("parameters", size, stream=stream)

    def end_of_gather(self) -> None:
        """Free what the last gather of the forward arrived in."""
        if self.last_incoming is not None:
            self.ledger.drop(self.last_incoming)
            self.last_incoming = None

    def prefetch(self, unit: str, count: int) -> None:
        """Start to gather the next unit while this one computes."""
        if self.of.strategy in _FSDP and unit not in self.gathered:
            self.incoming[unit] = self.ledger.take(
                "communication", count * self.w.compute, stream="gather"
            )

    def release(self, unit: str) -> None:
        """Free a gathered unit."""
        found = self.gathered.pop(unit, None)
        if found is not None:
            self.ledger.drop(found)

    def reduce(self, gradients: list[Buffer], count: int) -> None:
        """Gradients of a unit are complete: reduce them over ranks, keep the own part."""
        of, ledger, w = self.of, self.ledger, self.w
        on_host = "parameters" in of.offload or "optimizer" in of.offload
        if of.strategy in _SHARDS_GRADIENTS:
            shard = self.part(count, True) * w.gradient
            if self.last_reduced is not None:
                ledger.drop(self.last_reduced)
            self.last_reduced = ledger.take("communication", count * w.reduce)
            for gradient in gradients:
                ledger.drop(gradient)
            if on_host:
                self.host_bytes += shard
            elif not self.keeps_gradients:
                stream = "reduce" if of.strategy in _FSDP else ""
                self.whole_gradients.append(ledger.take("gradients", shard, stream=stream))
            if of.strategy in ("fsdp1", "zero3"):
                # What was sent is a local of `_post_backward_hook` (torch's fsdp/_runtime_utils.py);
                # stage 3 clears each gradient once it is reduced (DeepSpeed's zero/stage3.py).
                ledger.drop(self.last_reduced)
                self.last_reduced = None
        elif on_host:
            for gradient in gradients:
                self.host_bytes += gradient.size_bytes
                ledger.drop(gradient)
        else:
            self.whole_gradients += gradients

    def backward(
        self,
        x: Buffer,
        left: list[_Left],
    ) -> None:
        """Loss, then layers in reverse, then the embedding."""
        ledger, of, w, a = self.ledger, self.of, self.w, self.a
        gradient_bytes = w.compute if of.strategy in _FSDP else w.gradient
        self.end_of_gather()
        ledger.at = "loss"
        n, kept = forward(ledger, self.head_ops, {"x": x}, keep=True)
        if of.strategy == "zero3":
            self.gather("head", -(-a.vocabulary_count // self.tp) * a.width)
        gradient = self.loss(n, gradient_bytes)
        self.release("head")
        ledger.at = "backward"
        gradients, weights = backward(
            ledger,
            self.head_ops,
            kept,
            gradient,
            sizes={"x": self.x_bytes},
            gradient_bytes=gradient_bytes,
        )
        coming = gradients["x"]
        ledger.drop(x)
        outer = [*weights, *self.head_gradients]
        for i in range(a.layers_count - 1, -1, -1):
            entered, kept, chosen, casts = left.pop()
            self.gather(f"layer {i}", self.layer_count)
            if i:
                self.prefetch(f"layer {i - 1}", self.layer_count)
            if entered is not None:
                if entered.size_bytes == 0:
                    entered = ledger.take("activations", self.x_bytes)
                casts = self.casts()
                out, kept = forward(ledger, self.block_ops, {"x": entered}, keep=True, have=chosen)
                ledger.drop(out)
            gradients, weights = backward(
                ledger,
                self.block_ops,
                kept,
                coming,
                sizes={"x": self.x_bytes},
                gradient_bytes=gradient_bytes,
            )
            coming = gradients["x"]
            for cast in casts:
                ledger.drop(cast)
                if of.checkpoint != "none" and self.cached:
                    ledger.drop(self.cached.pop())
            if entered is not None:
                ledger.drop(entered)
            self.release(f"layer {i}")
            self.reduce(weights, self.layer_count)
        # DTensor has no strategy for the gradient of an embedding cut by rows
        # (tensor/_ops/_embedding_ops.py): each rank makes it whole.
        table = a.embedding_count + a.positions_count * a.width
        outer.append(ledger.take("gradients", table * gradient_bytes))
        if a.tied:
            # Tied weights: both gradients exist before they are added into one.
            ledger.drop(outer.pop())
        ledger.drop(coming)
        self.release("outer")
        self.reduce(outer, self.outer_count)
        if self.last_reduced is not None:
            ledger.drop(self.last_reduced)

    def loss(self, n: Buffer, gradient_bytes: int) -> Buffer:
        """Head, cross-entropy and their backward: n → gradient of n; n is taken over."""
        ledger, of = self.ledger, self.of
        t, v = self.layout.tokens_count, -(-self.a.vocabulary_count // self.tp)
        e = self.layout.element_bytes
        chunks = _LOSS_CHUNKS if of.loss == "chunked" else 1
        size = -(-t // chunks) * v
        gathered_bytes = t * self.a.width * e
        self.head_gradients: list[Buffer] = []
        # Autocast runs the cross-entropy in float32 whatever the program asks for.
        wide = (of.loss != "native" or self.layout.autocast) and e < 4
        cast = None
        if self.layout.autocast:
            cast = ledger.take("parameters", v * self.a.width * e)
        logits = ledger.take("logits", size * e)
        if self.tp > 1:
            softmax = self.parallel_log_softmax(logits, size, wide=wide)
        elif wide:
            copy = ledger.take("logits", size * 4)
            if not of.keeps_logits:
                ledger.drop(logits)
            softmax = ledger.take("logits", size * 4)
            ledger.drop(copy)
        else:
            softmax = ledger.take("logits", size * e)
            if not of.keeps_logits:
                ledger.drop(logits)
        # The autocast context ends here, and with it its cache.
        while self.cached:
            ledger.drop(self.cached.pop())
        ledger.at = "backward of the loss"
        width = 4 if wide else e
        if self.tp > 1:
            of_logits = self.parallel_loss_backward(size * width)
        else:
            of_softmax = ledger.take("logits", size * width)
            of_logits = ledger.take("logits", size * width)
            ledger.drop(of_softmax)
        ledger.drop(softmax)
        if wide:
            narrow = ledger.take("logits", size * e)
            ledger.drop(of_logits)
            of_logits = narrow
        gradient = ledger.take("temporary", gathered_bytes)
        self.head_gradients.append(ledger.take("gradients", v * self.a.width * gradient_bytes))
        ledger.drop(of_logits)
        if cast is not None:
            ledger.drop(cast)
        ledger.drop(n)
        return gradient

    def parallel_log_softmax(self, logits: Buffer, size: int, *, wide: bool) -> Buffer:
        """Of this rank's logits, in float32 whatever their type; `_log_softmax` of torch's
        distributed/tensor/parallel/loss.py: `shifted`, then its exponential, then `result`.
        """
        ledger, e = self.ledger, self.layout.element_bytes
        computed = [ledger.take("logits", size * 4)] if e < 4 else []
        shifted = ledger.take("logits", size * 4)
        ledger.spike("logits", size * 4)
        result = ledger.take("logits", size * 4)
        ledger.drop(shifted)
        if e < 4 and not wide:
            narrow = ledger.take("logits", size * e)
            ledger.drop(result)
            result = narrow
        for copy in computed:
            ledger.drop(copy)
        if not self.of.keeps_logits:
            ledger.drop(logits)
        return result

    def parallel_loss_backward(self, size_bytes: int) -> Buffer:
        """The gradient of this rank's logits, `(grad_input + exp(x)) * grad_output`;
        `_nll_loss_and_log_softmax_backward` of torch's distributed/tensor/parallel/loss.py.

        `grad_input` lives to the end, beside the sum and the exponential or the product.
        """
        ledger = self.ledger
        grad_input = ledger.take("logits", size_bytes)
        exponential = ledger.take("logits", size_bytes)
        added = ledger.take("logits", size_bytes)
        ledger.drop(exponential)
        product = ledger.take("logits", size_bytes)
        ledger.drop(added)
        ledger.drop(grad_input)
        return product

    def optimizer(self, states_count: int) -> None:
        """The update; a foreach one holds square roots of all second moments at once.

        DeepSpeed updates its part as one tensor, with its gradient in float32 beside.
        """
        ledger, of = self.ledger, self.of
        ledger.at = "optimizer"
        if {"optimizer", "parameters"} & set(of.offload):
            return
        whole = of.strategy in _DEEPSPEED
        if of.strategy == "zero1":
            # Of all gradients it keeps its part, and frees the others before the update.
            self.whole_gradients.append(ledger.take("gradients", states_count * self.w.gradient))
            for gradient in self.whole_gradients[:-1]:
                ledger.drop(gradient)
            del self.whole_gradients[:-1]
        wide = ledger.take("gradients", states_count * 4) if whole else None
        if of.optimizer == "adamw":
            width = self.w.moments // 2
            if of.optimizer_kind == "foreach":
                ledger.spike("temporary", states_count * width)
            elif of.optimizer_kind == "loop":
                # The square root, and what it is divided into.
                largest = (
                    states_count
                    if whole
                    else self.part(
                        -(-self.a.embedding_count // self.tp), of.strategy in _SHARDS_OPTIMIZER
                    )
                )
                ledger.spike("temporary", 2 * largest * width)
        if wide is not None:
            ledger.drop(wide)


def memory(training: Training) -> Memory:
    """Peak memory of one rank.

    Raises:
        UsageError: options that contradict each other, or sizes that 64 bits cannot count.
    """
    step = _Step(training)
    ledger = step.run()
    moving = ledger.peak_bytes - step.steady_bytes
    fragmentation = round(training.fragmentation_ratio * max(moving, 0))
    categories = {name: ledger.peak[name] for name in CATEGORIES}
    # A GPU's caching allocator gives a stream's memory to no other: what FSDP's had at their highest
    # is still theirs at the peak of all.
    categories["pools"] = ledger.apart_bytes() if training.kernels == "gpu" else 0
    categories["fragmentation"] = fragmentation
    categories["workspace"] = training.workspace_bytes
    peak = sum(categories.values())
    if peak > MAX_INT:
        raise UsageError(f"memory: {peak:.3g} bytes are more than 64 bits can count; give less")
    parallel = training.tensor_parallel_count > 1
    return Memory(
        assumptions=ASSUMPTIONS + ((TENSOR_PARALLEL_ASSUMPTION,) if parallel else ()),
        training=training,
        parameters_count=training.architecture.parameters_count,
        allocated_bytes=ledger.peak_bytes,
        peak_bytes=peak,
        categories_bytes=categories,
        phases_bytes=dict(ledger.phases),
        peak_at=ledger.peak_at,
        steady_bytes=step.steady_bytes,
        host_bytes=step.host_bytes,
    )


_MOST = 2**24


def fit(training: Training, capacity_bytes: int, catalogue: dict[str, Architecture]) -> Fit:
    """The largest batch, sequence and model that stay within a capacity.

    Each is searched with everything else as given, by doubling and halving.
    """

    def fits(**changed: object) -> bool:
        try:
            return memory(msgspec.structs.replace(training, **changed)).peak_bytes <= capacity_bytes
        except UsageError:
            return False

    def most(of: str, step: int) -> int | None:
        if not fits(**{of: step}):
            return None
        low = 1
        while low * step < _MOST and fits(**{of: 2 * low * step}):
            low *= 2
        high = 2 * low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(**{of: middle * step}) else (low, middle)
        return low * step

    a = training.architecture

    def deep(layers: int) -> Architecture:
        return msgspec.structs.replace(a, layers_count=layers)

    layers = 0
    for bit in (2**i for i in range(9, -1, -1)):
        if layers + bit <= 1000 and fits(architecture=deep(layers + bit)):
            layers += bit
    models = sorted(catalogue.values(), key=lambda m: m.parameters_count, reverse=True)
    largest = next((m.name for m in models if fits(architecture=m)), None)
    return Fit(
        capacity_bytes=capacity_bytes,
        fits=fits(),
        largest_batch_count=most("batch_count", 1),
        largest_sequence_count=most("sequence_count", 64),
        largest_model=largest,
        largest_parameters_count=deep(layers).parameters_count if layers else None,
    )


def of_capture(
    found: dict[str, Any],
    request: dict[str, Any],
    *,
    fragmentation_ratio: float = 0.15,
    workspace_bytes: int = 0,
) -> Memory:
    """The estimate for a module that was tracked under fake tensors.

    Args:
        found: what :func:`chopper.collectors.fake_memory.capture` returned.
        request: the options that it was captured with, to be shown.
        fragmentation_ratio: of all but parameters and optimizer.
        workspace_bytes: of libraries.
    """
    categories = {name: int(found["categories_bytes"].get(name, 0)) for name in CATEGORIES}
    steady = categories["parameters"] + categories["optimizer"]
    allocated = sum(categories.values())
    categories["fragmentation"] = round(fragmentation_ratio * (allocated - steady))
    categories["workspace"] = workspace_bytes
    return Memory(
        assumptions=(
            "tracked operator by operator by PyTorch's MemTracker under fake tensors on a CPU: "
            "operators that a GPU fuses (RMSNorm, dropout) keep more here",
            "logits and their gradients stand under activations and temporary",
            ASSUMPTIONS[-1],
        ),
        training=None,
        captured={**request, "torch": found["torch"], "units_count": found["units_count"]},
        parameters_count=found["parameters_count"],
        allocated_bytes=allocated,
        peak_bytes=sum(categories.values()),
        categories_bytes=categories,
        phases_bytes={},
        peak_at="not told",
        steady_bytes=steady,
        host_bytes=0,
    )
