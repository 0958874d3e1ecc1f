"""The type of options that name a file or a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class NamedPath(click.Path):
    """A path with a name: an empty one, of an unset variable, would be the current directory."""

    def __init__(self, *, dir_okay: bool = True) -> None:
        super().__init__(path_type=Path, dir_okay=dir_okay)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path.

        Raises:
            click.BadParameter: it has no name.
        """
        if value == "":
            self.fail("an empty name (an unset variable?)", param, ctx)
        return super().convert(value, param, ctx)
