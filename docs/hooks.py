"""Makes the pages that describe the program from the program: commands, tables, causes, peaks.

MkDocs calls the ``on_*`` functions. Nothing is written into the source tree.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
# The program of this checkout is described, wherever another one may be installed.
sys.path.insert(0, str(ROOT))

from chopper.analyzers import detectors  # noqa: E402
from chopper.analyzers.work import BY_PREFIX, MODELS, family  # noqa: E402
from chopper.causes import CAUSES, LEAVES  # noqa: E402
from chopper.claims import CLAIMS, withheld  # noqa: E402
from chopper.cli import cli  # noqa: E402
from chopper.cli._shared import is_rare  # noqa: E402
from chopper.hardware.devices import (  # noqa: E402
    DTYPES,
    Sourced,
    host_link_of,
    known_devices,
    known_host_links,
)
from chopper.reports import tables as result_tables  # noqa: E402
from chopper.reports import verdict as verdict_report  # noqa: E402
from chopper.storage.findings import checks as known_checks  # noqa: E402
from chopper.tables import GROUPS, TABLES, Table  # noqa: E402
from chopper.views import in_sections  # noqa: E402
from docs import gallery  # noqa: E402

COMMANDS = cli.list_commands(click.Context(cli))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put commands, in the order of ``chopper --help``, and patterns into the navigation."""
    made = {
        "@commands": [{f"chopper {name}": f"commands/{name}.md"} for name in COMMANDS],
        "@detectors": [
            {spoken(name): f"detectors/{name}.md"} for name in sorted(detectors.declared())
        ],
    }
    for section in config.nav or []:
        for pages in section.values():
            for entries in (entries for page in pages for entries in _sections(page)):
                if isinstance(entries[-1], str):
                    entries[-1:] = made.get(entries[-1], entries[-1:])
    return config


def _sections(entry: Any) -> list[list[Any]]:
    """Return the lists of pages below an entry of the navigation."""
    below = entry.values() if isinstance(entry, dict) else ()
    return [pages for pages in below if isinstance(pages, list)]


def spoken(name: str) -> str:
    """An identifier as a heading."""
    return name.replace("_", " ").capitalize()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {f"commands/{name}.md": command_page(name) for name in COMMANDS}
    pages["reference/causes.md"] = causes_page()
    pages["reference/tables.md"] = tables_page()
    pages["reference/device-peaks.md"] = peaks_page()
    pages["reference/views.md"] = views_page()
    pages["reference/checks.md"] = checks_page()
    pages |= detector_pages()
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        # Links into docs/ are right in the repository; on the site the pages are neighbours.
        text = (ROOT / name).read_text(encoding="utf-8")
        pages[name.lower()] = text.replace("](docs/", "](")
    for path, content in (*pages.items(), *gallery.files()):
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Fill the one marker that a written page may hold."""
    if page.file.src_uri == "reference/json.md":
        return markdown.replace("<!-- generated: attribution -->", attribution_example())
    if page.file.src_uri == "concepts/work.md":
        return markdown.replace("<!-- generated: work models -->", work_models())
    return markdown


def work_models() -> str:
    """The models of FLOP and bytes, family by family."""
    headings = {
        "gemm": "Matrix products",
        "conv": "Convolutions",
        "sdpa": "Attention",
        "moe": "Mixtures of experts",
        "vector": "Memory-bound work",
    }
    entries: dict[str, dict[str, list[str]]] = {kind: {} for kind in headings}
    named: list[tuple[str, str, Any]] = [
        (name, family(name) or "", model) for name, model in MODELS.items()
    ]
    named += [(f"{prefix}*", kind, model) for prefix, kind, model in BY_PREFIX]
    for name, kind, model in named:
        counts = (inspect.getdoc(getattr(model, "func", model)) or "").split("\n\n")[0]
        entries[kind].setdefault(" ".join(counts.split()), []).append(name)
    parts = []
    for kind, heading in headings.items():
        rows: list[tuple[object, ...]] = [
            (counts, ", ".join(f"`{name}`" for name in sorted(names)))
            for counts, names in sorted(
                entries[kind].items(), key=lambda entry: (-len(entry[1]), entry[0])
            )
        ]
        parts.append(f"### {heading}\n\n" + table(("what is counted", "operators"), rows))
    return "\n\n".join(parts)


def cell(text: object) -> str:
    """Text for a cell of a Markdown table; unknown is a dash."""
    if text is None or text == "":
        return "–"
    return markup(str(text)).replace("|", "\\|").replace("\n", " ")


def markup(text: str) -> str:
    """Text as Markdown: what looks like a tag is text, also outside of code."""
    parts = text.split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


def table(header: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> str:
    """A Markdown table."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cell(c) for c in line) + " |" for line in lines) + "\n"


def command_page(name: str) -> str:
    """What ``chopper NAME --help`` says, as a page."""
    command = cli.get_command(click.Context(cli), name)
    if command is None:
        raise PluginError(f"chopper --help lists {name}, and there is no such command")
    parent = click.Context(cli, info_name="chopper")
    context = click.Context(command, info_name=name, parent=parent)
    parts = described(command, context, f"chopper {name}", level=1)
    if isinstance(command, click.Group):
        for sub in command.list_commands(context):
            found = command.get_command(context, sub)
            if found is None:
                raise PluginError(
                    f"chopper {name} --help lists {sub}, and there is no such command"
                )
            of_sub = click.Context(found, info_name=sub, parent=context)
            parts += described(found, of_sub, f"chopper {name} {sub}", level=2)
    return "\n\n".join(parts) + "\n"


def described(
    command: click.Command, context: click.Context, title: str, *, level: int
) -> list[str]:
    """A command's heading, usage, help and options, as parts of a page."""
    usage = " ".join(command.collect_usage_pieces(context))
    parts = [f"{'#' * level} {title}", f"```\n{title} {usage}\n```", help_text(command.help)]
    rows: list[tuple[object, ...]] = []
    for parameter in sorted(command.get_params(context), key=is_rare):
        record = parameter.get_help_record(context)
        # Arguments without a word of help stand in the usage line.
        if record is not None and record[1]:
            rows.append((f"`{record[0]}`", record[1]))
    if rows:
        parts += [f"{'#' * (level + 1)} Options", table(("option", "meaning"), rows)]
    return parts


def help_text(text: str | None) -> str:
    r"""Click's help as Markdown: what follows ``\b`` keeps its lines."""
    parts = []
    for paragraph in inspect.cleandoc(text or "").split("\n\n"):
        if not paragraph.startswith("\b\n"):
            parts.append(markup(paragraph))
            continue
        lines = paragraph.removeprefix("\b\n").splitlines()
        if lines[0].endswith(":") and not lines[0].startswith(" "):
            parts.append(f"## {lines.pop(0).removesuffix(':')}")
        indent = min((len(line) - len(line.lstrip()) for line in lines if line), default=0)
        parts.append("```\n" + "\n".join(line[indent:] for line in lines) + "\n```")
    return "\n\n".join(parts)


def causes_page() -> str:
    """The tree of causes."""
    parts = [
        "# Causes",
        f"Every nanosecond of every step window belongs to exactly one of the {len(LEAVES)} "
        "**leaf** causes; a parent is the sum of the leaves below it. Ids are stable: they stand "
        "in [JSON output](json.md) and in the [`piece` table](tables.md#piece). "
        "[How attribution works](../concepts/attribution.md) says how each is found.",
    ]
    rows: list[tuple[object, ...]] = []
    for id_, cause in CAUSES.items():
        if "." not in id_ and rows:
            parts.append(table(("id", "label", "kind", "meaning"), rows))
            rows = []
        if "." not in id_:
            parts.append(f"## {cause.label}")
        kind = "leaf" if id_ in LEAVES else "sum"
        rows.append((f"`{id_}`", cause.label, kind, cause.doc))
    parts.append(table(("id", "label", "kind", "meaning"), rows))
    return "\n\n".join(parts) + "\n"


def tables_page() -> str:
    """The data dictionary."""
    parts = [
        "# Tables",
        "A run is a set of typed tables. Times are integer nanoseconds of Unix time; units stand "
        "in the names (`_ns _bytes _hz _w _j _c _flop _ratio _count _id`); unknown is null. "
        "`string` columns are dictionary-encoded, `text` is plain UTF-8; Parquet files and "
        "[SQL](../concepts/sql.md) have plain strings, and `rank` and `row` before the columns of "
        "single ranks. `chopper schema` prints the same from the command line.",
    ]
    groups: tuple[tuple[str, str, tuple[Table, ...]], ...] = (
        ("From kernel traces", "One set per rank.", GROUPS["trace"]),
        (
            "Telemetry",
            "Written while the run goes on, one set per rank.",
            GROUPS["telemetry"],
        ),
        (
            "Torch's allocator",
            "From a snapshot, or recorded with `memory=True`.",
            GROUPS["memory"],
        ),
        ("Derived by analysis", "Safe to delete: they are recomputed.", GROUPS["analysis"]),
        (
            "Views",
            "[Detailed tables](views.md) of a run, computed on demand.",
            tuple(in_sections()),
        ),
    )
    for title, text, tables in groups:
        parts += [f"## {title}", text]
        for declared in tables:
            rows: list[tuple[object, ...]] = [
                (f"`{c.name}`", c.type, c.unit, "yes" if c.nullable else "", c.doc)
                for c in declared.columns
            ]
            parts += [
                f"### `{declared.name}` {{ #{declared.name} }}",
                f"{declared.doc} Version {declared.version}.",
                table(("column", "type", "unit", "null", "meaning"), rows),
            ]
    return "\n\n".join(parts) + "\n"


def views_page() -> str:
    """The detailed tables that ``--view`` prints."""
    parts = [
        "# Views",
        "A view is a detailed table of an attributed run. The HTML report shows all that have rows "
        "under *Detailed tables*; the command line prints one:",
        "```\nchopper analyze RUN --view operations             # the first 20 rows, as text\n"
        "chopper analyze RUN --view operations --top 100\n"
        "chopper analyze RUN --view operations --csv       # all rows and columns\n"
        "chopper analyze RUN --view operations --json | jq '.rows[0]'\n```",
        "The most important rows come first. In text, columns that do not fit are named below the "
        "table; columns without a value are omitted. The JSON form has the schema "
        "`chopper.view.NAME/VERSION`: an object with `schema`, `rows` (one object per row, the "
        "columns of the [declared table](tables.md) as keys) and, when there are no rows, "
        "`reason`. In Python, `chopper.views.view(attribution, NAME)` returns the Arrow table.",
        "Most views are queries. `chopper analyze RUN --view my_view.sql` prints one of your own: "
        "[how to copy and change a view](../concepts/sql.md#a-view-of-your-own).",
        table(
            ("view", "what it shows", "no rows when"),
            [
                (
                    f"[`{v.name}`](tables.md#{v.name})",
                    v.summary,
                    v.needs or "nothing ran on the device",
                )
                for v in in_sections()
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


_RECURS = (
    " If fewer than three steps were traced and their numbers are below 3, it is listed as not "
    "certain: a first iteration shows it in any run."
)


def verdict_classes() -> str:
    """Return the table of what can bound a run."""
    rows = [
        (f"`{name}`", one.sentence.format(share="N %", unit="step", rank="R"))
        for name, one in verdict_report.classes().items()
    ]
    return table(("class", "sentence"), rows)


def detector_pages() -> dict[str, str]:
    """One page for each pattern that is looked for, and the list of them."""
    rows: list[tuple[object, ...]] = []
    pages = {}
    for name in sorted(detectors.declared()):
        known = detectors.detector(name)
        rows.append((f"[{spoken(name)}]({name}.md)", markup(known.condition)))
        parts = [
            f"# {spoken(name)}",
            f"In JSON: `{name}`.",
            f"**Reported when.** {markup(known.condition)} Also, more than 1 % of the time would "
            "be saved, in more than one step." + ("" if known.in_every_step else _RECURS),
            f"**Prediction.** Without it, {markup(known.without)}. "
            "[How the replay works](../concepts/replay.md).",
            "**How to try it.** " + remedy(known.remedy, known.remedies),
            f"**Evidence.** `chopper analyze RUN --view {known.view}` shows the rows "
            f"([columns](../reference/tables.md#{known.view})).",
        ]
        pages[f"detectors/{name}.md"] = "\n\n".join(parts) + "\n"
    pages["detectors/index.md"] = "\n\n".join(
        [
            "# What to try first",
            "`chopper analyze`, `report`, the JSON form and `attribution.verdict` in Python begin "
            "with one sentence: what bounds the run. It follows from the causes of a step, from "
            "the phases of the whole loop (evaluation, checkpoints, start-up) and from why ranks "
            "wait for each other. Compute bounds a run if it takes two thirds of the step, or "
            "nothing else takes a fifth; otherwise the largest other class does.",
            verdict_classes(),
            "## Actions",
            "Actions follow, ranked by recoverable time: how much shorter a step would be without "
            "the pattern, by a [replay](../concepts/replay.md) of the run. Each names its place, "
            "its evidence and the table with its rows. A pattern that costs nothing is not an "
            "action: a loop of `.item()` calls that the device hides, for example. What was seen "
            "but is not certain is listed with the reason. If no action is certain, the largest "
            "causes follow, each with its place and its remedy.",
            "The prediction is checked where the truth is known: a job is simulated with and "
            "without the pattern, and the predicted saving is within 3 % of the difference "
            "(`pytest tests/analyzers/detectors`).",
            table(("pattern", "what it is"), rows),
        ]
    )
    return pages


def remedy(text: str, by_case: dict[str, str]) -> str:
    """A pattern's remedy, or those by case."""
    if text != "{how}":
        return markup(text)
    cases = [f"- `{case}`: {markup(how)}" for case, how in by_case.items()]
    return "\n\n" + "\n".join(cases)


def peaks_page() -> str:
    """What is known of devices, value by value with its source."""
    devices = known_devices()
    overview: list[tuple[object, ...]] = []
    sections = []
    for device in devices:
        overview.append(
            (
                f"[{device.label}](#{device.id})",
                scaled(device.peak_flop_per_s["bf16"], 1e12),
                scaled(device.peak_flop_per_s["fp16"], 1e12),
                scaled(device.peak_flop_per_s["fp8"], 1e12),
                scaled(device.peak_flop_per_s["fp32"], 1e12),
                scaled(device.memory_bandwidth_bytes_per_s, 1e9),
                scaled(device.link_bytes_per_s, 1e9),
                "–" if (link := host_link_of(device)) is None else link.label,
            )
        )
        rates: list[tuple[object, ...]] = [
            (
                f"`{dtype}`",
                scaled(device.peak_flop_per_s[dtype], 1e12),
                scaled(device.reference_clock_hz[dtype], 1e6),
                scaled(device.flop_per_clock_per_unit[dtype], 1),
                device.source(dtype),
            )
            for dtype in DTYPES
        ]
        rest: list[tuple[object, ...]] = [
            (name, scaled(value, unit), provenance(value))
            for name, value, unit in (
                (f"{device.unit_kind}s", device.units, 1),
                ("dies (XCD)", device.dies, 1),
                (f"threads per {device.unit_kind}", device.threads_per_unit, 1),
                (f"blocks per {device.unit_kind}", device.blocks_per_unit, 1),
                (f"registers per {device.unit_kind}", device.registers_per_unit, 1),
                (
                    f"shared memory per {device.unit_kind}, KiB",
                    device.shared_memory_bytes_per_unit,
                    2**10,
                ),
                ("memory, GiB", device.memory_bytes, 2**30),
                *(
                    ("memory as reported, GiB", m, 2**30)
                    for m in [device.reported_memory_bytes]
                    if m
                ),
                ("memory bandwidth, GB/s", device.memory_bandwidth_bytes_per_s, 1e9),
                ("L2, MiB", device.l2_bytes, 2**20),
                ("last-level cache, MiB", device.last_level_cache_bytes, 2**20),
                ("links, both directions, GB/s", device.link_bytes_per_s, 1e9),
                ("PCIe generation", device.pcie_generation, 1),
                ("board power, W", device.board_power_w, 1),
            )
        ]
        header = ("type", "TFLOP/s", "at MHz", f"FLOP/clk/{device.unit_kind}", "source")
        sections += [
            f"### {device.label} {{ #{device.id} }}",
            "Known by the name (a pattern) " + ", ".join(f"`{n}`" for n in device.names) + ".",
            table(header, rates),
            table(("quantity", "value", "source"), rest),
        ]
    return "\n\n".join(
        [
            "# Device peaks",
            f"The {len(devices)} devices that Chopper knows, each value with its source. Rates are "
            "dense (no structured sparsity) and the best that the device has for a matrix product "
            "of that type; `fp32_vector` and `fp64_vector` are the rates outside of tensor and "
            "matrix cores. A vendor quotes them at a clock of its own, so each has its reference "
            "clock. A dash is unknown or impossible, and the source says which. A device that is "
            "not listed has no ideal time: no similar device's values are used. "
            "[Measured peaks](../concepts/attribution.md#peaks) stand beside these.",
            "## Overview",
            "TFLOP/s, and GB/s of memory and of links (both directions).",
            table(
                ("device", "bf16", "fp16", "fp8", "fp32", "memory", "links", "to the host"),
                overview,
            ),
            "## Links to the host",
            "GB/s: of both directions as quoted, to the device and back as measured. Over a "
            "coherent link each side reads the other's memory in place, at least a granule at a "
            "time; elsewhere pages migrate, or are copied.",
            table(
                ("link", "coherent", "quantity", "value", "source"),
                [
                    (
                        f"`{link.id}`: {link.label}",
                        "yes" if link.coherent else "no",
                        name,
                        scaled(value, unit),
                        provenance(value),
                    )
                    for link in known_host_links()
                    for name, value, unit in (
                        ("both directions, GB/s", link.bytes_per_s, 1e9),
                        ("to the device, GB/s", link.to_device_bytes_per_s, 1e9),
                        ("to the host, GB/s", link.to_host_bytes_per_s, 1e9),
                        ("granule, B", link.granule_bytes, 1),
                    )
                ],
            ),
            "## Every value",
            *sections,
        ]
    )


def checks_page() -> str:
    """Every check of a run, and every claim that one can withhold."""
    claims = [
        (claim.title, f"`{name}`", claim.effect, ", ".join(f"`{c}`" for c in claim.causes))
        for name, claim in CLAIMS.items()
    ]
    checks = [
        (
            f"`{code}`",
            check.title,
            check.doc,
            ", ".join(f"`{c}`" for c in check.withholds),
        )
        for code, check in known_checks().items()
    ]
    return "\n\n".join(
        [
            "# Checks",
            "The data is checked before the attribution. What a check finds stands on top of "
            "every report, and as `quality` in the JSON form. Where the data cannot support a "
            "claim, the claim is withheld: null, or flagged and without an interval. Times are "
            "never removed: the causes sum to the observed time in any case.",
            "## Claims that can be withheld",
            table(("claim", "id", "what stands in its place", "causes"), claims),
            "## Every check",
            table(("code", "check", "what was found, and what it means", "can withhold"), checks),
        ]
    )


def scaled(quantity: Sourced, unit: float) -> str | None:
    """A value in a larger unit, five digits at most; None is unknown."""
    return None if quantity.value is None else f"{quantity.value / unit:.5g}"


def provenance(quantity: Sourced) -> str:
    """Where a value came from."""
    return quantity.source if quantity.note is None else f"{quantity.source} ({quantity.note})"


def meanings(declared: Table) -> dict[str, str]:
    """The meaning of each column of a table."""
    return {column.name: column.doc for column in declared.columns}


# What each field of ``chopper.attribution/4`` means. A field that the program writes and this
# does not name, or the other way round, fails the build.
FIELDS = {
    "": {
        "schema": "Name and version of this form.",
        "run": "The run directory or trace that was named.",
        "verdict": "What bounds the run, in a sentence, and its largest causes.",
        "observed_ns": (
            "Time of the step windows of all ranks: of steps of the kind `step_time.kind`."
        ),
        "ideal_ns": "The part of it that model math needs at the devices' peaks; null where a "
        "rank's is not known.",
        "steps": "Step windows of the rank that has most.",
        "all_kinds": "The same of all traced steps of all kinds: `observed_ns`, `ideal_ns`, "
        "`steps`, `causes_ns` (leaf cause → time; sums to its `observed_ns`) and, with `--by`, "
        "`groups`.",
        "step_time": "The step time with and without tracing, and the kinds of steps.",
        "step_time_ns": "Of each of these steps, the mean window over ranks.",
        "ranks": "One object per rank.",
        "processes": "The runs inside of this one, of further processes of the same command that "
        "are none of its ranks: `path`, `pid`, `ranks` and `steps` (null where a recording was cut "
        "short) of each. Nothing of them is in the times here.",
        "causes": "One object per cause with time in it, parents before their leaves. The times of "
        "the leaf causes sum to `observed_ns`.",
        "host_pace_ratio": "Savings are of a step in which the host's work takes this share of its "
        "traced time; 1: of traced steps; null where the run cannot be replayed: "
        "[the pace of the host](../concepts/replay.md#the-pace-of-the-host).",
        "actions": "What to try, the most recoverable time first, all of them; null where the run "
        "cannot be replayed: [patterns](../detectors/index.md).",
        "actions_dropped": "Patterns that were seen but are no actions: `detector`, `title`, "
        "`recoverable_step_ns`, `share_ratio` and the `reason`; null where the run cannot be "
        "replayed.",
        "actions_failed": "Pattern → why it could not be looked for, by a failure in Chopper; "
        "normally empty.",
        "ceilings": "Per rank, what its device can do at most: `theoretical` (table of devices) "
        "and `achievable` (`chopper calibrate`), each with `flop_per_s` by data type, "
        "`memory_bytes_per_s`, `link_bytes_per_s`, its `source`, and the `reason` when it is "
        "unknown; and the `link` between its ranks: `bytes_per_s` with its `source`, or null and "
        "why.",
        "utilization": "MFU and HFU: the rows of the [`utilization` table](tables.md#utilization).",
        "coverage": "Shares, 0 to 1, of what joins and models reached; null for unknown.",
        "quality": "Findings about the data, most severe first.",
        "withheld": "Claims that the data does not support; see the [checks](checks.md).",
    },
    "verdict": {
        "class": "What bounds the run: [the classes](../detectors/index.md).",
        "sentence": "The first sentence of a report.",
        "share_ratio": "Share of that class; null when nothing was attributed.",
        "of": "What it is a share of: `step`, `window` (a trace without steps), or `loop` (all "
        "recorded steps and what follows them).",
        "largest_causes": "Up to three leaf causes of the gap, the largest first: `cause`, "
        "`label`, `time_ns` per `of`, `share_ratio`, `remedy`, and the `phase`, `layer`, `op` and "
        "`line` that hold most of it.",
    },
    "step_time": {
        "kind": (
            "Kind of the steps that it is of: `training`, or `training + rollout` and the like."
        ),
        "headline_ns": "The step time: the median of the untraced steps, or their mean where it is "
        "a fifth longer; else the mean of the traced steps.",
        "untraced": "Steps of that kind that ran without a trace: `median_ns`, `mean_ns`, "
        "`quartile_low_ns`, `quartile_high_ns`, `steps_count`; null with the reason.",
        "untraced_reason": "Why it is null.",
        "traced_mean_ns": "Mean window of the traced steps of that kind: what the causes are of.",
        "traced_count": "Traced steps of that kind.",
        "tracing_ns": "What tracing itself added: `traced_mean_ns` less the untraced step time.",
        "tracing_ratio": "The same, of the untraced step time.",
        "nearby_ns": "Median of the untraced steps next to the traced ones; where it is long as "
        "well, tracing is not the reason.",
        "drained_ns": "Length, for the host, of the shortest of the three untraced steps right "
        "after a trace, mean over traces; null without any.",
        "tracing_ci95_ns": (
            "95 % interval of `tracing_ns`; null with fewer than three traced steps."
        ),
        "outside": "Time of the recording in no step: the program's, `after_ns` the last one, with "
        "its `phases_ns` by program phase, and chopper's own, `profiler_ns` (set-up, writing "
        "traces, the end); `recording_ns` in all; null where its bounds are not known.",
        "phases_ns": "Program phase → its time in the recorded steps, mean over ranks.",
        "kinds": "All kinds of steps, the most time first: `name`, `steps_count`, `steps`, "
        "`traced_steps`, `untraced`, `traced_mean_ns`, `time_ns`, `share_ratio` of the time of all "
        "steps, and `causes_ns` of the traced ones.",
    },
    "ranks": meanings(result_tables.RANK)
    | {"causes_ns": "Leaf cause → time; sums to its `observed_ns`."},
    "causes": meanings(result_tables.CAUSE),
    "actions": meanings(result_tables.ACTION)
    | {"evidence_values": "The same names and numbers, by pattern."},
    "quality": {
        "code": "Stable dotted id of the finding.",
        "severity": "info, warning or error.",
        "message": "One line.",
        "rank": "Rank that it is about; null for the run.",
        "count": "How many; null when there is nothing to count.",
        "withholds": "Claims that are withheld because of it.",
        "share_ratio": "Part of the time or of the events that it is about; null for none.",
    },
    "withheld": {
        "claim": "Stable id of the claim.",
        "title": "Its name in reports.",
        "effect": "What stands in its place.",
        "reason": "The messages of the findings that withhold it.",
        "codes": "Their codes.",
        "ranks": "Ranks that it is withheld of; null for the whole run.",
    },
}


def attribution_example() -> str:
    """The fields of the JSON form, and an example that the program itself made."""
    document = example_attribution()
    parts = []
    for place, fields in FIELDS.items():
        sample = document[place] if place else document
        sample = sample[0] if isinstance(sample, list) else sample
        if set(sample) != set(fields):
            raise PluginError(
                f"docs/hooks.py: fields of the JSON form at {place or 'top'!r} are "
                f"{sorted(sample)}, described are {sorted(fields)}"
            )
        rows: list[tuple[object, ...]] = [(f"`{name}`", fields[name]) for name in sample]
        parts += [f"## `{place}`" if place else "## Top level", table(("field", "meaning"), rows)]
    shown = json.dumps(document, indent=2, ensure_ascii=False)
    parts += ["## Example", "One rank, two steps, made up:", f"```json\n{shown}\n```"]
    return "\n\n".join(parts)


EXAMPLE_VERDICT = {
    "class": "data",
    "sentence": "Data-bound: 24.0 % of the step is spent waiting for data, most of it in "
    "train.py(8): tokenize; 76.0 % is computing.",
    "share_ratio": 0.24,
    "of": "step",
    "largest_causes": [],
}
EXAMPLE_ACTIONS = [
    {
        "detector": "data_loading",
        "title": "The loader does not keep up",
        "recoverable_step_ns": 240,
        "recoverable_step_ci95_low_ns": None,
        "recoverable_step_ci95_high_ns": None,
        "share_ratio": 0.24,
        "of": "step",
        "phase": "data",
        "layer": None,
        "op": None,
        "line": "train.py(8): tokenize",
        "evidence": "240 ns of the step, most of it in train.py(8): tokenize.",
        "evidence_values": {
            "stall_ns": 480,
            "function": "train.py(8): tokenize",
            "where": "most of it in train.py(8): tokenize",
        },
        "events_count": 0,
        "remedy": "Raise num_workers …",
        "view": "steps",
    }
]


def example_attribution() -> dict[str, Any]:
    """A small attribution in the documented form."""
    import pyarrow as pa

    from chopper.analyzers.attribution import (
        Attribution,
        Basis,
        RankSummary,
        Recoverable,
        cause_rows_of,
    )
    from chopper.analyzers.causes.step_time import step_time
    from chopper.analyzers.trace.totals import totals_of
    from chopper.reports.tables import attribution_json
    from chopper.storage.manifest import Finding, RankManifest, RunManifest
    from chopper.storage.run import Run

    pieces = [
        {"rank": 0, "step_index": step, "cause": cause, "phase": "forward", "time_ns": time_ns}
        for step, causes in enumerate(
            (
                {"compute.ideal": 400, "compute.efficiency.rest": 350, "idle.call": 250},
                {"compute.ideal": 400, "compute.efficiency.rest": 370, "idle.call": 230},
            )
        )
        for cause, time_ns in causes.items()
    ]
    windows = [
        {"rank": 0, "step_index": i, "number": i, "start_ns": 1000 * i, "end_ns": 1000 * (i + 1)}
        for i in range(2)
    ]
    manifest = RunManifest(kind="recorded", name="mine", ranks=[RankManifest(rank=0)])
    findings = [
        Finding(code="trace.truncated", severity="warning", message="…", rank=0, count=1),
        Finding(
            code="telemetry.clock_missing",
            severity="info",
            message="no clock samples of the device …",
            rank=0,
            withholds=("compute.clock",),
        ),
    ]
    run = Run(manifest, None, source="runs/mine")
    tables = (
        pa.Table.from_pylist(pieces, schema=TABLES["piece"].arrow),
        pa.Table.from_pylist(windows, schema=TABLES["window"].arrow),
    )
    bases = {"compute.ideal": Basis("FLOP ÷ datasheet peak", measured=False)}
    claims = withheld(findings)
    totals = totals_of(*tables, {})
    rows = cause_rows_of(totals, bases, claims)
    answer = Attribution(
        source=run.source,
        recording=run,
        pieces=tables[0],
        windows=tables[1],
        totals=totals,
        gaps=TABLES["gap"].empty(),
        communication=TABLES["communication"].empty(),
        links={},
        ranks=[
            RankSummary(
                rank=0,
                label="rank 0",
                device="NVIDIA H100 80GB HBM3",
                peak_source="datasheet",
                observed_ns=2000,
                ideal_ns=800,
                steps=2,
            )
        ],
        cause_rows=rows,
        step=step_time([], tables[1], {}),
        findings=findings,
        withheld=claims,
        coverage={"launched": 1.0, "shapes": None},
        bases=bases,
        ceilings={},
        joined={},
        matched={},
        work={},
        factors={},
    )
    back = {row.id: Recoverable(None, reason="no device event was recorded") for row in rows}
    document: dict[str, Any] = attribution_json(answer, EXAMPLE_VERDICT, back, EXAMPLE_ACTIONS)
    return document
