"""Forward and backward of a Llama-like model, operator by operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.known_causes.model.host import US
from tests.known_causes.model.sharded import FFN, HIDDEN, Sharded

if TYPE_CHECKING:
    from tests.known_causes.model.engine import Program, Task

HEADS, VOCABULARY, TOKENS = 32, 16_000, 4096
_HEAD = HIDDEN // HEADS
_STATES_BYTES, _WIDE_BYTES = 2.0 * TOKENS * HIDDEN, 2.0 * TOKENS * FFN
_LOGITS_BYTES = 2.0 * TOKENS * VOCABULARY
_X, _H = [1, TOKENS, HIDDEN], [1, TOKENS, FFN]
_QUERY = [1, HEADS, TOKENS, _HEAD]
_ATTENDED_PAIRS = TOKENS * (TOKENS + 1) / 2
_ATTENTION_BYTES = 4 * HEADS * TOKENS
_MUL, _ADD = "MulFunctor<float>", "CUDAFunctor_add<c10::BFloat16>"


class Layers(Sharded):
    """The model."""

    def forward(self) -> Program:
        """Embedding, layers, head."""
        yield from self.busy(10 * US, "python")
        key = "embedding"
        yield from self.op(
            "aten::embedding",
            key,
            [self.vector(key, 8 * TOKENS + 4.0 * TOKENS * HIDDEN, "index_select_kernel")],
            dims=[[VOCABULARY, HIDDEN], [1, TOKENS], [], [], []],
            node=True,
        )
        for layer in range(self.plan.layers):
            key = f"forward/{layer}"
            yield from self.extras(key)
            ahead = (layer + 1, f"forward/{layer + 1}") if layer + 1 < self.plan.layers else None
            yield from self.unshard(layer, key, ahead)
            if self.plan.graph:
                yield from self.replay(key)
            else:
                with self.row(f"chopper::layer::layers.{layer}", "cpu_op", **{"External id": 0}):
                    yield from self.layer(key)
        yield from self.head()

    def replay(self, key: str) -> Program:
        """A layer's forward from a graph: one launch for all its kernels."""
        self.graph_tasks = []
        yield from self.layer(key)
        tasks, self.graph_tasks = self.graph_tasks, None
        start = self.now
        self.correlation += 1
        length = self.around(30 * US, key + "/graph")
        self.graphs += 1
        name = self.node.prefix + "GraphLaunch"
        for i, task in enumerate(tasks):
            task.correlation = self.correlation
            task.launch_ns, task.returned_ns = start, start + length
            task.available_ns = start + round(0.8 * length)
            task.account = "compute.unmodelled"
            task.call = name
            task.graph = (self.graphs, i + 1)
            self.device.stream(task.stream).push(task)
        with self.row(name, "cuda_runtime", correlation=self.correlation):
            yield from self.busy(length, tasks[0])

    def layer(self, key: str, *, again: bool = False) -> Program:
        """Forward of one layer; ``again`` in backward, booked as recomputation."""

        def run(operator: str, name: str, task: Task, dims: list[Any], **recorded: Any) -> Program:
            if again:
                task.account = "compute.recompute"
            return self.op(operator, f"{key}/{name}", [task], dims=dims, node=True, **recorded)

        def linear(name: str, k: int, n: int) -> Program:
            task = self.gemm(f"{key}/{name}", TOKENS, k, n)
            return run("aten::mm", name, task, [[TOKENS, k], [k, n]], around="aten::linear")

        def vector(
            operator: str, name: str, bytes_count: float, kernel: str, dims: list[Any], **told: Any
        ) -> Program:
            account = "compute.recompute" if again else "vector"
            task = self.vector(f"{key}/{name}", bytes_count, kernel, account)
            return run(operator, name, task, dims, **told)

        def norm(name: str) -> Program:
            return vector(
                "aten::_fused_rms_norm",
                name,
                2 * _STATES_BYTES + 2 * HIDDEN,
                "vectorized_layer_norm_kernel",
                [_X, [], [HIDDEN], []],
            )

        def residual(name: str) -> Program:
            return vector(
                "aten::add",
                name,
                3 * _STATES_BYTES,
                _ADD,
                [_X, _X, []],
            )

        yield from norm("norm1")
        for name in "qkv":
            yield from linear(name, HIDDEN, HIDDEN)
        for name in ("rope_q", "rope_k"):
            yield from vector("aten::mul", name, 3 * _STATES_BYTES, _MUL, [_X, _X])
        yield from run(
            "aten::_scaled_dot_product_flash_attention",
            "attention",
            self.math(
                f"{key}/attention",
                4.0 * HEADS * _HEAD * _ATTENDED_PAIRS,
                4 * _STATES_BYTES + _ATTENTION_BYTES,
                name=self.node.flash_forward,
            ),
            [_QUERY, _QUERY, _QUERY, [], [], [], []],
            around="aten::scaled_dot_product_attention",
        )
        yield from linear("o", HIDDEN, HIDDEN)
        yield from residual("residual1")
        yield from norm("norm2")
        yield from linear("gate", HIDDEN, FFN)
        yield from linear("up", HIDDEN, FFN)
        yield from vector("aten::silu", "silu", 2 * _WIDE_BYTES, "silu_kernel", [_H])
        yield from vector("aten::mul", "gated", 3 * _WIDE_BYTES, _MUL, [_H, _H])
        yield from linear("down", FFN, HIDDEN)
        yield from residual("residual2")

    def head(self) -> Program:
        """Logits and loss."""
        yield from self.op(
            "aten::mm",
            "head/mm",
            [self.gemm("head/mm", TOKENS, HIDDEN, VOCABULARY)],
            dims=[[TOKENS, HIDDEN], [HIDDEN, VOCABULARY]],
            node=True,
            around="aten::linear",
        )
        task = self.vector("head/softmax", 2 * _LOGITS_BYTES, "cunn_SoftMaxForward")
        yield from self.op(
            "aten::_log_softmax",
            "head/softmax",
            [task],
            dims=[[TOKENS, VOCABULARY], [], []],
            node=True,
        )
        self.forward_done = task.done

    def backward(self) -> Program:
        """On autograd's own thread."""
        yield from self.busy(12 * US, "python")
        self.tid = self.main_tid + 77
        yield from self.vector_backward(
            "LogSoftmaxBackward0",
            "head/softmax",
            "aten::_log_softmax_backward_data",
            "backward/head/softmax",
            3 * _LOGITS_BYTES,
            "cunn_SoftMaxBackward",
            [[TOKENS, VOCABULARY], [TOKENS, VOCABULARY], [], []],
        )
        yield from self.linear_backward("head/mm", "backward/head/mm", HIDDEN, VOCABULARY)
        for layer in reversed(range(self.plan.layers)):
            yield from self.backward_layer(layer)
        yield from self.vector_backward(
            "EmbeddingBackward0",
            "embedding",
            "aten::embedding_dense_backward",
            "backward/embedding",
            2.0 * TOKENS * HIDDEN + 8 * TOKENS + 2.0 * VOCABULARY * HIDDEN,
            "embedding_backward_feature_kernel",
            [[1, TOKENS, HIDDEN], [1, TOKENS], [], [], []],
        )
        self.tid = self.main_tid
        yield from self.busy(14 * US, "python")

    def linear_backward(self, forward: str, key: str, k: int, n: int, *first: Program) -> Program:
        """Both gradients of a matrix product, behind what runs ``first`` in its node."""

        def product(name: str, a: int, b: int, c: int) -> Program:
            task = self.gemm(f"{key}/{name}", a, b, c)
            dims = [[a, b], [b, c]]
            yield from self.op("aten::mm", f"{key}/{name}", [task], dims=dims, recorded=False)

        gradients = product("dx", TOKENS, n, k), product("dw", k, TOKENS, n)
        return self.autograd("MmBackward0", forward, *first, *gradients)

    def vector_backward(
        self,
        node: str,
        forward: str,
        operator: str,
        key: str,
        bytes_count: float,
        kernel: str,
        dims: list[Any],
        *,
        inputs: tuple[str, ...] = ("",),
        **recorded: Any,
    ) -> Program:
        """Gradients of memory-bound work, one for each of its inputs."""
        return self.autograd(
            node,
            forward,
            *(
                self.op(
                    operator,
                    key + name,
                    [self.vector(key + name, bytes_count, kernel)],
                    dims=dims,
                    recorded=False,
                    **recorded,
                )
                for name in inputs
            ),
        )

    def backward_layer(self, layer: int) -> Program:
        """Backward of one layer, its gradients reduced."""
        key, forward = f"backward/{layer}", f"forward/{layer}"
        ahead = (layer - 1, f"backward/{layer - 1}") if layer else None
        yield from self.extras(key)
        yield from self.unshard(layer, key, ahead)

        def linear(name: str, k: int, n: int, *first: Program) -> Program:
            return self.linear_backward(f"{forward}/{name}", f"{key}/{name}", k, n, *first)

        def vector(
            node: str,
            operator: str,
            name: str,
            bytes_count: float,
            kernel: str,
            *dims: Any,
            **told: Any,
        ) -> Program:
            return self.vector_backward(
                node,
                f"{forward}/{name}",
                operator,
                f"{key}/{name}",
                bytes_count,
                kernel,
                list(dims),
                **told,
            )

        def norm(name: str) -> Program:
            return vector(
                "FusedRmsNormBackward0",
                "aten::_fused_rms_norm_backward",
                name,
                3 * _STATES_BYTES + 4 * TOKENS + 4 * HIDDEN,
                "layer_norm_grad_input_kernel",
                *(_X, _X, [], [1, TOKENS, 1], [HIDDEN], []),
            )

        def recomputed() -> Program:
            if layer < self.plan.recompute.at(self.rank, self.step):
                name = f"chopper::recompute::layers.{layer}"
                with self.row(name, "cpu_op", **{"External id": 0}):
                    yield from self.layer(f"again/{layer}", again=True)

        mul, wide = ("MulBackward0", "aten::mul"), 3 * _WIDE_BYTES
        yield from linear("down", FFN, HIDDEN, recomputed())
        yield from vector(*mul, "gated", wide, _MUL, _H, _H, inputs=("1", "2"))
        yield from vector(
            "SiluBackward0", "aten::silu_backward", "silu", wide, "silu_backward_kernel", _H, _H
        )
        yield from linear("up", HIDDEN, FFN)
        yield from linear("gate", HIDDEN, FFN)
        yield from norm("norm2")
        yield from linear("o", HIDDEN, HIDDEN)
        yield from self.attention_backward(f"{key}/attention", f"{forward}/attention")
        for name in ("rope_q", "rope_k"):
            yield from vector(*mul, name, 3 * _STATES_BYTES, _MUL, _X, _X)
        for name in "vkq":
            yield from linear(name, HIDDEN, HIDDEN)
        yield from norm("norm1")
        yield from self.reduce(layer, key + "/reduce")

    def attention_backward(self, key: str, forward: str) -> Program:
        """Backward of causal attention."""
        task = self.math(
            key,
            10.0 * HEADS * _HEAD * _ATTENDED_PAIRS,
            8 * _STATES_BYTES + _ATTENTION_BYTES,
            name=self.node.flash_backward,
        )
        inner = self.op(
            "aten::_scaled_dot_product_flash_attention_backward",
            key,
            [task],
            dims=[*[_QUERY] * 5, [1, HEADS, TOKENS], *[[]] * 9],
            recorded=False,
        )
        return self.autograd("ScaledDotProductFlashAttentionBackward0", forward, inner)
