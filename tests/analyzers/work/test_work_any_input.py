"""Whatever a trace records, the FLOP and byte model has an answer or a reason."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from chopper.analyzers.work import MODELS, estimate
from tests.analyzers.work.work_records import HALF, sound

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**20) | st.floats() | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=20,
)
shapes = st.lists(
    st.lists(st.integers(0, 9) | st.lists(st.integers(0, 9), max_size=3), max_size=5), max_size=12
)
type_names = st.lists(
    st.sampled_from(
        ["float", HALF, "long int", "Scalar", "ScalarList", "TensorList", "", "nonsense", "bool"]
    ),
    max_size=14,
)
concretes = st.lists(
    st.sampled_from(
        [
            "",
            "True",
            "False",
            "0",
            "1",
            "-1",
            "[1, 1]",
            "[0]",
            "[]",
            "[True, False]",
            "[",
            "9" * 40,
            "1.5",
        ]
    )
    | st.text(max_size=6),
    max_size=16,
)
names = st.sampled_from(
    [*sorted(MODELS), "aten::_foreach_add_", "triton_poi_x", "triton_red_y", "triton_tem_mm_z"]
)


@given(st.text(), *[st.none() | st.text()] * 3)
def test_any_text_is_answered(
    name: str, dims: str | None, types: str | None, values: str | None
) -> None:
    sound(estimate(name, dims, types, values))


@given(names, *[st.none() | st.text() | json_values.map(json.dumps)] * 3)
def test_any_json_is_answered(
    name: str, dims: str | None, types: str | None, values: str | None
) -> None:
    sound(estimate(name, dims, types, values))


@settings(max_examples=400)
@given(
    names,
    shapes,
    type_names,
    st.none() | concretes,
    st.none() | st.lists(st.integers(0, 9), max_size=5),
)
def test_any_plausible_record_is_answered(
    name: str, dims: list[Any], types: list[str], values: list[str] | None, out: list[int] | None
) -> None:
    known = {} if out is None else {"output_dims": tuple(out)}
    text = None if values is None else json.dumps(values)
    sound(estimate(name, json.dumps(dims), json.dumps(types), text, **known))


def test_deeply_nested_json_is_answered() -> None:
    work = estimate("aten::mm", "[" * 100_000, None, None)
    assert work is not None
    assert work.reason == "Input Dims is not valid JSON"


def test_shapes_that_no_operator_has_are_not_believed() -> None:
    types = '["float", "float"]'
    for rows, known in ((2**30, True), (2**50, False), (2**62, False)):
        work = estimate("aten::mm", f"[[{rows}, 64], [64, 64]]", types, None)
        assert work is not None
        assert (work.flop_count == 2 * rows * 64 * 64) is known
        assert (work.reason is None) is known
