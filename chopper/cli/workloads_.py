"""``chopper workloads``: what ``chopper bench`` can run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from chopper import wording as fmt
from chopper.cli import _shared as shared
from chopper.cli.output import print_json
from chopper.errors import tell

if TYPE_CHECKING:
    from chopper.experiments.declarations import Variant, Workload

_WIDTH = 100


@click.command("workloads")
@click.argument("workload", required=False, shell_complete=shared.workloads)
@shared.as_json
def command(workload: str | None, as_json: bool) -> None:
    """List the reference workloads, or describe one with its variants and options.

    \b
    Examples:
      chopper workloads
      chopper workloads overlap
      chopper workloads --json | jq '.workloads[].name'
    """
    from chopper.experiments.prepare import find, workloads

    if workload is not None:
        find(workload)
    if as_json:
        names = [*workloads()] if workload is None else [workload]
        print_json({"schema": "chopper.workloads/1", "workloads": [_plain(n) for n in names]})
    elif workload is not None:
        click.echo(described(workload), nl=False)
    else:
        out = click.HelpFormatter(width=_WIDTH)
        out.write_dl([(name, f"{w.summary}. {_facts(w)}.") for name, w in workloads().items()])
        click.echo(out.getvalue(), nl=False)
        tell("next: chopper bench fsdp2 --help")


def described(name: str) -> str:
    """One workload for people: its program, its cost, its options."""
    from chopper.experiments.prepare import find, options_of

    workload = find(name)
    out = click.HelpFormatter(width=_WIDTH)
    out.write_usage("chopper bench", f"{name} [OPTIONS] [-- WORKLOAD OPTIONS]")
    out.write_paragraph()
    with out.indentation():
        out.write_text(f"{workload.summary[:1].upper()}{workload.summary[1:]}.")
        out.write_paragraph()
        out.write_text(f"{_facts(workload)}.")
    if workload.variants:
        with out.section("Variants, chosen by --variants A,B or --variants all"):
            out.write_dl([(v.name, _summary(workload, v)) for v in workload.variants])
    with out.section("Options of the workload, behind --"):
        out.write_dl(
            [
                (
                    f"--{o.name} " + ("|".join(o.choices) if o.choices else "N"),
                    o.help if o.default is None else f"{o.help} [default: {o.default}]",
                )
                for o in options_of(name)
            ]
        )
    out.write_paragraph()
    out.write_text("Options before the --: chopper bench --help")
    return out.getvalue()


def _facts(workload: Workload) -> str:
    """Return time, memory and ranks at its default size, in one line."""
    variants = [v for v in workload.variants if v.default and not v.needs_gpu]
    parts = [fmt.plural(workload.ranks, "rank") + " without GPUs"]
    if workload.experiment:
        times = fmt.plural(workload.repeats, "time")
        parts.append(f"{fmt.plural(len(variants), 'variant')}, {times} each" if variants else times)
    parts.append(f"about {workload.seconds} s on two cores")
    return "; ".join(parts)


def _summary(workload: Workload, variant: Variant) -> str:
    marks = ["the baseline"] * (variant.name == workload.baseline)
    marks += ["needs a GPU"] * variant.needs_gpu
    marks += ["only when named"] * (not variant.default)
    return variant.summary + (f" ({', '.join(marks)})" if marks else "")


def _plain(name: str) -> dict[str, Any]:
    from chopper.experiments.prepare import find, options_of

    workload = find(name)
    fields = ("summary", "module", "ranks", "repeats", "seconds", "baseline")
    of_variant = ("name", "summary", "needs_gpu", "default")
    return {
        "name": name,
        **{field: getattr(workload, field) for field in fields},
        "variants": [{f: getattr(v, f) for f in of_variant} for v in workload.variants],
        "options": [
            {"name": f"--{o.name}", "help": o.help, "default": o.default, "choices": o.choices}
            for o in options_of(name)
        ],
    }
