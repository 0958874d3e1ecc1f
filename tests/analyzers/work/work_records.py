"""What a trace records of an operator, and what the FLOP and byte model makes of it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from chopper.analyzers.work import Work, estimate


class Recorded(NamedTuple):
    name: str
    dims: str | None
    types: str | None
    concrete: str | None

    def work(self, **known: Any) -> Work | None:
        return estimate(self.name, self.dims, self.types, self.concrete, **known)


def of(
    name: str,
    dims: list[Any],
    types: str | list[str],
    concrete: list[str] | None = None,
    **known: Any,
) -> Work:
    """estimate() of hand-written arguments; one type name stands for all tensors."""
    if isinstance(types, str):
        types = [types if size else "Scalar" for size in dims]
    text = None if concrete is None else json.dumps(concrete)
    work = estimate(name, json.dumps(dims), json.dumps(types), text, **known)
    assert work is not None
    return work


def is_op(event: Any) -> bool:
    return isinstance(event, dict) and event.get("cat") in ("cpu_op", "Operator")


def recorded(event: dict[str, Any]) -> Recorded:
    args = event.get("args", {})

    def text(*keys: str) -> str | None:
        return next((json.dumps(args[key]) for key in keys if key in args), None)

    return Recorded(
        event["name"],
        text("Input Dims", "Input dims"),
        text("Input type"),
        text("Concrete Inputs"),
    )


HALF = "c10::BFloat16"


def sound(work: Work | None) -> None:
    if work is None:
        return
    counts = (work.flop_count, work.useful_flop_count, work.bytes_count, work.unsized_element_count)
    assert all(count is None or (type(count) is int and count >= 0) for count in counts)
    assert (work.flop_count is None) == (work.useful_flop_count is None)
    if work.flop_count is not None and work.useful_flop_count is not None:
        assert work.useful_flop_count <= work.flop_count
    expected = work.bytes_count if work.family == "vector" else work.flop_count
    assert expected is not None or work.reason
