"""Detailed tables of an attributed run: one file for each view, which declares itself.

The file's name is the view's name, its docstring describes the view (the first line is shown where
there is room for one), ``VIEW`` declares its table, and a function of the same name fills it.
Modules that begin with an underscore are shared by several views.
"""

from __future__ import annotations

from dataclasses import dataclass

from chopper.tables import Table, column, optional

__all__ = ["SECTIONS", "View", "column", "optional"]

SECTIONS = ("Operators", "Steps and host", "Memory", "Communication", "Critical path", "Clocks")
"""Parts of a report's detailed tables, in their order."""


@dataclass(frozen=True, kw_only=True)
class View(Table):
    """One view: a declared table of an attributed run, most important rows first.

    Its columns stand in order of importance: a narrow terminal shows the first ones. Its
    description is the docstring of its module.

    Attributes:
        title: heading in reports.
        section: one of :data:`SECTIONS`.
        needs: why it has no rows where it has none.
        of_all_ranks: it reads totals only, which a large run has of all ranks; other views are of
            the ranks that are looked at closely.
    """

    title: str
    section: str
    needs: str = ""
    of_all_ranks: bool = False
