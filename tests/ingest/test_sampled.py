"""Sampled stacks become spans that nest with those that were recorded."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from chopper.ingest.sampled import with_samples
from tests.analyzers.make import span, spans, table


def sample(at: int, function: str | None, library: str | None = None, data: bool = False) -> Any:
    return {"time_ns": at, "tid": 1, "function": function, "library": library, "is_data": data}


def added(host: pa.Table, *samples: Any, **more: pa.Table) -> list[tuple[int, int, str]]:
    tables = with_samples({"host_span": host, "python_sample": table("python_sample", [*samples])})
    rows = tables["host_span"].to_pylist()
    before = [(r["start_ns"], r["dur_ns"], r["name"]) for r in host.to_pylist()]
    after = [(r["start_ns"], r["dur_ns"], r["name"]) for r in rows]
    assert [row for row in after if row in before] == before
    assert after == sorted(after, key=lambda r: (r[0], -r[1]))
    return [(a, a + n, name) for a, n, name in after if (a, n, name) not in before]


STEP = span(0, 1000, "ProfilerStep#0", "annotation")
FORWARD = span(600, 1000, "chopper::forward")


def test_samples_that_agree_are_a_span_up_to_the_next_region() -> None:
    """An operator that runs where the function changes is of the function before."""
    host = spans(STEP, span(290, 340, "aten::stack"), FORWARD, span(700, 900, "aten::mm"))
    found = added(
        host,
        sample(100, "a.py(1): load", data=True),
        sample(200, "a.py(1): load", data=True),
        sample(400, "a.py(9): log", "lib.py(3): write"),
        sample(650, "a.py(5): forward"),
    )
    assert found == [
        (0, 340, "chopper::data"),
        (0, 340, "a.py(1): load"),
        (340, 600, "a.py(9): log"),
        (340, 600, "lib.py(3): write"),
        (600, 1000, "a.py(5): forward"),
    ]


def test_times_between_the_same_regions_are_shared_out_as_samples_are() -> None:
    """Ten pauses between modules: four have a sample, one of them in a logger."""
    layers = [span(100 * i, 100 * i + 40, "chopper::layer::a") for i in range(11)]
    host = spans(span(0, 2000, "loop", "annotation"), *layers)
    at = (60, 360, 560, 960)
    found = added(host, *(sample(t, "a.py(9): log" if t == 360 else "a.py(1): act") for t in at))
    lengths = {name: sum(e - b for b, e, n in found if n == name) for _, _, name in found}
    assert sum(lengths.values()) == 600
    assert lengths["a.py(9): log"] in (120, 180)  # a quarter, in pauses of 60


def test_a_trace_with_stacks_or_of_another_thread_stays_as_it_is() -> None:
    with_stacks = spans(STEP, span(10, 20, "a.py(1): load", "python"))
    assert added(with_stacks, sample(15, "a.py(1): load")) == []
    other = spans({**STEP, "tid": 2})
    assert added(other, sample(15, "a.py(1): load")) == []


def test_collectives_keep_their_rows() -> None:
    host = spans(STEP, span(500, 600, "gloo:all_reduce", "annotation"))
    collective = table("collective", [{"source": "host_span", "row": 1}])
    samples = table("python_sample", [sample(100, "a.py(1): load")])
    found = with_samples({"host_span": host, "python_sample": samples, "collective": collective})
    row = found["collective"]["row"][0].as_py()
    assert found["host_span"]["name"][row].as_py() == "gloo:all_reduce"


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 30), st.booleans()), max_size=12),
    st.lists(st.tuples(st.integers(-5, 110), st.sampled_from("ab"), st.booleans()), min_size=1),
)
def test_added_spans_overlap_no_operator_in_part(
    recorded: list[tuple[int, int, bool]], taken: list[tuple[int, str, bool]]
) -> None:
    rows, until = [span(0, 200, "ProfilerStep#0", "annotation")], 0
    for start, length, works in recorded:  # one after the other
        rows.append(
            span(until + start, until + start + length, "aten::mm" if works else "chopper::forward")
        )
        until += start + length
    rows[0]["dur_ns"] = until + 200
    found = added(spans(*rows), *(sample(at, name, data=data) for at, name, data in taken))
    for low, high, _ in found:
        for row in rows:
            a, b = row["start_ns"], row["start_ns"] + row["dur_ns"]
            assert high <= a or low >= b or (a <= low and high <= b) or (low <= a and b <= high)
