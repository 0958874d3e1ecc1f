from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from chopper.collectors.formats.clock_tables import read_clock_tables
from chopper.errors import InputError

HEADING = "stage,instruction,frequency,time,energy\n"
ROWS = "0,forward,1410,0.05,24\n0,backward,1410,0.1,46\n0,forward,855,0.08,20\n"


def test_a_table_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "t.csv.gz"
    # Columns in another order, and one that is not ours.
    file.write_bytes(
        gzip.compress(
            b"energy,note,time,stage,instruction,frequency\n"
            b"20,x,0.08,0,forward,855\n24,y,0.05,0,forward,1410\n\n46,,0.1,0,backward,1410\n"
        )
    )
    forward, backward = read_clock_tables(file)
    assert (forward.stage, forward.instruction) == (0, "forward")
    assert forward.clock_hz.tolist() == [1_410_000_000, 855_000_000]
    assert forward.time_ns.tolist() == [50_000_000, 80_000_000]
    assert forward.power_w.tolist() == [480, 250]
    assert backward.instruction == "backward"
    assert backward.energy_j.tolist() == [46]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected the columns stage,instruction.*found an empty file"),
        ("a,b\n1,2\n", "found 'a,b'"),
        (HEADING, "without a row"),
        (HEADING + "0,forward,1410,0.05\n", "line 2: has 4 cells, expected 5"),
        (HEADING + "0,forward,nan,0.05,1\n", "line 2: frequency in MHz: found 'nan'"),
        (HEADING + "0,forward,1410,-1,1\n", "line 2: time in s: found '-1'"),
        (HEADING + "0,forward,1410,0.05,0\n", "line 2: energy in J: found '0'"),
        (HEADING + "0,forward,1_410,0.05,1\n", "found '1_410'"),
        (HEADING + "0.5,forward,1410,0.05,1\n", "stage 0.5 is not whole"),
        (HEADING + "-1,forward,1410,0.05,1\n", "stage: found '-1'"),
        (HEADING + "0,sideways,1410,0.05,1\n", "instruction 'sideways'; expected forward"),
        (HEADING + ROWS + "0,forward,855,0.08,20\n", "line 5: stage 0, forward at 855 MHz"),
        (HEADING + ROWS + "2,forward,855,0.08,20\n", "no row of stage 1, forward"),
        (HEADING + "0,forward,855,0.08,20\n", "no row of stage 0, backward"),
    ],
)
def test_what_is_no_such_table_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(InputError, match=message) as refused:
        read_clock_tables(file)
    assert str(refused.value).startswith(str(file))
    assert "\n" not in str(refused.value)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.csv.gz"
    file.write_bytes(gzip.compress((HEADING + ROWS).encode())[:-12])
    with pytest.raises(InputError, match="cannot be read"):
        read_clock_tables(file)
    with pytest.raises(InputError, match="cannot be read"):
        read_clock_tables(tmp_path / "missing.csv")


def test_zeus_tables(traces_dir: Path) -> None:
    """Stages and clocks as the catalogue counts its rows."""
    for name, clocks in (("gpt3-175b+a100_sxm", 38), ("bloom+a100_sxm", 38), ("gpt3-175b+a40", 60)):
        tables = read_clock_tables(
            traces_dir / "zeus" / f"stage-frequency-time-energy-{name}_bf16.csv.gz"
        )
        assert len(tables) == 16
        assert {len(table.clock_hz) for table in tables} == {clocks}
