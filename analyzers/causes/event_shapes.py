"""Shapes and strides that an operator's own record lacks, from the operators around it.

Traces of 2021 and 2022 have no concrete inputs: a convolution's stride is unknown, and a vendor's
gradient operators name their result by sizes that were not recorded. The backward pass recorded
both: the node has the gradient of the result, the operator around the gradients the weight.

The backward node of a library's autograd function recorded the gradient only: its forward call
has the rest.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec
import numpy as np

from chopper.analyzers.trace.columns import distinct_rows, first_with, pick
from chopper.analyzers.trace.tables import HostSpans
from chopper.analyzers.work.record import Shape
from chopper.errors import JSON_ERRORS

_FORWARD = re.compile(
    r"^aten::(conv[123]d|_?convolution|(cudnn|miopen|mkldnn)_(depthwise_)?convolution|thnn_conv2d)$"
)
_WHOLE = re.compile(r"^aten::\w+_convolution_backward$")
_WEIGHT = re.compile(r"^aten::\w+_convolution_backward_weights?$")
_INPUT = re.compile(r"^aten::\w+_convolution_backward_input$")


def _is_node(name: str) -> bool:
    """Tell whether a name is that of a convolution's node of autograd: ``ConvolutionBackward0``."""
    at = name.find("Conv")
    return at >= 0 and "Backward" in name[at:] and name.isidentifier()


def output_dims(host: HostSpans, rows: np.ndarray) -> tuple[np.ndarray, list[Shape]]:
    """Sizes of the results of those of ``rows`` that are convolutions without concrete inputs.

    As codes per row into sizes, -1 where nothing is known or nothing is lacking.
    """
    lacking = (host.concrete_inputs[0][rows] < 0) & (host.input_dims[0][rows] >= 0)
    source = np.full(len(rows), -1, dtype=np.int64)
    argument = np.zeros(len(rows), dtype=np.int64)
    forward = lacking & host.named(_FORWARD.match)[rows]
    if forward.any():
        source[forward] = _nodes(host, rows[forward])
    # (self, grad_output, weight, …): the gradients' sizes are those of self and of the weight.
    for pattern, position in ((_WEIGHT, 2), (_INPUT, 0)):
        inner = lacking & host.named(pattern.match)[rows]
        if inner.any():
            outermost = host.nesting.nearest(host.named(_WHOLE.match))
            source[inner], argument[inner] = outermost[rows[inner]], position
    unpaired = forward & (source < 0)
    if unpaired.any():
        source[unpaired], argument[unpaired] = _same_shapes(host, rows[unpaired]), 1
    return _arguments(host, source, argument)


def _same_shapes(host: HostSpans, rows: np.ndarray) -> np.ndarray:
    """A backward operator of the same input and weight for each forward convolution; -1 none.

    Where no sequence numbers were recorded: the backward operators of these shapes have to agree
    on the gradient's.
    """
    codes, texts = host.input_dims
    gradients: dict[tuple[Shape | None, ...], set[Shape | None]] = {}
    row_of: dict[tuple[Shape | None, ...], int] = {}
    backward = np.flatnonzero(host.named(_WHOLE.match) & (codes >= 0))
    for code, first in zip(*np.unique(codes[backward], return_index=True), strict=True):
        x, grad, weight = (_argument(texts[code], position) for position in range(3))
        gradients.setdefault((x, weight), set()).add(grad)
        row_of[x, weight] = int(backward[first])
    distinct, inverse = np.unique(codes[rows], return_inverse=True)
    keys = [(_argument(texts[c], 0), _argument(texts[c], 1)) for c in distinct]
    matches = [row_of[key] if len(gradients.get(key, ())) == 1 else -1 for key in keys]
    return np.array(matches, dtype=np.int64)[inverse]


def forward_rows(host: HostSpans, rows: np.ndarray, functions: Collection[str]) -> np.ndarray:
    """Whose arguments describe each row: its own, or its forward's for nodes of ``functions``.

    A node is named after its function and has its sequence number.
    """
    backward = {f"{name}Backward": name for name in functions}
    codes, values = host.names
    asking = np.flatnonzero(host.named(lambda n: n in backward)[rows])
    forward = np.flatnonzero((host.sequence_id >= 0) & host.named(lambda n: n in functions))
    if not len(asking) or not len(forward):
        return rows
    number = {value: i for i, value in enumerate(values)}
    of_node = np.array([number.get(backward.get(v, ""), -1) for v in values])
    keys = host.sequence_id[forward] * len(values) + codes[forward]
    node = rows[asking]
    function = of_node[codes[node]]
    wanted = np.where(function >= 0, host.sequence_id[node] * len(values) + function, -1)
    described = rows.copy()
    described[asking] = pick(forward, first_with(keys, wanted), node)
    return described


def _nodes(host: HostSpans, rows: np.ndarray) -> np.ndarray:
    """The autograd node of each forward convolution, by their common sequence number; -1 none."""
    sequence = host.sequence_id
    nodes = np.flatnonzero((sequence >= 0) & host.named(_is_node))
    nearest_call = host.nesting.nearest((sequence >= 0) & host.of("cpu_op"))[rows]
    return pick(nodes, first_with(sequence[nodes], pick(sequence, nearest_call)))


def _arguments(
    host: HostSpans, source: np.ndarray, argument: np.ndarray
) -> tuple[np.ndarray, list[Shape]]:
    """The sizes of one argument of each source row; few distinct texts repeat over many rows."""
    codes, texts = host.input_dims
    text = pick(codes, source).astype(np.int64)
    pairs, inverse = distinct_rows([text, argument])
    shapes: dict[Shape, int] = {}
    of_pair = np.full(len(pairs), -1, dtype=np.int64)
    for i, (code, position) in enumerate(zip(text[pairs], argument[pairs], strict=True)):
        shape = _argument(texts[code], int(position)) if code >= 0 else None
        if shape:
            of_pair[i] = shapes.setdefault(shape, len(shapes))
    return of_pair[inverse], list(shapes)


def _argument(text: str, position: int) -> Shape | None:
    try:
        dims = msgspec.json.decode(text, type=list[object])
        sizes = msgspec.convert(dims[position], list[int])
    except (*JSON_ERRORS, IndexError):
        return None
    return tuple(sizes)
