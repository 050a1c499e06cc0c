"""`hf-ssr report`: a bench as one page to look at, as Markdown, and as a trace of one prompt."""

import argparse
import html
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import plots
from .methods import METHODS, ORACLE, SSR_SETTINGS
from .records import read_bench, samples_of, write_text
from .sources import SOURCES, sources_of
from .summary import summarize

STYLE = """
:root { color-scheme: light dark; --line: #8884; --faint: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-top: 1px solid var(--line);
padding-top: .8rem; } h3 { font-size: 1rem; }
svg { width: 100%; height: auto; display: block; margin: .5rem 0; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--faint); }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: .7rem; border: 1px solid var(--line);
border-radius: .4rem; font-size: .8rem; }
pre span { border-bottom: 2px solid; } .key { font-size: .8rem; } .key span { border-bottom: 2px solid;
margin-right: .8rem; } .note { font-size: .9rem; opacity: .85; } footer { margin-top: 2rem; font-size: .8rem; }
@media print { body { max-width: none; font-size: 11px; } h2 { break-after: avoid; } svg, pre { break-inside: avoid; } }
"""
INSTRUMENT = (
    "The small reasoner that comes with hf-ssr is an instrument, not evidence: it was trained to answer from thoughts "
    "that are cut short, which most models were not."
)
COLUMNS = {
    "forwards": lambda row: f"{row['forwards']:.0f}",
    "seconds": lambda row: f"{row['seconds']:.2f}",
    "forwards x": lambda row: f"{row['forwards_ratio']:.2f}",
    "cost x": lambda row: f"{row['cost_ratio']:.2f}",
    "work x": lambda row: f"{row['fed_tokens_ratio']:.2f}",
    "seconds x": lambda row: f"{row['seconds_ratio']:.2f}",
    "same tokens": lambda row: f"{row['same_tokens']:.1%}",
    "score": lambda row: "" if row["score"] is None else f"{row['score']:.1%}",
    "95 %": lambda row: "{:.2f} to {:.2f}".format(*row["seconds_ratio_interval"]),
    "mean of ratios": lambda row: f"{row['mean_seconds_ratio']:.2f}",
    "worst prompt": lambda row: f"{row['worst_seconds_ratio']:.2f}",
    "loops": lambda row: str(row["loops"] or ""),
    "errors": lambda row: str(row["errors"] or ""),
}
SSR_COLUMNS = {
    "acceptance rate": ("acceptance_rate", ".1%"),
    "draft length": ("mean_draft_length", ".2f"),
    "acceptance length": ("mean_acceptance_length", ".2f"),
    "suffix hit rate": ("suffix_hit_rate", ".1%"),
    "wasted tokens": ("wasted_draft_tokens", "d"),
    "verify overhead": ("verify_overhead", ".2f"),
    "thinking slowdown": ("thinking_slowdown", ".2f"),
    "answer tokens a forward": ("answer_tokens_per_forward", ".2f"),
}


class Page:
    """Headings, paragraphs, tables and pictures, as HTML and as Markdown."""

    def __init__(self):
        self.html: list[str] = []
        self.markdown: list[str] = []
        self.pictures: dict[str, str] = {}

    def heading(self, text: str, level: int = 2) -> None:
        """A heading."""
        self.html.append(f"<h{level}>{html.escape(text)}</h{level}>")
        self.markdown.append(f"{'#' * level} {text}")

    def text(self, text: str) -> None:
        """A paragraph."""
        self.html.append(f'<p class="note">{html.escape(text)}</p>')
        self.markdown.append(text)

    def table(self, head: list[str], rows: list[list[str]]) -> None:
        """A table; its first two columns are names."""
        cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
        lines = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
        self.html.append(
            f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>'
        )
        divider = ["---" if place < 2 else "---:" for place in range(len(head))]
        self.markdown.append("\n".join("| " + " | ".join(row) + " |" for row in (head, divider, *rows)))

    def picture(self, name: str, svg: str) -> None:
        """A picture; a file of its own beside the Markdown."""
        self.html.append(f"<figure style='margin:0'>{svg}</figure>")
        self.pictures[name] = svg
        self.markdown.append(f"![{name}](plots/{name}.svg)")

    def coloured(self, sample: dict[str, Any]) -> None:
        """An answer, coloured by where each token came from; not in the Markdown."""
        sources = sources_of(sample["spans"])
        begin = sample["thinking_tokens"]
        pieces = []
        for piece, source in zip(sample["pieces"][begin:], sources[begin:], strict=True):
            colour = SOURCES[source].colour
            pieces.append(f'<span style="border-color:{colour}">{html.escape(piece)}</span>')
        key = "".join(
            f'<span style="border-color:{source.colour}">{html.escape(source.meaning)}</span>'
            for source in SOURCES.values()
        )
        self.html.append(f'<p class="key">{key}</p><pre>{"".join(pieces)}</pre>')


def build(folder: Path) -> Page:
    """
    The page of a bench.

    Raises:
        `ValueError`: if the folder holds none, or matplotlib is missing.
    """
    settings, records = read_bench(folder)
    samples = samples_of(folder)
    summary = summarize(records)
    if not summary or not any(summary.values()):
        raise ValueError(f"{folder}: no prompt was run by plain and another method without an error.")
    page = Page()
    page.heading("hf-ssr bench", 1)
    page.text(_what_ran(settings))
    if settings["model"] == "tiny-reasoner":
        page.text(INSTRUMENT)
    page.heading("Against plain generate")
    page.text(
        "x: totals of plain / totals here, above 1 = better; work (tokens read by the model): here / plain. 95 %: of "
        "the seconds, by drawing the prompts again and again. same tokens: share of runs."
    )
    page.table(["task", "method", *COLUMNS], list(_rows(summary)))
    shown = [name for name in METHODS if name != "plain" and any(name in methods for methods in summary.values())]
    page.picture("speedups", plots.speedups(records, shown))
    if ssr := next((name for name in ("ssr", *SSR_SETTINGS) if name in shown and name != ORACLE), None):
        _of_ssr(page, records, summary, ssr)
        _samples(page, samples, ssr)
    return page


def _what_ran(settings: dict[str, Any]) -> str:
    generation = settings["generation"]
    how = {k: v for k, v in generation.items() if k not in ("do_sample", "max_new_tokens")}
    sampling = ", ".join(f"{name} {value}" for name, value in how.items()) if generation["do_sample"] else "greedy"
    prompts = ", ".join(f"{count} {task}" for task, count in settings["prompts"].items())
    return (
        f"{settings['model']}, {settings['parameters'] / 1e6:,.1f} M parameters, {settings['dtype']}; batch size 1, "
        f"{sampling}, at most {generation['max_new_tokens']} new tokens. Prompts: {prompts}, each "
        f"{settings['repeats']} x, methods in turn on it. {settings['machine']}; torch {settings['torch']}, "
        f"transformers {settings['transformers']}, hf_ssr {settings['hf_ssr']}; begun {settings['began']}."
    )


def _rows(summary: dict[str, dict[str, Any]]) -> Iterator[list[str]]:
    for task, methods in summary.items():
        for method, row in methods.items():
            yield [task, method, *(form(row) for form in COLUMNS.values())]


def _form(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)


def _of_ssr(page: Page, records, summary: dict[str, dict[str, Any]], method: str) -> None:
    page.heading("Where the gain comes from")
    rows = [
        [task, name, *(_form(row["ssr"][key], form) for key, form in SSR_COLUMNS.values())]
        for task, methods in summary.items()
        for name, row in methods.items()
        if row["ssr"] is not None
    ]
    page.table(["task", "method", *SSR_COLUMNS], rows)
    page.text(
        "thinking: the thought, without a child; drafting: with one, in the same forwards; verify: the answer, up to "
        "the first difference from the draft; speculate: behind that; outside: all that is no forward."
    )
    page.picture("stages", plots.stage_times(summary))
    page.text(
        "prefix: from the draft, up to the first difference; draft: from it, behind that; thought, prompt, answer: "
        "repeated from there; model: not drafted, a forward each."
    )
    page.picture("sources", plots.source_shares(summary))
    page.heading("Drafts")
    page.text(f"Of {method}: how often a draft token is kept by its position, and how much of the answer drafts have.")
    page.picture("acceptance", plots.acceptance(summary, method))
    page.picture("overlaps", plots.overlaps(records, method))
    page.heading("Is each stage worth it?")
    page.text(
        "used for: tokens of the answer that were taken from this draft; it may be used more than once. cost: what the "
        "forwards with this child took beyond plain steps, in plain steps."
    )
    counts = (("stage", "d"), ("runs", "d"), ("draft_budget", ".0f"), ("draft_tokens", "d"), ("accepted_tokens", "d"))
    columns = (*counts, ("cost", ".1f"))
    stages = [
        [task, *(_form(s[name], form) for name, form in columns)]
        for task, methods in summary.items()
        if method in methods and methods[method]["ssr"]
        for s in methods[method]["ssr"]["stages"]
    ]
    page.table(["task", "stage", "runs", "mean budget", "drafted", "used for", "cost"], stages)
    page.heading("Break-even")
    page.text(
        "In the answer: speculation pays above the line. predicted: tokens a forward / its cost; measured: seconds."
    )
    rows = [
        [
            task,
            name,
            *(f"{found[key]:.2f}" for key in ("tokens_per_forward", "cost_per_forward", "predicted", "measured")),
        ]
        for task, methods in summary.items()
        for name, row in methods.items()
        if row["ssr"] is not None and (found := row["ssr"]["break_even"])
    ]
    page.table(["task", "method", "tokens a forward", "cost of one", "predicted x", "measured x"], rows)
    page.picture("break_even", plots.break_even(summary))


def _samples(page: Page, samples: list[dict[str, Any]], method: str) -> None:
    for task in dict.fromkeys(sample["task"] for sample in samples):
        found = {s["method"]: s for s in samples if s["task"] == task}
        if method not in found:
            continue
        page.heading(f"One prompt of {task}")
        chosen = [found[name] for name in ("plain", method) if name in found]
        page.text("Every forward along time, what is outside them left blank. drafting: parent and child in one.")
        page.picture(f"timeline_{task}", plots.timeline(chosen, task))
        if found[method]["pieces"]:
            page.coloured(found[method])


def trace_of(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Every forward of the samples as Chrome trace events: a process for each prompt, a thread for each phase."""
    events: list[dict[str, Any]] = []
    for pid, sample in enumerate(samples):
        name = f"{sample['task']} {sample['prompt']}, {sample['method']}"
        events.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}})
        phases = list(dict.fromkeys(entry[0] for entry in sample["timeline"]))
        for tid, phase in enumerate(phases):
            events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": phase}})
        for phase, rows, tokens, begin, seconds in sample["timeline"]:
            event = {"name": f"{rows}x{tokens}", "cat": phase, "ph": "X", "pid": pid, "tid": phases.index(phase)}
            events.append({**event, "ts": 1e6 * begin, "dur": 1e6 * seconds, "args": {"rows": rows, "tokens": tokens}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def report_command(arguments: argparse.Namespace) -> int:
    """
    Writes `report.html`, `report.md` and `plots/` into the folder. Returns the exit status.

    Raises:
        `ValueError`, `OSError`: see `build`, and if a file cannot be written.
    """
    folder = arguments.folder
    page = build(folder)
    head = "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
    body = "\n".join(page.html)
    write_text(folder / "report.html", f"{head}<title>hf-ssr bench</title><style>{STYLE}</style>\n{body}\n</html>\n")
    write_text(folder / "report.md", "\n\n".join(page.markdown) + "\n")
    (folder / "plots").mkdir(exist_ok=True)
    for name, svg in page.pictures.items():
        colours = "<style>svg{color:#222}@media(prefers-color-scheme:dark){svg{color:#ddd}}</style>"
        start = svg.index(">") + 1
        write_text(folder / "plots" / f"{name}.svg", svg[:start] + colours + svg[start:])
    print(f"{folder / 'report.html'}, {folder / 'report.md'} and {len(page.pictures)} plots written")
    if arguments.trace is not None:
        write_text(arguments.trace, json.dumps(trace_of(samples_of(folder))))
        print(f"{arguments.trace} written: open it in chrome://tracing or ui.perfetto.dev")
    return 0
