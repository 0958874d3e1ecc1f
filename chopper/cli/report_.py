"""``chopper report``: write a run's report; the format follows the extension."""

from __future__ import annotations

import itertools
from pathlib import Path

import click

from chopper import wording as fmt
from chopper.cli import _shared as shared
from chopper.cli.output import print_path, progress
from chopper.errors import tell
from chopper.storage.layout import is_experiment


@click.command("report", cls=shared.Command)
@shared.runs
@shared.read_options
@shared.report_output("File to write", "  [default: report.html, or report-2.html …]")
@click.option("--open", "open_it", is_flag=True, help="Open the report in the browser.")
def command(sources: tuple[str, ...], output: Path | None, force: bool, open_it: bool) -> None:
    """Write the report of a run as one file that needs no network.

    RUN is a run directory, a trace file, a glob, or a directory of traces; several traces of the
    same run are joined. For an experiment of "chopper bench", the report shows what its variants
    measured.

    \b
    Examples:
      chopper report runs/mine
      chopper report runs/mine -o mine.html --force --open
      chopper report "traces/rank*.json.gz" -o summary.md
    """
    if output is None:
        names = (f"report-{n}.html" if n > 1 else "report.html" for n in itertools.count(1))
        output = next(path for path in map(Path, names) if force or not path.exists())
    kind = shared.check_report(output, sources, force=force)
    messages: list[str] = []
    text = _rendered(sources, kind, messages)
    with progress("writing the report"):
        size_bytes = shared.write_report(output, text)
    for number, line in enumerate(messages):
        tell(f"- {line}" if number else line)
    print_path(output)
    named = [*sources, *shared.typed_read_options()]
    if kind == "html" and not open_it:
        words = "chopper report {RUN} -o {FILE} --force --open"
        following = f"open it in a browser, or: {fmt.next_command(words, RUN=named, FILE=[output])}"
    else:
        words = "chopper analyze {RUN} --by kernel"
        following = f"next: {fmt.next_command(words, RUN=named)}"
    tell(f"{fmt.bytes_(size_bytes)} written; {following}")
    if open_it:
        click.launch(output.resolve().as_uri())


def _rendered(sources: tuple[str, ...], kind: str, messages: list[str]) -> str:
    """Return the report of a run, or of an experiment, and add what a terminal says of it."""
    from chopper import reports

    if len(sources) == 1 and is_experiment(Path(sources[0])):
        from chopper.experiments import loading
        from chopper.reports import experiment as page

        shared.check_of_experiments("sources", "output", "force", "open_it")
        with progress("attributing"):
            comparison = loading.load(Path(sources[0]))
        rendered = page.page(comparison)
        messages.append(rendered.headline)
        return reports.formatted(lambda: rendered, comparison.to_dict, kind)
    attribution = shared.attributed(sources)
    with progress("rendering"):
        return reports.render(attribution, kind, messages)
