"""The work of each device event: its operator's FLOP and bytes, and the cause that they give it.

Traces of 2021 and 2022 have no concrete inputs: a convolution's stride is unknown, and a vendor's
gradient operators name their result by sizes that were not recorded. The backward pass recorded
both: the node has the gradient of the result, the operator around the gradients the weight. The
backward node of a library's autograd function recorded the gradient only: its forward call has the
rest.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np

from chopper.analyzers.causes.repeated_kernels import match_instances
from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import compact, distinct_rows, first_with, pick, row_set
from chopper.analyzers.trace.join import COMPUTE, Links
from chopper.analyzers.trace.phases import PHASES
from chopper.analyzers.trace.tables import HostSpans
from chopper.analyzers.work import (
    BACKWARD_BY_FORWARD,
    MATH_FAMILIES,
    Work,
    estimate,
    family,
    matmul_dtype,
)
from chopper.analyzers.work.kernels import element_bytes, kernel_families
from chopper.analyzers.work.record import Shape
from chopper.causes import CODES
from chopper.errors import JSON_ERRORS
from chopper.hardware.ceilings import Ceiling

_LEVELS_UP = 3
"""How far above the innermost operator a better recorded one is looked for."""


class Call(NamedTuple):
    """One operator call as recorded: the arguments of `estimate`."""

    name: str
    input_dims: str | None
    input_types: str | None
    concrete_inputs: str | None
    output_dims: Shape | None


@dataclass(frozen=True, slots=True)
class EventWork:
    """The work of each device event, its even part of its operator's by time.

    Attributes:
        ideal_ns: time at peak, NaN where unknown.
        roofline_ns: time at the roofline, NaN where unknown.
        math, vector: masks of model math and of memory-bound work; the rest is unmodelled.
        like_row: event whose work an event without an operator took over, -1 for none.
        work_flop: FLOP that the mathematics needs, NaN where unknown.
        work_bytes: least traffic with memory, NaN where unknown.
        dtype: codes into ``dtypes``, the arithmetic that a product ran in; -1 where unknown.
    """

    ideal_ns: np.ndarray
    roofline_ns: np.ndarray
    math: np.ndarray
    vector: np.ndarray
    like_row: np.ndarray
    work_flop: np.ndarray
    work_bytes: np.ndarray
    dtype: np.ndarray
    dtypes: list[str]

    @property
    def known(self) -> np.ndarray:
        """Mask of the events whose FLOP (of model math) or bytes (of other work) are known."""
        return np.where(
            self.math, ~np.isnan(self.work_flop), self.vector & ~np.isnan(self.work_bytes)
        )


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """The distinct operator calls of a rank, and whose work a launching row's kernels are.

    Attributes:
        calls, works: distinct arguments of `estimate`, and its results.
        signature: per host row the index of its call, -1 where no model applies.
        row_of: per host row the row whose work its kernels are, -1 for none: the innermost
            modelled operator, or one just above it that recorded more.
    """

    calls: list[Call]
    works: list[Work]
    signature: np.ndarray
    row_of: np.ndarray


def event_work(links: Links, ceiling: Ceiling | None) -> EventWork:
    """Join FLOP, bytes and ideal times to the device events of one rank."""
    count = len(links.events)
    ideal_ns, roofline_ns, work_flop, work_bytes = np.full((4, count), np.nan)
    math, vector = np.zeros((2, count), dtype=bool)
    like_row, dtype, code = np.full((3, count), -1, dtype=np.int64)
    work = EventWork(
        ideal_ns, roofline_ns, math, vector, like_row, work_flop, work_bytes, dtype, []
    )
    computing = links.work_class == COMPUTE
    _by_operator(links, ceiling, np.flatnonzero(computing & (links.op_row >= 0)), work, code)
    _by_likeness(links, computing, work, code)
    _by_kernel(links, computing, work)
    return work


def _by_operator(
    links: Links, ceiling: Ceiling | None, events: np.ndarray, result: EventWork, code: np.ndarray
) -> None:
    """Fill in what operators tell; ``code`` gets a number per distinct operator call and kernel."""
    if not len(events):
        return
    operators = operator_work(links, np.flatnonzero(row_set(links.op_row[events], len(links.host))))
    modelled = operators.row_of[links.op_row[events]]
    events, modelled = events[modelled >= 0], modelled[modelled >= 0]
    if not len(events):
        return
    dur = links.events.dur_ns[events].astype(np.float64)
    # What a graph replays is the operator's work again, each time.
    replay = np.where(
        pick(links.host.named(names.is_graph_launch), links.launch_row[events], otherwise=False),
        links.launch_row[events],
        -1,
    )
    first, run = distinct_rows([modelled, replay])
    total = np.bincount(run, weights=dur, minlength=len(first))
    part = np.divide(dur, total[run], out=np.zeros_like(dur), where=total[run] > 0)
    # The longest kernel of an operator tells its arithmetic (helpers such as split-K reductions do
    # not). Few distinct pairs of operator signature and kernel repeat over many events.
    name_codes, name_values = links.events.names
    most = np.full(len(first), -np.inf)
    np.maximum.at(most, run, dur)
    is_longest = dur == most[run]
    longest = np.zeros(len(first), dtype=np.int64)
    longest[run[is_longest]] = name_codes[events[is_longest]]
    signature = operators.signature[modelled]
    pairs, pair = compact(signature.astype(np.int64) * len(name_values) + longest[run])
    width = len(name_values)
    kernels = [name_values[k % width] for k in pairs]
    works = [
        refined(operators.calls[k // width], operators.works[k // width], kernel)
        for k, kernel in zip(pairs, kernels, strict=True)
    ]
    types = [matmul_dtype(w.dtype, kernel) or "" for w, kernel in zip(works, kernels, strict=True)]
    amounts = np.array([_amounts(w, t, ceiling) for w, t in zip(works, types, strict=True)])
    columns = (result.ideal_ns, result.roofline_ns, result.work_flop, result.work_bytes)
    for column, amount in zip(columns, amounts.T, strict=True):
        column[events] = amount[pair] * part
    result.dtypes.extend(sorted({t for t in types if t}))
    number = {t: i for i, t in enumerate(result.dtypes)}
    result.dtype[events] = np.array([number.get(t, -1) for t in types])[pair]
    is_math = np.array([work.family in MATH_FAMILIES for work in operators.works])[signature]
    # An operator of unknown FLOP (a whole mixture of experts) also launches what is no product.
    unknown = is_math & np.isnan(result.work_flop[events])
    if unknown.any():
        is_vector = np.array([f == "vector" for f in kernel_families(name_values)] + [False])
        is_math &= ~(unknown & is_vector[name_codes[events]])
    result.math[events] = is_math
    result.vector[events] = ~is_math
    # What events of the same work share; helpers of the same operator have other names.
    code[events] = signature * (len(result.dtypes) + 1) + result.dtype[events] + 1


def _by_likeness(links: Links, computing: np.ndarray, result: EventWork, code: np.ndarray) -> None:
    """Kernels without an operator of their own take the work of their likes.

    That are kernels whose launch the trace lacks, and those that a graph replays: their operator
    is whatever replayed the graph.
    """
    host = links.host
    without = pick(host.named(names.is_wrapper), links.op_row, otherwise=True)
    without |= pick(host.named(names.is_graph_launch), links.launch_row, otherwise=False)
    wanted = computing & without & (code < 0)
    like = match_instances(links.events, code, wanted)
    rows = np.flatnonzero(like >= 0)
    result.like_row[rows] = like[rows]
    for column in (
        result.ideal_ns,
        result.roofline_ns,
        result.math,
        result.vector,
        result.work_flop,
        result.work_bytes,
        result.dtype,
    ):
        column[rows] = column[like[rows]]


def _by_kernel(links: Links, computing: np.ndarray, result: EventWork) -> None:
    """Fill in the kind of work, not its amount, from kernels' names where nothing else tells it."""
    name_codes, name_values = links.events.names
    families = kernel_families(name_values)
    open_ = computing & ~result.math & ~result.vector
    is_math = np.array([f in MATH_FAMILIES for f in families] + [False])
    is_vector = np.array([f == "vector" for f in families] + [False])
    result.math[open_] = is_math[name_codes[open_]]
    result.vector[open_] = is_vector[name_codes[open_]]


def _amounts(work: Work, dtype: str, ceiling: Ceiling | None) -> tuple[float, float, float, float]:
    """Ideal and roofline time (ns), needed FLOP and bytes of a whole operator; NaN for unknown."""
    flop_count = work.flop_count if work.useful_flop_count is None else work.useful_flop_count
    flop, size_bytes = (np.nan if n is None else float(n) for n in (flop_count, work.bytes_count))
    bandwidth = ceiling.memory_bytes_per_s if ceiling is not None else None
    memory_ns = size_bytes / bandwidth * 1e9 if bandwidth else np.nan
    if work.family not in MATH_FAMILIES:
        return 0.0, memory_ns, flop, size_bytes
    peak = ceiling.flop_per_s.get(dtype) if ceiling is not None else None
    ideal_ns = flop / peak * 1e9 if peak else np.nan
    roofline_ns = np.nan if np.isnan(ideal_ns) else float(np.fmax(ideal_ns, memory_ns))
    return ideal_ns, roofline_ns, flop, size_bytes


def refined(call: Call, work: Work, kernel: str) -> Work:
    """The work of a call whose element types the trace lacks, where its kernel's name has one."""
    if work.bytes_count is not None:
        return work
    width = element_bytes(kernel)
    if width is None:
        return work
    if work.unsized_element_count is not None:
        return replace(work, bytes_count=width * work.unsized_element_count, reason=None)
    if call.input_types in (None, "[]") and call.input_dims is not None:
        again = estimate(*call[:4], call.output_dims, width)
        return work if again is None else again
    return work


def operator_work(links: Links, rows: np.ndarray) -> OperatorWork:
    """The work of the operators that launched something: distinct rows of the host's spans."""
    host = links.host
    nearest = host.nesting.nearest(host.of("cpu_op") & host.named(lambda n: family(n) is not None))
    chain = [nearest[rows]]
    for _ in range(_LEVELS_UP - 1):
        chain.append(pick(nearest, pick(host.nesting.parent, chain[-1])))
    wanted = np.flatnonzero(row_set(np.concatenate(chain), len(host)))
    calls, works, signature = _distinct_works(host, wanted)
    math = np.array([w.family in MATH_FAMILIES for w in works] + [False])
    known = np.array([w.flop_count is not None for w in works] + [False])
    first = chain[0]
    best = first.copy()
    is_math = (first >= 0) & math[signature[first]]
    searching = is_math & ~known[signature[first]]
    # An operator above counts what all products below it do: not again what one of them told, nor
    # for what it runs beside them.
    counted = host.nesting.containing(row_set(first[is_math & ~searching], len(host)))
    for at in chain[1:]:
        searching &= (at >= 0) & math[signature[at]]
        better = searching & known[signature[at]] & ~counted[at]
        best[better] = at[better]
        searching &= ~better
    best[(is_math & counted[first]) | ((best >= 0) & (signature[best] < 0))] = -1
    row_of = np.full(len(host), -1, dtype=np.int64)
    row_of[rows] = best
    return OperatorWork(calls, works, signature, row_of)


def _distinct_works(host: HostSpans, rows: np.ndarray) -> tuple[list[Call], list[Work], np.ndarray]:
    """Estimate each distinct call among ``rows`` once."""
    output_codes, outputs = output_dims(host, rows)
    columns = [host.names, host.input_dims, host.input_types, host.concrete_inputs]
    described = forward_rows(host, rows, BACKWARD_BY_FORWARD)
    arguments = (codes[described] for codes, _ in columns[1:])
    of_call = [host.names[0][rows], *arguments, output_codes]
    distinct, inverse = distinct_rows(of_call)
    calls: list[Call] = []
    works: list[Work] = []
    index = np.full(len(distinct), -1, dtype=np.int64)
    for i, (*codes, output) in enumerate(np.stack([c[distinct] for c in of_call], axis=1)):
        name, dims, types, concrete = (
            values[code] if code >= 0 else None
            for code, (_, values) in zip(codes, columns, strict=True)
        )
        call = Call(str(name), dims, types, concrete, outputs[output] if output >= 0 else None)
        work = estimate(*call)
        if work is not None:
            index[i] = len(works)
            works.append(work)
            calls.append(call)
    signature = np.full(len(host), -1, dtype=np.int32)
    signature[rows] = index[inverse]
    return calls, works, signature


def main_cause(links: Links, work: EventWork) -> np.ndarray:
    """Code of the leaf of each event.

    ``compute.ideal`` and ``compute.vector.roofline`` stand for what is split further.
    """
    cause = np.full(len(links.events), CODES["compute.unmodelled"], dtype=np.int64)
    cause[work.vector] = CODES["compute.vector.roofline"]
    cause[work.vector & np.isnan(work.roofline_ns)] = CODES["compute.vector.no_bytes"]
    cause[work.math] = CODES["compute.ideal"]
    cause[work.math & np.isnan(work.ideal_ns)] = CODES["compute.no_peak"]
    cause[links.phase == PHASES.index("recompute")] = CODES["compute.recompute"]
    # Parameters are gathered for the backward pass whether or not it computes the forward again.
    cause[links.sharding_copy] = CODES["compute.fsdp_copy"]
    cause[links.phase == PHASES.index("optimizer")] = CODES["compute.optimizer"]
    cause[links.outside_training] = CODES["compute.outside_training"]
    return cause


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
