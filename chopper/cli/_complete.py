"""Completions that the shell offers where click cannot guess them from an argument's type."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click
    from click.shell_completion import CompletionItem


def paths(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Files and directories: runs and traces."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(typed, type="file")]


def tables(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
    """Names of the declared tables."""
    from chopper.tables import TABLES
    from chopper.views import VIEWS

    return [name for name in (*TABLES, *VIEWS) if name.startswith(typed)]


def workloads(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
    """Names of the reference workloads."""
    from chopper.experiments import catalogue

    return [name for name in catalogue.workloads() if name.startswith(typed)]
