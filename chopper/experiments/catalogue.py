"""The reference workloads: the modules of the folder ``workloads/`` that assign WORKLOAD."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path

import chopper.workloads
from chopper.experiments.declarations import Option, Workload
from chopper.experiments.results import Program
from chopper.quantities import one_of

_MARK = "\nWORKLOAD = "


@cache
def program(name: str) -> Program | None:
    """Load a workload's declaration and functions; None where there is none of this name."""
    if not name.isidentifier() or not any(
        _declares(folder / f"{name}.py") for folder in _folders()
    ):
        return None
    module = importlib.import_module(f"chopper.workloads.{name}")
    optional = {function: getattr(module, function, None) for function in ("headlines", "model")}
    return Program(workload=module.WORKLOAD, needs=module.needs, **optional)


@cache
def workloads() -> dict[str, Workload]:
    """All workloads by name, in the order of their positions."""
    files = (file for folder in _folders() for file in sorted(folder.glob("*.py")))
    programs = (program(file.stem) for file in files if _declares(file))
    listed = sorted((p.workload for p in programs if p), key=lambda w: (w.position, w.name))
    return {workload.name: workload for workload in listed}


def _folders() -> list[Path]:
    return [Path(folder) for folder in chopper.workloads.__path__]


def _declares(file: Path) -> bool:
    """Read, not imported: the modules beside the workloads load torch."""
    return file.is_file() and _MARK in file.read_text(encoding="utf-8")


def find(name: str) -> Workload:
    """Look a workload up by name; UsageError where there is none."""
    declared = program(name) or program(one_of("workload", name, workloads()))
    assert declared is not None
    return declared.workload


def options_of(name: str) -> tuple[Option, ...]:
    """Options of a workload that are the user's to set behind ``--``."""
    return tuple(option for option in find(name).options if not option.hidden)
