from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chopper.arrow import to_arrow

_CASES = [
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text(st.characters(exclude_categories=["Cs"]))),
    (
        pa.dictionary(pa.int32(), pa.string()),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=2),
    ),
]


@pytest.mark.parametrize(("kind", "values"), _CASES, ids=lambda c: str(c))
def test_arrays_hold_what_went_in(kind: pa.DataType, values: st.SearchStrategy[object]) -> None:
    @given(st.lists(st.none() | values, max_size=20))
    def check(given_values: list[object]) -> None:
        built = to_arrow(given_values, kind)
        built.validate(full=True)
        assert built.type == kind
        assert built.to_pylist() == given_values
        assert built.null_count == sum(v is None for v in given_values)

    check()


def test_recording_loads_no_pandas(tmp_path) -> None:
    code = (
        "import sys; from pathlib import Path; from chopper.storage.streams import StreamWriter\n"
        f"w = StreamWriter(Path({str(tmp_path / 'nic.arrow')!r}), 'nic')\n"
        "w.write({'time_ns': [1], 'span_ns': [None], 'interface': ['eth0'], 'rx_bytes': [None],"
        " 'tx_bytes': [2]}); w.close()\n"
        "assert 'pandas' not in sys.modules, 'pandas was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
