from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chopper.analyzers.compare.gate import decide, parse
from chopper.analyzers.compare.runs import compare
from chopper.causes import CAUSES
from chopper.errors import UsageError
from tests.comparing import attribution


@pytest.mark.parametrize(
    ("text", "quantity", "sign", "limit", "relative"),
    [
        ("step>+5%", "step", ">", 0.05, True),
        (" median >= 5%".replace(">=", ">"), "median", ">", 0.05, True),
        ("idle.preparation.data > 1ms", "idle.preparation.data", ">", 1e6, False),
        ("communication<-2.5us", "communication", "<", -2500, False),
        ("compute>.5s", "compute", ">", 5e8, False),
        ("copy>3µs", "copy", ">", 3000, False),
        ("step>0", "step", ">", 0, False),
        ("step<−1%", "step", "<", -0.01, True),
    ],
)
def test_a_condition_is_read(text, quantity, sign, limit, relative) -> None:
    (found,) = parse(text)
    assert (found.quantity, found.sign, found.relative) == (quantity, sign, relative)
    assert found.limit == pytest.approx(limit)
    assert found.text == text.strip()


def test_conditions_are_joined_by_or() -> None:
    found = parse("step>+5% or idle.preparation.data>+1ms or communication>10 %")
    assert [c.quantity for c in found] == ["step", "idle.preparation.data", "communication"]
    assert [c.text for c in found] == [
        "step>+5%",
        "idle.preparation.data>+1ms",
        "communication>10 %",
    ]


@pytest.mark.parametrize(
    ("text", "place", "expected", "found"),
    [
        ("", 1, "step, median, untraced or the id of a cause", "its end"),
        ("step", 5, "> or <", "its end"),
        ("step>>5%", 6, "a number", "'>5%'"),
        ("step>5", 7, "a unit: %, ns, us, ms or s", "its end"),
        ("step>5min", 7, "a unit", "'min'"),
        ("step>1e3ms", 7, "a unit", "'e3ms'"),
        ("step>5% and idle>1ms", 9, "'or' or the end", "'and idle>1ms'"),
        ("step>5% or", 11, "step, median, untraced or the id of a cause", "its end"),
        ("step>5% orchid>1ms", 9, "'or' or the end", "'orchid>1ms'"),
        ("comunication>5%", 1, "(did you mean communication?)", "'comunication>5%'"),
        ("__import__('os')", 1, "the id of a cause", "\"__import__('os')\""),
        ("step>\x1b[31m5%", 6, "a number", r"'\x1b[31m5%'"),
    ],
)
def test_a_bad_expression_names_the_place(text, place, expected, found) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    message = str(caught.value)
    assert f"at character {place} of" in message
    assert expected in message
    assert message.endswith(f"found {found}")
    assert "\n" not in message
    assert message.isprintable()


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused_in_one_line(text) -> None:
    said = None
    try:
        found = parse(text)
    except UsageError as exc:
        said, found = str(exc), ()
    assert said is None or said.isprintable()
    assert all(c.quantity in CAUSES or c.quantity in ("step", "median", "untraced") for c in found)


def _pair():
    a = attribution(
        {"compute.ideal": [1000, 1010, 1000, 1010], "idle.dependency": [100, 90, 110, 100]}
    )
    b = attribution(
        {"compute.ideal": [1100, 1110, 1100, 1110], "idle.dependency": [100, 110, 90, 100]}
    )
    return compare(a, b)


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        ("step>+5%", True),
        ("step>+9.5%", False),  # 9.05 %: below
        ("step>+8.9%", False),  # 9.05 %, but the interval reaches below 8.9 %
        ("median>5%", True),
        ("compute>+50ns", True),
        ("compute>+200ns", False),
        ("idle>0ns", False),  # noise
        ("step>20% or compute.ideal>5%", True),
        ("step<+20%", True),
        ("step<0", False),
        ("copy>1ns", False),
        ("copy<1ns", True),  # neither run copies: a change of 0
        ("copy>5%", False),
    ],
)
def test_a_gate_fails_when_the_whole_interval_is_beyond(text, failed) -> None:
    assert decide(_pair(), parse(text)).failed is failed


def test_by_the_difference_itself() -> None:
    pair = _pair()
    assert decide(pair, parse("step>+8.9%"), point=True).failed
    assert not decide(pair, parse("step>+9.5%"), point=True).failed


def test_no_percentage_of_nothing() -> None:
    a = attribution({"compute.ideal": [100] * 4})
    b = attribution({"compute.ideal": [100] * 4, "copy.memset": [5] * 4})
    (decision,) = decide(compare(a, b), parse("copy>5%")).decisions
    assert decision.outcome == "undecided"
    assert "A spent no time there" in decision.reason
    assert decide(compare(a, b), parse("copy>1ns")).failed


@pytest.mark.parametrize("number", ["9" * 400, "9" * 5000, "1" + "0" * 19])
@pytest.mark.parametrize("unit", ["%", "s", "ns", ""])
def test_a_limit_that_nothing_exceeds_is_refused(number, unit) -> None:
    with pytest.raises(UsageError) as caught:
        parse(f"step>+{number}{unit}")
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)
