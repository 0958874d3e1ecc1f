"""One rank of a run, its device events joined to the host: what every later stage is fed from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.trace.collectives import Communication, describe
from chopper.analyzers.trace.columns import ints
from chopper.analyzers.trace.host_device import host_as_device
from chopper.analyzers.trace.join import Links, link
from chopper.analyzers.trace.tables import DeviceEvents, HostSpans
from chopper.analyzers.trace.windows import Windows, cut_windows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from chopper.hardware.ceilings import Ceiling


@dataclass(frozen=True)
class RankInput:
    """What is attributed: the trace tables of one rank, and what is known of its device.

    Attributes:
        host_span, device_event, step, collective: declared tables.
        ceiling: peaks, None when they are not known.
        no_peak_remedy: what to do when they are not, for the message.
        devices_listed: the trace names devices, so that a lack of device events is a lack.
        world_size: ranks of the run, None when not known.
        process_groups: name → global ranks, as far as the trace lists them.
        device_clock: clock samples of its device, as declared; None when there are none.
        device_limit: what holds for it over the run, as declared; None when not known.
        kernel_counter: hardware counters of its kernels, as declared; None when there are none.
        core_wait: run delays of its thread, as declared; None when there are none.
        synchronization: what was waited for, as declared; None when the trace does not say.
        recorded: chopper took the trace.
    """

    rank: int
    host_span: pa.Table
    device_event: pa.Table
    step: pa.Table
    collective: pa.Table
    ceiling: Ceiling | None
    no_peak_remedy: str
    devices_listed: bool
    world_size: int | None = None
    process_groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    device_clock: pa.Table | None = None
    device_limit: pa.Table | None = None
    kernel_counter: pa.Table | None = None
    core_wait: pa.Table | None = None
    synchronization: pa.Table | None = None
    recorded: bool = False


@dataclass(frozen=True)
class JoinedRank:
    """One rank with its events joined to the host: what ranks are matched by, then attributed."""

    given: RankInput
    host_only: bool
    links: Links
    windows: Windows
    communication: Communication

    @property
    def ceiling(self) -> Ceiling | None:
        """Peaks, unless host times stand in for a device that was not recorded."""
        return None if self.host_only and self.given.devices_listed else self.given.ceiling


def join_rank(given: RankInput) -> JoinedRank:
    """HOST_SPAN, DEVICE_EVENT, STEP, COLLECTIVE of one rank -> its links and windows."""
    host = HostSpans(given.host_span)
    host_only = given.device_event.num_rows == 0
    host_rows = None
    device_table = given.device_event
    if host_only:
        device_table, host_rows = host_as_device(host)
    events = DeviceEvents(device_table)
    links, windows = _windowed(host, events, given, host_rows)
    if windows.numbers.size and windows.numbers[0] < 0 and _any_traced(given.step):
        # No step holds work of its own: the trace is one window, and its work belongs to that.
        given = replace(given, step=_untraced(given.step))
        links, windows = _windowed(host, events, given, host_rows)
    return JoinedRank(
        given,
        host_only,
        links,
        windows,
        describe(links, given.collective, given.rank, given.world_size, given.process_groups),
    )


def _windowed(
    host: HostSpans, events: DeviceEvents, given: RankInput, host_rows: np.ndarray | None
) -> tuple[Links, Windows]:
    links = link(host, events, given.step, given.collective, host_rows)
    traced = given.step.filter(given.step["traced"]) if given.step.num_rows else given.step
    return links, cut_windows(links, ints(traced, "number"))


def _any_traced(step: pa.Table) -> bool:
    return bool(pc.any(step["traced"]).as_py())


def _untraced(step: pa.Table) -> pa.Table:
    """The same steps, none of which the trace covers."""
    traced = pa.array(np.zeros(step.num_rows, dtype=bool))
    return step.set_column(
        step.schema.get_field_index("traced"), step.schema.field("traced"), traced
    )
