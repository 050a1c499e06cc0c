"""From the sums that `measure.py` keeps to Markdown: a function for each kind of measurement."""

from collections.abc import Iterable
from typing import Any

SLOW = 1.05  # times plain's
LABELS = {
    "plain": "plain `generate`",
    "plain_static": "static cache (compiled on a GPU only)",
    "prompt_lookup": "prompt lookup of transformers",
    "suffix_answer": "no fork: suffix speculation in the answer",
    "suffix_only": "no fork: suffix speculation in thought and answer",
    "suffix_governed": "the same, as much as pays",
    "fork": "one fork at 64 tokens, its draft only",
    "fork_suffix": "and suffix speculation in the answer",
    "stages": "the same, with forks at automatic budgets",
    "ssr_off": 'all there is, speculation in the thought too (`max_overhead="off"`)',
    "ssr": "SSR as it is by default",
    "oracle": "plain's own answer as the draft",
}


def table(head: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def by_method(kept: dict[str, Any]) -> str:
    """Forwards, cost and seconds by task; whether the tokens are plain's."""
    tasks = kept["tasks"]
    rows = []
    for method in [name for name in LABELS if any(name in found for found in tasks.values())]:
        cells = []
        for found in tasks.values():
            row = found[method]
            whole = f"{row['forwards']:,}, {row['cost']:,.0f}, {row['seconds']:,.1f} s"
            ratios = ", ".join(f"{row[f'{name}_ratio']:.2f}x" for name in ("forwards", "cost", "seconds"))
            cells.append(whole if method == "plain" else ratios)
        rows.append([LABELS[method], *cells])
    first, *others = tasks
    said = [same_tokens(tasks), f"A forward over 16 tokens costs {kept['block_cost']:.2f} plain steps here."]
    if "worst" not in kept:
        said += slowest(tasks)
    return table(["", f"{first}: forwards, cost, seconds", *others], rows) + "\n\n" + " ".join(said)


def same_tokens(tasks: dict[str, dict[str, Any]]) -> str:
    """Of all runs, and by method where some are others."""
    counts: dict[str, list[int]] = {}
    for found in tasks.values():
        for method, row in found.items():
            count = counts.setdefault(method, [0, 0])
            count[0], count[1] = count[0] + row["runs"], count[1] + round(row["runs"] * row["same_tokens"])
    runs = sum(count for count, _ in counts.values())
    others = [f"{LABELS[method]} in {n - same} of {n}" for method, (n, same) in counts.items() if same < n]
    text = f"Same tokens in all {runs:,} runs" if not others else f"{runs:,} runs. Other tokens: {'; '.join(others)}"
    loops = sum(row.get("loops", 0) for found in tasks.values() for row in found.values())
    return f"{text}{f'; {loops} more, which end in a loop, are left out' if loops else ''}."


def slowest(tasks: dict[str, dict[str, Any]]) -> list[str]:
    """A sentence on the slowest prompt, where it is known."""
    found = {}
    for method in ("ssr", "prompt_lookup"):
        ratios = [row[method].get("worst_seconds_ratio") for row in tasks.values() if method in row]
        if ratios and None not in ratios:
            found[method] = 1 / min(ratios)
    said = "; ".join(f"{LABELS[method]}: {worst:.2f}" for method, worst in found.items())
    return [f"The slowest prompt, in times plain's seconds: {said}."] if found else []


def with_worst(kept: dict[str, Any]) -> str:
    """And what a prompt may cost, and what an answer that costs nothing would save."""
    rows = []
    for method, worst in kept["worst"].items():
        runs = f"{worst['dearer']} of {worst['runs']}, {worst['dearest']:.2f}x"
        rows.append([LABELS[method], runs, f"{worst['slower']} of {worst['prompts']}, {worst['slowest']:.2f}x"])
    head = ["worst case", "runs that cost more than plain's; most", f"prompts over {SLOW} times plain's time; most"]
    intervals = [found["ssr"]["seconds_ratio_interval"] for found in kept["tasks"].values()]
    between = listed(f"{low:.2f} to {high:.2f}" for low, high in intervals)
    low, high = kept["outside_ms"]
    texts = [
        f"{by_method(kept)} In seconds the default's 95 % intervals (prompts drawn again) are {between}.",
        table(head, rows),
        "Cost takes each size of forward at its mean over the bench; the clock has noise in it. What is outside the "
        f"forwards takes {low:.2f} to {high:.2f} ms a token. `hf-ssr whatif`, fed with the bench's own step costs, "
        f"lands within {kept['whatif_off_by']:.1%} of the measured seconds for every method of every task.",
    ]
    free = kept["free_answer"]
    if free["prompts"]:
        limits, reached = (
            listed(f"{row[key]:.2f}x ({task})" for task, row in free["tasks"].items()) for key in ("limit", "ssr_off")
        )
        texts.append(
            f"Where the thought is at least as long as the answer ({free['prompts']} prompts), an answer that cost "
            f'nothing would take {limits} fewer forwards; `"off"` takes {reached} fewer: it saves in the thought too.'
        )
    return "\n\n".join(texts)


def part_by_part(kept: dict[str, Any]) -> str:
    """And what each part adds."""

    def against(other: str) -> str:
        found = kept["tasks"].values()
        return listed(f"{row['ssr_off']['forwards_ratio'] / row[other]['forwards_ratio']:.2f}x" for row in found)

    return by_method(kept) + (
        f" All there is takes {against('suffix_answer')} fewer forwards than suffix speculation in the answer alone, "
        f"and {against('suffix_only')} fewer than suffix speculation everywhere."
    )


def listed(words: Iterable[str]) -> str:
    """`a, b and c`."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def rules(kept: dict[str, Any]) -> str:
    """Answer tokens a forward by temperature and rule."""
    names = ("exact", "speculative", "block", "coupled")
    rows = []
    for temperature in dict.fromkeys(key.split("/")[0] for key in kept):
        found = [kept.get(f"{temperature}/{name}/all", kept.get(f"{temperature}/exact/all")) for name in names]
        rows.append([temperature, *(f"{each['answer_tokens'] / each['answer_forwards']:.2f}" for each in found)])
    return table(["temperature", *names], rows)


def overhead(kept: dict[str, Any]) -> str:
    """By tokens of context."""
    head = ["tokens", "index, µs a token", "of a prompt, once, ms", "outside the forwards, ms a token: plain", "SSR"]
    head += ["to append a token, ms: `DynamicLayer`", "a layer that grows in place"]
    rows = []
    for row in kept["rows"]:
        tokens, *values = row.values()
        rows.append([f"{tokens:,}", *("" if value is None else f"{value:.2f}" for value in values)])
    return table(head, rows)


def random_text(kept: dict[str, Any]) -> str:
    """By what a plain step takes."""
    rows = [
        [f"{row['plain_ms']:.1f}", f"{row['ratio']:.2f}", f"{row['least']:.2f} to {row['most']:.2f}"]
        for row in kept["rows"]
    ]
    return table(["plain, ms a token", "SSR, in plain runs (median)", "least and most"], rows)


def one_prompt(kept: dict[str, Any]) -> str:
    """Forwards and seconds of one prompt."""
    plain, ssr, rows = kept["plain"], kept["ssr"], []
    for key, form in (("forwards", "d"), ("seconds", ".1f")):
        rows.append([key, f"{plain[key]:{form}}", f"{ssr[key]:{form}}", f"{plain[key] / ssr[key]:.2f}x"])
    same = "the same with and without SSR" if kept["same_tokens"] else "OTHERS with SSR"
    text = f"{kept['thinking_tokens']} tokens of thought and {kept['answer_tokens']} of answer, {same}."
    return table(["", "plain", "SSR", ""], rows) + "\n\n" + text
