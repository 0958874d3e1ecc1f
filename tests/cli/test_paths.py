from __future__ import annotations

import pytest
from click.testing import CliRunner

from chopper.cli import cli


@pytest.mark.parametrize(
    "words",
    [
        ["record", "-o", "", "--", "true"],
        ["run", "fsdp2", "-o", ""],
        ["import", "trace.json", "-o", ""],
        ["report", "run", "-o", ""],
        ["export", "run", "--to", "csv", "-o", ""],
        ["compare", "a", "b", "-o", ""],
        ["calibrate", "-o", ""],
        ["estimate", "memory", "llama3-8b", "-o", ""],
    ],
    ids=lambda words: words[0],
)
def test_an_empty_name_is_not_the_current_directory(words, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2
    assert "'-o' / '--output': an empty name (an unset variable?)" in done.stderr
    assert not list(tmp_path.iterdir())
