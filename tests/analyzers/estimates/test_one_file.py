"""An estimate is one file: what is asked, what is computed, and the page that shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from chopper.cli import cli, estimates
from chopper.errors import UsageError

FILE = '''\
"""How long a checkpoint takes."""

from typing import Annotated, ClassVar

from chopper.analyzers.estimates import Estimate, Option
from chopper.cli import _options
from chopper.reports.estimate import estimate_page, values
from chopper.reports.page import Page
from chopper.wording import duration


class Options(_options.Options, kw_only=True, frozen=True):
    """Show how long a checkpoint of a size takes to write."""

    size_bytes: Annotated[int, Option("Of the checkpoint.")] = 10**9
    disk_bytes_per_s: Annotated[float, Option("At which the disk writes.")] = 2e9


class Checkpoint(Estimate, kw_only=True, frozen=True):
    SCHEMA: ClassVar[str] = "chopper.estimate.checkpoint/1"

    write_s: float


def estimate(options: Options) -> Checkpoint:
    return Checkpoint(
        assumptions=("nothing else writes",),
        write_s=options.size_bytes / options.disk_bytes_per_s,
    )


def page(result: Checkpoint) -> Page:
    return estimate_page(
        result,
        title="Checkpoint",
        headline=f"{duration(result.write_s * 1e9)} to write.",
        limit="the disk",
        assumes="nothing else writes",
        remedy="a faster --disk",
        facts=["one file"],
        figures=[],
        sections=[values("Time", [("to write", duration(result.write_s * 1e9))])],
    )
'''


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["estimate", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_file_adds_an_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoint.py").write_text(FILE, encoding="utf-8")
    monkeypatch.setattr(estimates, "__path__", [*estimates.__path__, str(tmp_path)])
    listed = run("--help")
    assert "How long a checkpoint takes." in listed
    assert listed.index("\n  memory ") < listed.index("\n  cost ") < listed.index("\n  checkpoint ")
    asked = run("checkpoint", "--help")
    assert "Show how long a checkpoint of a size takes to write." in asked
    assert "--size SIZE" in asked
    assert "[default: 2GB/s]" in asked
    text = run("checkpoint", "--size", "8GB")
    assert text.startswith("4.00 s to write.\n- Limit: the disk\n")
    text = run("checkpoint", "--size", "8GB", "--details")
    assert "4.00 s to write." in text
    assert "nothing else writes" in text
    written = run("checkpoint", "--size", "8GB", "--disk", "1GB/s", "--json")
    assert json.loads(written) == {
        "schema": "chopper.estimate.checkpoint/1",
        "assumptions": ["nothing else writes"],
        "write_s": 8.0,
    }
    run("checkpoint", "--size", "8GB", "-o", str(tmp_path / "page.html"))
    assert "Checkpoint" in (tmp_path / "page.html").read_text(encoding="utf-8")
    with pytest.raises(UsageError, match="--size '8Gb'"):
        run("checkpoint", "--size", "8Gb")
