from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chopper.analyzers.causes.counters import join_counters
from chopper.tables import TABLES
from chopper.wording import base_name

MOPS = "SQ_INSTS_VALU_MFMA_MOPS_BF16"
BUSY = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"


def events(*names, kind="kernel"):
    """Device events of these names, one after the other."""
    rows = [
        {
            "start_ns": 100 * i,
            "dur_ns": 50,
            "device_id": 0,
            "stream_id": 7,
            "kind": kind,
            "name": name,
        }
        for i, name in enumerate(names)
    ]
    return pa.Table.from_pylist(rows, schema=TABLES["device_event"].arrow)


def counters(*kernels, counter=MOPS, source="a.csv", device="4", step=None):
    """One row per (name, value)."""
    rows = [
        {
            "source": source,
            "dispatch_id": i,
            "kernel": name,
            "occurrence_id": sum(n == name for n, _ in kernels[:i]),
            "device": device,
            "counter": counter,
            "value": value,
            "unit": None,
            "step": step,
        }
        for i, (name, value) in enumerate(kernels)
    ]
    return pa.Table.from_pylist(rows, schema=TABLES["kernel_counter"].arrow)


def both(*tables):
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks()


def known(values):
    return [None if np.isnan(v) else float(v) for v in values]


def test_kernels_of_one_name_are_joined_in_order():
    found = join_counters(
        events("gemm", "add", "gemm", "gemm"), counters(("gemm", 1), ("gemm", 2), ("gemm", 4))
    )
    # 512 operations each
    assert known(found.performed_flop) == [512, None, 1024, 2048]
    assert found.matched.tolist() == [True, False, True, True]
    assert [f.code for f in found.findings] == ["counters.partial"]


def test_names_that_do_not_occur_as_often_are_not_joined():
    found = join_counters(
        events("gemm", "gemm", "norm"), counters(("gemm", 1), ("gemm", 2), ("gemm", 3), ("norm", 5))
    )
    assert known(found.performed_flop) == [None, None, 5 * 512]
    (finding,) = found.findings
    assert finding.code == "counters.not_matched"
    assert finding.count == 3
    assert "3 of 4 kernels" in finding.message
    assert finding.withholds == ()


def test_counters_of_another_program_withhold_the_claim():
    found = join_counters(events("gemm"), counters(("other", 1)))
    assert not found.matched.any()
    (finding,) = found.findings
    assert finding.withholds == ("compute.counters",)


@pytest.mark.parametrize(
    ("trace", "tool"),
    [
        ("void at::native::f<4, (int)2>(int, float*)", "void at::native::f<4, 2>(int, float *)"),
        ("Cijk_Ailk_Bljk_BBS_BH_MT64x64", "Cijk_Ailk_Bljk_BBS_BH_MT64x64 [clone .kd]"),
        ("vecCopy(double*, int)", "vecCopy(double*, int) (.kd)"),
        ("void at::(anonymous namespace)::f<int>(int)", "f"),
        ("ampere_sgemm_128x64_nn", "ampere_sgemm_128x64_nn"),
    ],
)
def test_names_as_different_tools_write_them(trace, tool):
    if tool == "f":
        assert base_name(trace) == "at::{anonymous}::f"
        return
    assert join_counters(events(trace), counters((tool, 1))).matched.all()


def test_names_by_their_base_only_where_counts_agree():
    trace = events("void f<int>(int)", "void f<float>(float)", "void g<int>(int)")
    # ncu writes only the functions' names.
    found = join_counters(trace, counters(("f", 1), ("f", 2), ("g", 3)))
    assert known(found.performed_flop) == [512, 1024, 3 * 512]
    found = join_counters(trace, counters(("f", 1), ("g", 3)))
    assert known(found.performed_flop) == [None, None, 3 * 512]


def test_what_is_no_kernel_has_no_counters():
    found = join_counters(events("gemm", kind="memcpy"), counters(("gemm", 1)))
    assert not found.matched.any()
    assert [f.code for f in found.findings] == ["counters.not_matched"]


def test_passes_of_a_tool_complete_each_other():
    found = join_counters(
        events("gemm", "gemm"),
        both(
            counters(("gemm", 1), ("gemm", 2)),
            counters(("gemm", 3), ("gemm", 4), source="b.csv", counter=MOPS.replace("BF16", "F16")),
            # A pass that saw less is left out, alone.
            counters(("gemm", 50), source="c.csv", counter=BUSY),
        ),
    )
    assert known(found.performed_flop) == [4 * 512, 6 * 512]
    assert known(found.tensor_busy_ratio) == [None, None]
    assert [f.code for f in found.findings] == ["counters.not_matched"]


def test_several_devices_in_one_file_are_not_told_apart():
    found = join_counters(
        events("gemm", "gemm"),
        both(counters(("gemm", 1)), counters(("gemm", 1), device="5")),
    )
    assert not found.matched.any()
    assert [f.code for f in found.findings] == ["counters.several_devices"]


def test_busy_share_as_each_vendor_counts_it():
    trace = events("gemm")
    found = join_counters(trace, counters(("gemm", 62.5), counter=BUSY))
    assert known(found.tensor_busy_ratio) == [0.625]
    cycles = both(
        counters(("gemm", 1_000_000), counter="SQ_VALU_MFMA_BUSY_CYCLES"),
        counters(("gemm", 16_000), counter="GRBM_GUI_ACTIVE", source="a.csv"),
    )
    # 16 000 / 8 dies * 250 units * 4 SIMDs = 2 000 000 cycles
    found = join_counters(trace, cycles, unit_count=250, die_count=8)
    assert known(found.tensor_busy_ratio) == [0.5]
    # Without the device nobody knows how many units there were.
    assert known(join_counters(trace, cycles).tensor_busy_ratio) == [None]
    # More than there can be: the counters do not fit the device.
    found = join_counters(trace, cycles, unit_count=25, die_count=8)
    assert known(found.tensor_busy_ratio) == [None]


def test_busy_share_of_active_cycles_needs_the_share_of_those():
    active = counters(
        ("gemm", 80.0), counter="sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
    )
    assert known(join_counters(events("gemm"), active).tensor_busy_ratio) == [None]
    whole = both(
        active,
        counters(("gemm", 750), counter="sm__cycles_active.avg"),
        counters(("gemm", 1000), counter="sm__cycles_elapsed.avg"),
    )
    assert known(join_counters(events("gemm"), whole).tensor_busy_ratio) == [pytest.approx(0.6)]


def test_vector_operations_count_where_all_kinds_were_measured():
    parts = [
        counters(("add", value), counter=f"SQ_INSTS_VALU_{kind}_F32")
        for kind, value in (("ADD", 3), ("MUL", 5), ("FMA", 7))
    ]
    # 64 lanes, a fused multiply-add is two
    found = join_counters(events("add"), both(*parts))
    assert known(found.performed_flop) == [64 * (3 + 5 + 14)]
    assert known(join_counters(events("add"), both(*parts[:2])).performed_flop) == [None]


def test_nvidia_operations():
    found = join_counters(
        events("gemm"),
        both(
            counters(("gemm", 1000), counter="sm__ops_path_tensor_src_bf16_dst_fp32.sum"),
            counters(
                ("gemm", 1000), counter="sm__ops_path_tensor_src_bf16_dst_fp32_sparsity_off.sum"
            ),
        ),
    )
    assert known(found.performed_flop) == [1000]


def test_nothing_recorded_says_nothing():
    found = join_counters(events("gemm"), TABLES["kernel_counter"].empty())
    assert not found.matched.any()
    assert found.findings == []


@given(
    st.lists(st.sampled_from("abc"), max_size=12),
    st.lists(st.sampled_from("abc"), max_size=12),
)
def test_a_name_is_joined_whole_or_not_at_all(trace, tool):
    values = [(name, i + 1) for i, name in enumerate(tool)]
    found = join_counters(events(*trace), counters(*values))
    for name in "abc":
        ours = [i for i, n in enumerate(trace) if n == name]
        theirs = [512.0 * v for n, v in values if n == name]
        got = known(found.performed_flop[ours])
        assert got == (theirs if len(ours) == len(theirs) else [None] * len(ours))


def test_counters_of_one_step_are_those_of_each_traced_step():
    """Steps 0 and 1 have the measured kernels, step 2 one more add; outside is nothing."""
    trace = events(
        "gemm", "add", "gemm", "gemm", "add", "gemm", "gemm", "add", "add", "gemm", "add"
    )
    step = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 2, -1])
    measured = both(
        counters(("gemm", 1), ("add", 2), ("gemm", 3), source="step 8", step=8),
        counters(("gemm", 50), ("add", 60), ("gemm", 70), counter=BUSY, source="step 9", step=9),
    )
    found = join_counters(trace, measured, event_step=step)
    in_each = [512, 1024, 1536]
    in_last = [512, None, None, 1536]
    assert known(found.performed_flop) == [*in_each, *in_each, *in_last, None]
    busy = [0.5, 0.6, 0.7]
    assert known(found.tensor_busy_ratio) == [*busy, *busy, 0.5, None, None, 0.7, None]
    # What is said is of a step that matches.
    assert found.findings == []


def test_counters_of_a_step_need_steps():
    measured = counters(("gemm", 1), step=8)
    found = join_counters(events("gemm"), measured)
    assert not found.matched.any()
    found = join_counters(events("gemm"), measured, event_step=np.array([-1]))
    assert not found.matched.any()
    found = join_counters(events("add"), measured, event_step=np.array([0]))
    assert [f.code for f in found.findings] == ["counters.not_matched"]
