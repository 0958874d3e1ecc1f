"""One training step, run symbolically on the ledger: forward, loss, backward and update.

Strategies decide what is whole, sharded, gathered for a while, or on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chopper.analyzers.estimates.blocks import block, head, loss
from chopper.analyzers.estimates.tape import Buffer, Kept, Ledger, Op, backward, forward
from chopper.analyzers.estimates.training import (
    DEEPSPEED,
    FSDP,
    HAS_BUCKETS,
    SHARDS_OPTIMIZER,
    SHARDS_PARAMETERS,
    Training,
    widths,
)
from chopper.analyzers.estimates.zero import Parts, Reduction

_Left = tuple[Buffer | None, Kept, dict[str, Buffer], Buffer | None]
"""A layer's input, kept tensors, outputs that are not recomputed, and cast, for its backward."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One kind of layer on one rank: its operators, and how many weights they have."""

    ops: tuple[Op, ...]

    @property
    def weighing(self) -> list[int]:
        """Operators with weights."""
        return [i for i, op in enumerate(self.ops) if op.weights_count]

    @property
    def count(self) -> int:
        """Weights."""
        return sum(op.weights_count for op in self.ops)

    @property
    def experts_count(self) -> int:
        """Weights of experts, which fewer ranks share."""
        return sum(op.weights_count for op in self.ops if op.expert)

    @property
    def module_count(self) -> int:
        """Weights of the largest module; all experts are one."""
        return max(self.experts_count, *(op.weights_count for op in self.ops))


class Step:
    """One training step on the ledger; a fresh one for each estimate."""

    def __init__(self, training: Training, *, rank: int | None = None) -> None:
        """Nothing has run yet.

        Where ranks differ (DeepSpeed's stages 1 and 2), it is the memory of `rank`, or the last.
        """
        self.of = training
        self.a = training.architecture
        self.w = widths(training)
        self.ledger = Ledger()
        tp = training.tensor_parallel_count
        self.tp = tp
        kinds = {
            mixture: _Layer(block(training, mixture=mixture))
            for mixture in {self.a.is_mixture(i) for i in range(self.a.layers_count)}
        }
        self.layers = [kinds[self.a.is_mixture(i)] for i in range(self.a.layers_count)]
        self.head_ops = head(training)
        h = training.tokens_count * self.a.width
        stream_bytes = 4 if training.autocast else self.w.compute
        self.x_bytes = (-(-h // tp) if training.sequence_parallel else h) * stream_bytes
        # Weights of products and embeddings are cut by tensor parallelism, norms are not.
        self.outer_count = -(-(self.a.outer_count - self.a.norm_count) // tp) + self.a.norm_count
        self.embedding_count = (
            -(-self.a.embedding_count // tp) + self.a.positions_count * self.a.width
        )
        self.local_count = sum(layer.count for layer in self.layers) + self.outer_count
        self.local_experts_count = sum(layer.experts_count for layer in self.layers)
        self.gathered: dict[str, Buffer] = {}
        self.incoming: dict[str, Buffer] = {}
        self.last_incoming: Buffer | None = None
        self.last_reduced: Buffer | None = None
        self.cached: list[Buffer] = []
        self.whole_gradients: list[Buffer] = []
        self.host_bytes = 0
        self.experts_apart = training.strategy in FSDP and training.expert_parallel_count > 1
        """Other ranks share them, so they are a unit of their own, which nothing fetches ahead."""
        self.arrived_others: list[Buffer] = []
        self.states_on_host = bool({"optimizer", "parameters"} & set(training.offload))
        self.zero: Reduction | None = None
        if training.strategy in DEEPSPEED:
            parts = self.parts()
            self.zero = Reduction(
                self.ledger,
                parts,
                stage=int(training.strategy[-1]),
                rank=training.ranks_count - 1 if rank is None else rank,
                bucket_count=training.bucket_count,
                width=self.w.gradient,
                wide=self.w.accumulated > 0,
                updated_width=self.w.master or self.w.weight,
                on_host=self.states_on_host,
            )

    def parts(self) -> Parts:
        """Parameters in the order of the model, and who owns what of them."""
        layers = [of.ops[i].weights_count for of in self.layers for i in of.weighing]
        head = [] if self.a.tied else [-(-self.a.embedding_count // self.tp)]
        counts = [self.embedding_count, *layers, self.a.norm_count, *head]
        return Parts(counts, self.of.ranks_count)

    def part(self, count: int, sharded: bool, experts_count: int = 0) -> int:
        """Return the parameters that one rank holds of so many, some of which are experts'.

        Ranks that have the same experts share these, all ranks the others.
        """
        if not sharded:
            return count
        sharing = self.of.ranks_count // self.of.expert_parallel_count
        return -(-(count - experts_count) // self.of.ranks_count) - (-experts_count // sharing)

    def run(self) -> Ledger:
        """The whole step."""
        ledger, of, w = self.ledger, self.of, self.w
        ledger.at = "between steps"
        count, experts = self.local_count, self.local_experts_count
        mine = self.part(count, of.strategy in SHARDS_PARAMETERS, experts)
        states = self.part(count, of.strategy in SHARDS_OPTIMIZER, experts)
        weights_bytes, states_bytes = mine * w.weight, states * (w.master + w.moments)
        if self.zero is None:
            states_bytes += states * w.accumulated
        on_host = "parameters" in of.offload
        if on_host:
            self.host_bytes += weights_bytes
        else:
            ledger.take("parameters", weights_bytes)
        if self.states_on_host:
            self.host_bytes += states_bytes
        else:
            ledger.take("optimizer", states_bytes)
        self.steady_bytes = ledger.total_bytes
        if of.strategy in HAS_BUCKETS:
            # DDP's reduction buckets hold a copy of all gradients that another rank has too.
            alone = of.ranks_count == of.expert_parallel_count > 1
            reduced = mine - experts * alone
            ledger.take("communication", reduced * w.gradient)
            self.steady_bytes = ledger.total_bytes
        if self.zero is not None:
            self.zero.before()
            self.steady_bytes = ledger.total_bytes
            if self.states_on_host:
                # Float32 gradients, and what weights or gradients are copied through in 16 bits.
                self.host_bytes += self.zero.parts.part_count * (4 + w.compute)
        x, layers_saved = self.forward()
        self.backward(x, layers_saved)
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
        layers_saved: list[_Left] = []
        for i, layer in enumerate(self.layers):
            self.gather_layer(i)
            cast = self.cast(layer)
            out, saved = forward(ledger, layer.ops, {"x": x}, keep=of.checkpoint == "none")
            chosen: dict[str, Buffer] = {}
            if of.checkpoint == "selective":
                # Kept at their making; they only start to count here, at the end of the block.
                chosen = {
                    op.writes: ledger.take("activations", op.size_bytes)
                    for op in layer.ops
                    if op.saved
                }
            if of.checkpoint != "none":
                ledger.drop(cast)
                cast = None
            self.release(f"layer {i}")
            self.release(f"experts {i}")
            if "activations" in of.offload:
                self.to_host(saved, chosen, x)
            if of.checkpoint == "none" and "activations" not in of.offload:
                # Backward needs what the operators kept, not the block's input as such.
                ledger.drop(x)
                layers_saved.append((None, saved, chosen, cast))
            else:
                layers_saved.append((x, saved, chosen, cast))
            x = out
        return x, layers_saved

    def cast(self, layer: _Layer) -> Buffer | None:
        """Return autocast's narrow copy of a layer's weights, owned by its cache and backward."""
        if not self.of.autocast:
            return None
        self.cached.append(self.ledger.take("parameters", layer.count * self.w.compute))
        return self.ledger.retain(self.cached[-1])

    def to_host(self, saved: Kept, chosen: dict[str, Buffer], x: Buffer) -> None:
        """Move kept tensors off the device; they come back, block by block, in backward."""
        moved = [*saved.tensors.values(), *saved.extra.values(), *chosen.values()]
        for buffer in [*moved, x]:
            if buffer.size_bytes:
                self.host_bytes += buffer.size_bytes
                self.ledger.now[buffer.category] -= buffer.size_bytes
                self.ledger.total_bytes -= buffer.size_bytes
                buffer.size_bytes = 0

    def gather(self, unit: str, count: int, layer: _Layer | None = None) -> None:
        """Bring a unit's parameters together for its use, where they are sharded."""
        of, ledger = self.of, self.ledger
        if of.strategy not in SHARDS_PARAMETERS or unit in self.gathered:
            return
        if of.strategy == "zero3" and layer is not None:
            count = layer.module_count
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

    def gather_layer(self, i: int) -> None:
        """A layer's parameters, its experts' apart where they are a unit of their own."""
        layer = self.layers[i]
        if self.experts_apart and layer.experts_count:
            self.gather(f"layer {i}", layer.count - layer.experts_count, layer)
            self.gather(f"experts {i}", layer.experts_count, layer)
        else:
            self.gather(f"layer {i}", layer.count, layer)

    def end_of_gather(self) -> None:
        """Free what the last gather of the forward arrived in."""
        self.ledger.drop(self.last_incoming)
        self.last_incoming = None

    def prefetch(self, unit: str, count: int) -> None:
        """Start to gather the next unit while this one computes."""
        if self.of.strategy in FSDP and unit not in self.gathered:
            self.incoming[unit] = self.ledger.take(
                "communication", count * self.w.compute, stream="gather"
            )

    def release(self, unit: str) -> None:
        """Free a gathered unit."""
        self.ledger.drop(self.gathered.pop(unit, None))

    def reduce(self, gradients: list[Buffer], count: int, experts_count: int = 0) -> None:
        """Gradients of a unit are complete: reduce them over ranks, keep the own part."""
        of, ledger, w = self.of, self.ledger, self.w
        if of.strategy in FSDP:
            shard = self.part(count, True, experts_count) * w.gradient
            ledger.drop(self.last_reduced)
            self.last_reduced = ledger.take("communication", count * w.reduce)
            ledger.drop(*gradients)
            if self.states_on_host:
                self.host_bytes += shard
            else:
                self.whole_gradients.append(ledger.take("gradients", shard, stream="reduce"))
            if of.strategy == "fsdp1":
                # What was sent is a local of `_post_backward_hook` (torch's
                # fsdp/_runtime_utils.py).
                ledger.drop(self.last_reduced)
                self.last_reduced = None
        elif self.states_on_host:
            self.host_bytes += sum(gradient.size_bytes for gradient in gradients)
            ledger.drop(*gradients)
        else:
            self.whole_gradients += gradients

    def backward(self, x: Buffer, layers_saved: list[_Left]) -> None:
        """Loss, then layers in reverse, then the embedding."""
        ledger, of, w, a = self.ledger, self.of, self.w, self.a
        gradient_bytes = w.compute if of.strategy in FSDP else w.gradient
        self.end_of_gather()
        ledger.at = "loss"
        n, saved_by_head = forward(ledger, self.head_ops, {"x": x}, keep=True)
        head_bytes = -(-a.vocabulary_count // self.tp) * a.width * w.compute
        gradient, of_head = loss(
            ledger,
            of,
            n,
            gradient_bytes=gradient_bytes,
            cached=self.cached,
            gathered_bytes=head_bytes if of.strategy == "zero3" else 0,
        )
        ledger.at = "backward"
        outer: list[Buffer] = []
        if self.zero is None or a.tied:
            outer.append(of_head)
        else:
            self.zero.arrived(len(self.zero.parts.counts) - 1, of_head)
        gradient, weights = backward(
            ledger,
            self.head_ops,
            saved_by_head,
            gradient,
            x_bytes=self.x_bytes,
            gradient_bytes=gradient_bytes,
            arrived=self.hook(a.layers_count),
        )
        ledger.drop(x)
        outer += weights
        for i in range(a.layers_count - 1, -1, -1):
            gradient = self.backward_of_layer(i, layers_saved.pop(), gradient, gradient_bytes)
        # DTensor has no strategy for the gradient of an embedding cut by rows
        # (tensor/_ops/_embedding_ops.py): each rank makes it whole.
        table = a.embedding_count + a.positions_count * a.width
        of_table = ledger.take("gradients", table * gradient_bytes)
        if a.tied:
            # Tied weights: both gradients exist before they are added into one.
            ledger.drop(outer.pop(0))
        ledger.drop(gradient)
        self.release("outer")
        if self.zero is not None:
            self.zero.arrived(0, of_table)
            self.zero.finish()
            return
        self.reduce([*outer, of_table], self.outer_count)
        ledger.drop(self.last_reduced)

    def backward_of_layer(
        self, i: int, layer_saved: _Left, gradient: Buffer, gradient_bytes: int
    ) -> Buffer:
        """Return the gradient of a layer's input from that of its output."""
        ledger, of = self.ledger, self.of
        entered, saved, chosen, cast = layer_saved
        layer = self.layers[i]
        self.gather_layer(i)
        if i:
            before = self.layers[i - 1]
            apart = before.experts_count if self.experts_apart else 0
            self.prefetch(f"layer {i - 1}", before.count - apart)
        if entered is not None:
            if entered.size_bytes == 0:
                entered = ledger.take("activations", self.x_bytes)
            cast = self.cast(layer)
            out, saved = forward(ledger, layer.ops, {"x": entered}, keep=True, have=chosen)
            ledger.drop(out)
        gradient, weights = backward(
            ledger,
            layer.ops,
            saved,
            gradient,
            x_bytes=self.x_bytes,
            gradient_bytes=gradient_bytes,
            arrived=self.hook(i),
        )
        ledger.drop(cast, entered)
        if cast is not None and of.checkpoint != "none" and self.cached:
            ledger.drop(self.cached.pop())
        self.release(f"layer {i}")
        if self.experts_apart:
            self.reduce(self.arrived_others, layer.count - layer.experts_count)
            self.arrived_others = []
        else:
            self.reduce(weights, layer.count, layer.experts_count)
        return gradient

    def hook(self, layer: int) -> Callable[[int, Buffer], None] | None:
        """Return the receiver of single gradients of a layer; after the last layer: the norm's."""
        if self.experts_apart and layer < self.a.layers_count:
            return self.reduce_experts_first(layer)
        if self.zero is None:
            return None
        zero = self.zero
        first = 1 + sum(len(of.weighing) for of in self.layers[:layer])
        last = layer == self.a.layers_count
        weighing = [] if last else self.layers[layer].weighing
        places = {op: first + position for position, op in enumerate(weighing)}

        def arrived(op: int, gradient: Buffer) -> None:
            zero.arrived(first if last else places[op], gradient)

        return arrived

    def reduce_experts_first(self, i: int) -> Callable[[int, Buffer], None]:
        """Experts that are a unit of their own are released and reduced when their gradients are
        there.
        """
        layer = self.layers[i]
        waiting = [op for op in layer.ops if op.expert]
        experts: list[Buffer] = []

        def arrived(op: int, gradient: Buffer) -> None:
            if not layer.ops[op].expert:
                self.arrived_others.append(gradient)
                return
            experts.append(gradient)
            if len(experts) == len(waiting):
                self.release(f"experts {i}")
                self.reduce(experts, layer.experts_count, layer.experts_count)

        return arrived

    def optimizer(self, states_count: int) -> None:
        """The update; a foreach one holds square roots of all second moments at once."""
        ledger, of = self.ledger, self.of
        ledger.at = "optimizer"
        if self.states_on_host:
            return
        gradient = self.zero.gradient() if self.zero is not None else None
        if of.optimizer == "adamw":
            width = self.w.moments // 2
            # DeepSpeed updates its part as one tensor.
            updated_count = states_count if self.zero is None else self.zero.updated_count()
            if of.optimizer_kind == "foreach":
                ledger.spike("temporary", updated_count * width)
            elif of.optimizer_kind == "loop":
                # The square root, and what it is divided into.
                sharded = of.strategy in SHARDS_OPTIMIZER
                largest = self.part(-(-self.a.embedding_count // self.tp), sharded)
                for op in {op for layer in set(self.layers) for op in layer.ops if op.expert}:
                    experts = self.part(op.weights_count, sharded, op.weights_count)
                    largest = max(largest, experts)
                ledger.spike(
                    "temporary", 2 * width * (largest if self.zero is None else updated_count)
                )
        ledger.drop(gradient)
        if self.zero is not None:
            self.zero.after()
