"""Stage, micro-batch and pass of device events: from the file, from annotations, from transfers."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace import names
from chopper.analyzers.trace.collectives import POINT_TO_POINT, Communication
from chopper.analyzers.trace.columns import dictionary, ints, pick, row_set, run_starts, strings
from chopper.analyzers.trace.join import COMMUNICATION, Links
from chopper.analyzers.trace.phases import PHASES
from chopper.analyzers.trace.tables import RankTables

ACTIONS = ["forward", "backward", "backward_input", "backward_weight"]
_PASS_OF = {"forward": 0, "recompute": 1, "backward": 1}
_PHASE_OF = np.array([PHASES.index(action.partition("_")[0]) for action in ACTIONS] + [-1])


class PipelineActions(NamedTuple):
    """Where each device event of a rank belongs in the pipeline; -1 where nothing tells.

    ``action`` is a code into ACTIONS.
    """

    stage: np.ndarray
    micro_batch: np.ndarray
    action: np.ndarray

    def columns(self) -> dict[str, pa.Array]:
        """Return them as columns of `event_link`."""
        return {
            "stage_index": _nullable(self.stage),
            "micro_batch_index": _nullable(self.micro_batch),
            "action": dictionary(self.action, ACTIONS),
        }


def no_columns(count: int) -> dict[str, pa.Array]:
    """Return the columns of :meth:`PipelineActions.columns` where nothing tells."""
    texts = pa.dictionary(pa.int32(), pa.string())
    kinds = {"stage_index": pa.int32(), "micro_batch_index": pa.int32(), "action": texts}
    return {name: pa.nulls(count, kind) for name, kind in kinds.items()}


def pipeline_actions(
    links: Links, communication: Communication, inputs: RankTables
) -> PipelineActions | None:
    """Place the device events of a rank in the pipeline. PIPELINE_ACTION, HOST_SPAN -> columns.

    Args:
        links: the rank's joined events.
        communication: of the rank.
        inputs: what was recorded of it.

    Returns:
        None where nothing tells.
    """
    recorded = inputs.pipeline_action
    if recorded is not None and recorded.num_rows:
        return _as_recorded(recorded, len(links.events))
    annotated = _annotated(links)
    return _by_transfers(links, communication) if annotated is None and inputs.staged else annotated


def with_phases(links: Links, actions: PipelineActions) -> Links:
    """Return the events of a rank without a host, their phases as actions and names say."""
    phase = np.where(actions.action < 0, links.phase, _PHASE_OF[actions.action])
    phase[links.events.named(lambda name: name.startswith("optimizer"))] = PHASES.index("optimizer")
    return replace(links, phase=phase)


def _as_recorded(recorded: pa.Table, count: int) -> PipelineActions:
    row = ints(recorded, "event_row")
    codes, values = strings(recorded, "action")
    of_value = np.array([ACTIONS.index(v) if v in ACTIONS else -1 for v in values] + [-1])
    columns = (ints(recorded, "stage_index"), ints(recorded, "micro_batch_index"), of_value[codes])
    spread = np.full((3, count), -1, dtype=np.int64)
    spread[:, row] = columns
    return PipelineActions(*spread)


def _annotated(links: Links) -> PipelineActions | None:
    """Take what the nearest annotation around each launch says.

    The autograd engine launches the kernels of backward from a thread of its own: there it is the
    annotation that the program was in at that moment.
    """
    host = links.host
    annotations = host.named(names.is_pipeline_action)
    if not annotations.any():
        return None
    annotations &= host.of("annotation")
    row = pick(host.nesting.nearest(annotations), links.span)
    rows = np.flatnonzero(annotations)
    lacking = np.flatnonzero((row < 0) & links.has_launch & (links.thread == links.backward_thread))
    if len(lacking) and len(rows):
        launch_ns = links.launch_ns[lacking]
        last = rows[np.searchsorted(host.start_ns[rows], launch_ns, side="right") - 1]
        inside = (host.start_ns[last] <= launch_ns) & (host.ends(last) > launch_ns)
        row[lacking] = np.where(inside, last, -1)
    codes, values = host.names
    distinct, code = np.unique(codes[rows], return_inverse=True)
    said = [names.pipeline_action(values[name]) for name in distinct.tolist()]
    numbers = [(stage, batch, ACTIONS.index(a) if a else -1) for stage, batch, a in said]
    of_span = np.full((3, len(host)), -1, dtype=np.int64)
    of_span[:, rows] = np.array(numbers, dtype=np.int64).reshape(-1, 3).T[:, code]
    return PipelineActions(*(pick(column, row) for column in of_span))


def _by_transfers(links: Links, communication: Communication) -> PipelineActions | None:
    """Tell passes apart where the program enters another phase, sends or receives.

    For schedules that name nothing, such as 1F1B of torch.distributed.pipelining. Steps with unlike
    numbers of forwards and backwards have none.
    """
    pairs = np.array([kind.what == POINT_TO_POINT for kind in communication.kinds] + [False])
    sent = row_set(communication.event_row[pairs[communication.kind]], len(links.events))
    launched_ns = np.where(links.has_launch, links.launch_ns, links.events.start_ns)
    order = np.lexsort((launched_ns, links.step))
    # Recomputation is a part of its backward.
    of_phase = [_PASS_OF.get(name, -1) for name in links.phases]
    phase, step = np.array([*of_phase, -1])[links.phase], links.step
    passes = (phase >= 0) & (links.work_class != COMMUNICATION) & (step >= 0)
    rows = order[passes[order]]
    first = np.flatnonzero(
        run_starts(step[rows], phase[rows], np.cumsum(sent[order])[passes[order]])
    )
    steps, at = np.unique(step[rows[first]], return_inverse=True)
    count = np.zeros((2, len(steps)), dtype=np.int64)
    np.add.at(count, (phase[rows[first]], at), 1)
    number = np.zeros(len(first), dtype=np.int64)
    for one in range(2):
        of = phase[rows[first]] == one
        begin = np.cumsum(count[one]) - count[one]
        number[of] = np.arange(int(of.sum())) - begin[at[of]]
    length = np.diff(np.append(first, len(rows)))
    alike = np.repeat((count[0] == count[1])[at], length)
    if not alike.any():
        return None
    unknown = np.full((2, len(step)), -1, dtype=np.int64)
    batch, action = unknown
    batch[rows[alike]] = np.repeat(number, length)[alike]
    action[rows[alike]] = phase[rows[alike]]
    return PipelineActions(np.full(len(step), -1, dtype=np.int64), batch, action)


def _nullable(values: np.ndarray) -> pa.Array:
    return pa.array(values.astype(np.int32), mask=values < 0)
