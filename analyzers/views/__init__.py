"""Detailed tables of an attributed run: one file for each view, which declares itself.

The file's name is the view's name, the first line of its docstring says what the view shows,
``VIEW`` declares its table, and a function of the same name fills it. Modules that begin with an
underscore are shared by several views.
"""

from __future__ import annotations

from dataclasses import dataclass

from chopper.tables import Table

SECTIONS = ("Operators", "Steps and host", "Memory", "Communication", "Critical path", "Clocks")
"""Parts of a report's detailed tables, in their order."""


@dataclass(frozen=True, kw_only=True)
class View(Table):
    """One view: a declared table of an attributed run, most important rows first.

    Its columns stand in order of importance: a narrow terminal shows the first ones.

    Attributes:
        module_doc: docstring of the view's module; its first line says what the view shows.
        title: heading in reports.
        section: one of :data:`SECTIONS`.
        needs: why it has no rows where it has none.
    """

    module_doc: str | None
    title: str
    section: str
    needs: str = ""

    @property
    def summary(self) -> str:
        """One line for help and reports."""
        return (self.module_doc or "").partition("\n")[0]
