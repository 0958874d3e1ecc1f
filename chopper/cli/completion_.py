"""``chopper completion``: the script that makes a shell complete chopper's command lines."""

from __future__ import annotations

import click

from chopper.errors import tell

_INSTALL = {
    "bash": """add to ~/.bashrc:  eval "$(chopper completion bash)\"""",
    "zsh": """add to ~/.zshrc:  eval "$(chopper completion zsh)\"""",
    "fish": "chopper completion fish > ~/.config/fish/completions/chopper.fish",
}


@click.command("completion")
@click.argument("shell", type=click.Choice(list(_INSTALL)))
def command(shell: str) -> None:
    """Print the shell completion script for bash, zsh or fish.

    \b
    Examples:
      eval "$(chopper completion bash)"        in ~/.bashrc
      eval "$(chopper completion zsh)"         in ~/.zshrc
      chopper completion fish > ~/.config/fish/completions/chopper.fish
    """
    from click.shell_completion import get_completion_class

    from chopper.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(cli, {}, "chopper", "_CHOPPER_COMPLETE")
    # Not source(): for bash it runs bash to look at its version, and warns where there is none.
    click.echo(script.source_template % script.source_vars())
    tell(f"to install: {_INSTALL[shell]}")
