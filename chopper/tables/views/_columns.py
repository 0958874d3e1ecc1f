"""Columns of views, said shortly."""

from __future__ import annotations

from chopper.tables._base import Column, ColumnType


def column(name: str, kind: ColumnType, doc: str, unit: str | None = None) -> Column:
    return Column(name=name, type=kind, unit=unit, doc=doc)


def maybe(name: str, kind: ColumnType, doc: str, unit: str | None = None) -> Column:
    """A column that is null where it is not known."""
    return Column(name=name, type=kind, unit=unit, doc=doc, nullable=True)


def ns(name: str, doc: str) -> Column:
    return Column(name=name, type="int64", unit="ns", doc=doc)


def count(name: str, doc: str) -> Column:
    return Column(name=name, type="int64", unit="count", doc=doc)
