"""Readers of hardware counters that other tools wrote, as CSV: rocprofv3, rocprof, Nsight Compute.

    rocprofv3 --pmc SQ_INSTS_VALU_MFMA_MOPS_BF16 GRBM_GUI_ACTIVE --output-format csv -- python t.py
    ncu --metrics sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed --csv --page raw …

What a file is, is read from its heading, whatever its name.
"""

from __future__ import annotations

from chopper.collectors.formats.counters._reader import read_counters, sniff, table_of

__all__ = ["read_counters", "sniff", "table_of"]
