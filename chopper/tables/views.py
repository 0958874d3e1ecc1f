"""Tables of the views: one declaration per entry of :mod:`chopper.views`."""

from __future__ import annotations

from chopper.tables._base import Table

VIEW_TABLES: tuple[Table, ...] = ()
