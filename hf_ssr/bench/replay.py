"""What texts that were recorded would have taken with SSR, without their model."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..config import SSRConfig
from ..families import decode, encode
from ..markers import ThinkingMarkers, resolve_markers
from ..running.comparing import prompt_ids
from ..running.loading import tokenizer_of
from ..running.reasoner import reasoner_folder
from ..think_state import ThinkingState
from .rewriting import POLICIES, Counts, Recording, rewrite

UNLIMITED = 1000  # columns
ALL = ("thought", "prompt", "answer")
# sources, by what they are called; those with drafts are of texts that have some
SOURCE_SETS = {
    "prompt": ("prompt",),
    "thought": ("thought",),
    "answer": ("answer",),
    "all": ALL,
    "draft": ("draft",),
    "all, draft": ("draft", *ALL),
}
# task, part, sources, policy
Summary = dict[str, dict[str, dict[str, dict[str, Counts]]]]


def replay(
    recordings: Sequence[Recording], num_draft_tokens: int, progress: Callable = lambda recordings: recordings
) -> Summary:
    """
    Writes each text again from each set of sources: drafts as long as can be, and as the governor finds worth their
    cost; and, from all sources, with what no policy can know.

    Args:
        recordings (`Sequence[Recording]`): what to write.
        num_draft_tokens (`int`): most tokens of a draft.
        progress (`Callable`): wraps the recordings.

    Returns:
        `dict`: [`Counts`] by task, part (thought, answer), sources (of `SOURCE_SETS`) and policy (of `POLICIES`).
    """
    summary: Summary = {}
    for recording in progress(recordings):
        task = summary.setdefault(recording.task, {"thought": {}, "answer": {}})
        for name, sources in SOURCE_SETS.items():
            if "draft" in sources and not recording.drafts:
                continue
            for policy in POLICIES:
                if policy.startswith("perfect") and len(sources) < len(ALL):
                    continue
                for part, counts in rewrite(recording, sources, policy, num_draft_tokens).items():
                    task[part].setdefault(name, {}).setdefault(policy, Counts()).add(counts)
    return summary


def recorded(path: Path, tokenizer, limit: int | None = None) -> list[Recording]:
    """
    Reads recorded texts.

    Args:
        path (`Path`): JSON lines with `prompt`, `thought`, `answer` (text, without the markers between them) and, if
            you like, `task`, `name`, and `drafts` (a list of texts, drafts of the answer in order).
        tokenizer (`PreTrainedTokenizerBase`): of the model that wrote them. Each text is supposed to end with its end
            of text.
        limit (`int`, *optional*): texts of each task.

    Raises:
        `ValueError`, `OSError`: if there is no such file, or a line of it does not fit.
    """
    markers = resolve_markers(SSRConfig(), tokenizer)
    recordings: list[Recording] = []
    tasks: dict[str, int] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        entry = _checked(line, f"--replay {path}: line {number}")
        task = entry.get("task", path.stem)
        tasks[task] = tasks.get(task, 0) + 1
        if limit is None or tasks[task] <= limit:
            recordings.append(_recording(entry, task, str(entry.get("name", number)), tokenizer, markers))
    if not recordings:
        raise ValueError(f"--replay {path} is empty: give JSON lines with `prompt`, `thought` and `answer`.")
    return recordings


def _checked(line: str, where: str) -> dict:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}.") from None
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be an object, but is a {type(entry).__name__}.")
    for name in ("prompt", "thought", "answer"):
        if not isinstance(entry.get(name), str):
            raise ValueError(f"{where} must have `{name}`, a string, but has {entry.get(name)!r}.")
    if not isinstance(entry.get("task", ""), str):
        raise ValueError(f"{where}: `task` must be a string, but is {entry['task']!r}.")
    drafts = entry.get("drafts", [])
    if not isinstance(drafts, list) or not all(isinstance(draft, str) for draft in drafts):
        raise ValueError(f"{where}: `drafts` must be a list of strings, but is {drafts!r}.")
    if not entry["thought"] and not entry["answer"]:
        raise ValueError(f"{where}: `thought` and `answer` are both empty: nothing was written.")
    return entry


def _recording(entry: dict, task: str, name: str, tokenizer, markers: ThinkingMarkers | None) -> Recording:
    prompt = prompt_ids(tokenizer, entry["prompt"])[0].tolist()
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    thought, answer = entry["thought"], entry["answer"]
    tail: tuple[int, ...] = ()
    progress = "closed" if markers is None else markers.progress_of_prompt(prompt)
    if markers is None or progress == "closed" or (progress == "unstarted" and not thought):
        before, after = encode(tokenizer, thought), encode(tokenizer, answer)
        opens, closes = (0, len(before)) if before else (None, None)
        new = before + after + end
    else:
        start = ""
        if progress == "unstarted" and markers.start is not None:
            start = markers.start.text or decode(tokenizer, markers.start.spellings[0])
        close = decode(tokenizer, markers.forced_close)
        new = encode(tokenizer, _joined(_joined(start + thought, close), answer)) + end
        state = ThinkingState(markers, prompt)
        for token in new:
            state.push(token)
        if not state.thoughts or state.thoughts[0].closes is None:
            raise ValueError(f"--replay: text {name} of {task} has no thought with the markers of the --tokenizer.")
        opens, closes, tail = state.thoughts[0].opens, state.thoughts[0].closes, state.tail
    drafts = [[*tail, *encode(tokenizer, draft)] for draft in entry.get("drafts", ()) if draft]
    return Recording(task, name, prompt, new, opens, closes, tail, drafts)


def _joined(text: str, following: str) -> str:
    """One text behind the other; what both have where they meet, such as white space, is there once."""
    shared = next(n for n in range(min(len(text), len(following)), -1, -1) if text.endswith(following[:n]))
    return text + following[shared:]


def table_of(summary: Summary) -> Table:
    """The summary to look at."""
    table = Table(box=None, pad_edge=False)
    for name in ("task", "part", "sources", "length of drafts"):
        table.add_column(name, no_wrap=True)
    for name in ("texts", "tokens", "forwards", "tokens/fwd", "drafted", "accepted", "rate", "cost"):
        table.add_column(name, justify="right", no_wrap=True)
    for task, parts in summary.items():
        for part, sets in parts.items():
            for sources, policies in sets.items():
                for policy, counts in policies.items():
                    if not counts.tokens:
                        continue
                    table.add_row(
                        *(task, part, sources, policy, f"{counts.texts}", f"{counts.tokens}", f"{counts.forwards}"),
                        f"{counts.tokens_per_forward:.2f}",
                        f"{counts.drafted}",
                        f"{counts.accepted}",
                        "" if counts.acceptance_rate is None else f"{counts.acceptance_rate:.0%}",
                        f"{counts.cost:.0f}",
                    )
            table.add_section()
    return table


def replay_command(arguments: argparse.Namespace) -> int:
    """
    Replays and prints. Returns the exit status.

    Raises:
        `ValueError`, `OSError`: before the first text is replayed, for what does not fit.
    """
    folder = arguments.tokenizer or str(reasoner_folder())
    tokenizer = tokenizer_of("--tokenizer", arguments.source or folder)
    recordings = recorded(arguments.replay, tokenizer, arguments.limit)
    progress = Console(stderr=True)
    summary = replay(recordings, arguments.num_draft_tokens, lambda all: track(all, "replaying", console=progress))
    console = Console(highlight=False, stderr=arguments.json, soft_wrap=True)
    table = table_of(summary)
    needed = console.measure(table, options=console.options.update(max_width=UNLIMITED)).maximum
    console.width = max(console.width, needed)
    console.print(table)
    console.print("Length of drafts: " + "; ".join(f"'{name}': {text}" for name, text in POLICIES.items()) + ".")
    console.print(
        "Greedy, batch size 1, no model: forwards are counted over the recorded texts, the prompt's among them. Cost "
        "is that of the others, by what their sizes are guessed to take on a CPU, in plain steps."
    )
    if arguments.json:
        shown = {
            task: {
                part: {s: {p: c.to_dict() for p, c in ps.items()} for s, ps in sets.items()}
                for part, sets in parts.items()
            }
            for task, parts in summary.items()
        }
        print(json.dumps({"tokenizer": folder, "num_draft_tokens": arguments.num_draft_tokens, "tasks": shown}))
    return 0
