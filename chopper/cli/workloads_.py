"""``chopper workloads``: what ``chopper run`` can run."""

from __future__ import annotations

import json

import click


@click.command("workloads", short_help="List the reference workloads and their options.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(as_json: bool) -> None:
    """List the reference workloads and their options.

    \b
    Examples:
      chopper workloads
      chopper workloads --json | jq '.workloads[].name'
    """
    from chopper._workloads import WORKLOADS, OptionInfo, options_of

    described = [
        {
            "name": name,
            "summary": workload.summary,
            "module": workload.module,
            "ranks": workload.ranks,
            "options": [
                {
                    "name": f"--{option.name}",
                    "help": option.help,
                    "default": option.default,
                    "choices": option.choices,
                }
                for option in options_of(name)
            ],
        }
        for name, workload in WORKLOADS.items()
    ]
    if as_json:
        document = {"schema": "chopper.workloads/1", "workloads": described}
        click.echo(json.dumps(document, indent=2))
        return

    def rows(options: tuple[OptionInfo, ...]) -> list[tuple[str, str]]:
        return [
            (
                f"--{o.name} " + ("|".join(o.choices) if o.choices else "N"),
                f"{o.help} [default: {o.default}]",
            )
            for o in options
        ]

    # Workloads with the same options are shown together, their options once.
    together: dict[tuple[OptionInfo, ...], list[str]] = {}
    for name in WORKLOADS:
        together.setdefault(options_of(name), []).append(name)
    for options, names in together.items():
        out = click.HelpFormatter(width=100)
        out.write_dl(
            [
                (n, f"{WORKLOADS[n].summary} (ranks without GPUs: {WORKLOADS[n].ranks})")
                for n in names
            ]
        )
        with out.section("Options, behind --"):
            out.write_dl(rows(options))
        click.echo(out.getvalue(), nl=False)
    click.echo("next: chopper run fsdp2 --ranks 2 -- --sequence 512", err=True)
