from __future__ import annotations

import pyarrow as pa

from chopper.analyzers.trace.windows import Windows
from chopper.arrow import with_column
from chopper.tables import TABLES
from tests.analyzers.make import joined, kernel, kernels, span, spans, steps


def launch(at: int, correlation: int, name: str = "cudaLaunchKernel"):
    return span(at, at + 2, name, "runtime", correlation_id=correlation)


def windows_of(host: pa.Table, device: pa.Table, step: pa.Table) -> Windows:
    return joined(host, device, step).windows


def test_a_step_ends_when_the_last_event_launched_in_it_ends() -> None:
    # The host runs ahead: step 0 [0,100] launches work until 150, step 1 [100,200] until 260.
    host = spans(launch(10, 1), launch(50, 2), launch(110, 3))
    device = kernels(
        kernel(20, 60, correlation_id=1),
        kernel(60, 150, correlation_id=2),
        kernel(150, 260, correlation_id=3),
    )
    found = windows_of(host, device, steps((0, 100), (100, 200)))
    assert found.bounds_ns.tolist() == [0, 150, 260]
    assert found.numbers.tolist() == [0, 1]
    assert found.after_ns == 0


def test_the_first_step_starts_after_what_ran_before_it() -> None:
    host = spans(launch(5, 1), launch(30, 2))
    device = kernels(kernel(10, 40, correlation_id=1), kernel(45, 60, correlation_id=2))
    found = windows_of(host, device, steps((20, 100)))
    assert found.bounds_ns.tolist() == [40, 60]
    assert found.before_ns == 30


def test_what_lies_after_the_last_step_is_shown_apart() -> None:
    host = spans(launch(10, 1), launch(120, 2))
    device = kernels(kernel(20, 60, correlation_id=1), kernel(130, 200, correlation_id=2))
    found = windows_of(host, device, steps((0, 100)))
    assert found.bounds_ns.tolist() == [0, 60]
    assert found.after_ns == 140


def test_without_a_launch_the_place_on_the_stream_decides() -> None:
    # The second kernel lost its launch; it follows one of step 0 on stream 7.
    host = spans(launch(10, 1), launch(110, 3))
    device = kernels(
        kernel(20, 60, correlation_id=1),
        kernel(60, 150, correlation_id=2),
        kernel(150, 260, correlation_id=3),
    )
    found = windows_of(host, device, steps((0, 100), (100, 200)))
    assert found.bounds_ns.tolist() == [0, 150, 260]


def test_kernels_launched_before_the_trace_began_belong_to_no_step() -> None:
    host = spans(launch(10, 2))
    device = kernels(kernel(1, 30, correlation_id=1), kernel(40, 60, correlation_id=2))
    found = windows_of(host, device, steps((0, 100)))
    assert found.bounds_ns.tolist() == [30, 60]


def test_a_graph_launch_owns_all_kernels_that_it_replays() -> None:
    host = spans(launch(10, 1, "cudaGraphLaunch"), launch(110, 2, "cudaGraphLaunch"))
    device = kernels(
        *(kernel(20 + 10 * i, 30 + 10 * i, correlation_id=1) for i in range(10)),
        *(kernel(120 + 10 * i, 130 + 10 * i, correlation_id=2) for i in range(10)),
    )
    found = windows_of(host, device, steps((0, 100), (100, 200)))
    assert found.bounds_ns.tolist() == [0, 120, 220]


def test_events_name_their_window_where_a_step_before_has_none() -> None:
    # Step 1 runs nothing, and ends on the host before the device is done with step 0: the windows
    # are of steps 0 and 2, and the event of step 2 is of window 1.
    host = spans(launch(10, 1), launch(210, 2))
    device = kernels(kernel(20, 205, correlation_id=1), kernel(220, 260, correlation_id=2))
    step = steps((0, 100), (100, 200), (200, 300))
    rank = joined(host, device, step)
    assert rank.windows.numbers.tolist() == [0, 2]
    assert rank.event_link["step_index"].to_pylist() == [0, 1]


def test_steps_that_a_file_tells_of_all_devices_end_on_each_of_them_together() -> None:
    # This rank is done at 60 and at 170; others work until 100 and 200.
    device = kernels(kernel(10, 60), kernel(110, 170))
    step = steps((0, 100), (100, 200))
    own = windows_of(TABLES["host_span"].empty(), device, step)
    assert own.bounds_ns.tolist() == [0, 60, 170]
    of_all = with_column(step, "source", pa.array(["span", "span"]).dictionary_encode())
    found = windows_of(TABLES["host_span"].empty(), device, of_all)
    assert found.bounds_ns.tolist() == [0, 100, 200]
