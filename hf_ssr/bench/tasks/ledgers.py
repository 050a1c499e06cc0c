"""
*ledger*: keep the running balance of an account.

The thought adds or subtracts digit by digit from the right, and says after each digit whether one is carried. Half of
the prompts ask for a note on each entry, so that the answer is longer than the thought or shorter.
"""

import random
import re
from itertools import accumulate

from .sample import Sample

_OWNERS = "Ada Ben Carl Dora Emil Finn Greta Hugo Ida Jonas Kira Lena Mia Nils Otto Paula"
_ENTRIES = """
apples bakery books bread bus candles cheese cinema coffee eggs fees flowers gas gift ink juice lunch milk music paper
pens rent repair salary shoes soap stamps sugar taxi tea tickets tips tools toys wages water
"""
OWNERS, ENTRIES = tuple(_OWNERS.split()), tuple(_ENTRIES.split())
HEAD = "| No | Entry | Balance | Change |\n| --- | --- | --- | --- |\n"
MIN_ENTRIES, MAX_ENTRIES = 5, 9
PIECES = (
    *OWNERS,
    *ENTRIES,
    *(
        "Keep the ledger of ",
        " from ",
        ".",
        ". Add a note on each entry.",
        ": ",
        " on ",
        ", ",
        " carry, ",
        " clear, ",
        "carry",
        "clear",
        "Start ",
    ),
    *("Ledger", " of ", ", ", "start", " at ", ":\n\n", "| ", " | ", " |\n", " |", "No", "Entry", "Balance", "Change"),
    *("Note ", " paid ", " received ", " for ", ". The balance went ", "up", "down", " to "),
    *("---", "The ", "ledger ", "has ", " entries", "and ", "the ", "total ", "after ", " is "),
)


def make(rng: random.Random) -> Sample:
    """A ledger of 5 to 9 entries, shorter ones more often; all amounts have two digits. `data` is what was drawn."""
    count = min(rng.randint(MIN_ENTRIES, MAX_ENTRIES), rng.randint(MIN_ENTRIES, MAX_ENTRIES))
    start = balance = rng.randint(10, 99)
    entries = {}
    for name in rng.sample(ENTRIES, count):
        change = 0
        while abs(change) < 10 or not 10 <= balance + change <= 99:
            change = rng.randint(-89, 89)
        entries[name] = change
        balance += change
    owner, noted = rng.choice(OWNERS), rng.random() < 0.5
    wish = " Add a note on each entry." if noted else ""
    lines = [f"{i} {name}: {change:+}" for i, (name, change) in enumerate(entries.items(), 1)]
    prompt = "\n".join([f"Keep the ledger of {owner} from {start}.{wish}", *lines])
    data = owner, start, entries, noted
    return Sample("ledger", prompt, _thought(start, entries), _answer(*data), data)


_FIRST = rf"Keep the ledger of ({'|'.join(OWNERS)}) from (\d\d)\.( Add a note on each entry\.)?"
_ENTRY = rf"({'|'.join(ENTRIES)}): ([+-]\d\d)"


def is_one(prompt: str) -> bool:
    """Whether a prompt is worded as `make` words it, its balances of two digits."""
    first, *lines = prompt.split("\n")
    start = re.fullmatch(_FIRST, first)
    entries = [found for i, line in enumerate(lines, 1) if (found := re.fullmatch(rf"{i} {_ENTRY}", line))]
    if not start or len(entries) != len(lines) or not MIN_ENTRIES <= len(lines) <= MAX_ENTRIES:
        return False
    balances = accumulate((int(entry[2]) for entry in entries), initial=int(start[2]))
    return all(10 <= balance <= 99 for balance in balances) and len({e[1] for e in entries}) == len(entries)


def check(sample: Sample, answer: str) -> bool:
    """Whether each entry is in its place with its change and balance, and the notes and the total are right."""
    owner, start, entries, noted = sample.data
    head = f"Ledger of {owner}, start at {start}:\n\n{HEAD}"
    table, _, rest = answer.removeprefix(head).partition("\n\n")
    notes, _, end = rest.rpartition("\n\n")
    lines, row_of = table.split("\n"), re.compile(r"\| (\d) \| (\w+) \| (\d\d) \| ([+-]\d\d) \|")
    rows = [found for line in lines if (found := row_of.fullmatch(line))]
    if not answer.startswith(head) or not len(rows) == len(lines) == len(entries):
        return False
    balance, wanted_notes = start, []
    for i, (row, (name, change)) in enumerate(zip(rows, entries.items(), strict=True), 1):
        wanted_notes.append(_note(i, owner, name, change, balance))
        balance += change
        if (int(row[1]), row[2], int(row[3]), int(row[4])) != (i, name, balance, change):
            return False
    if notes != ("\n".join(wanted_notes) if noted else ""):
        return False
    return end == f"The ledger has {len(entries)} entries, and the total after {name} is {balance}."


def _thought(start: int, entries: dict[str, int]) -> str:
    lines, balance = [f"Start {start}"], start
    for i, (name, change) in enumerate(entries.items(), 1):
        sign, carry, steps = (-1, "-") if change < 0 else (1, "+"), 0, []
        for place in (1, 10):
            a, b = balance // place % 10, abs(change) // place % 10
            result = a + sign[0] * (b + carry)
            carry = int(not 0 <= result <= 9)
            steps.append(f"{a}{sign[1]}{b}={result % 10} {'carry' if carry else 'clear'}")
        lines.append(f"{i} {name}: {change:+} on {balance}, {', '.join(steps)}, {name}={balance + change}")
        balance += change
    return "\n".join(lines)


def _note(number: int, owner: str, name: str, change: int, before: int) -> str:
    verb, way = ("paid", "down") if change < 0 else ("received", "up")
    after = before + change
    return f"Note {number}: {owner} {verb} {abs(change)} for {name}. The balance went {way} from {before} to {after}."


def _answer(owner: str, start: int, entries: dict[str, int], noted: bool) -> str:
    rows, notes, balance = [], [], start
    for i, (name, change) in enumerate(entries.items(), 1):
        notes.append(_note(i, owner, name, change, balance))
        balance += change
        rows.append(f"| {i} | {name} | {balance} | {change:+} |")
    end = f"The ledger has {len(entries)} entries, and the total after {name} is {balance}."
    parts = [
        f"Ledger of {owner}, start at {start}:",
        HEAD + "\n".join(rows),
        *(["\n".join(notes)] if noted else []),
        end,
    ]
    return "\n\n".join(parts)
