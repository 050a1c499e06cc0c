"""Speculation over a text that is known: what it would have taken to write it, by our own drafter, without a model."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config import SSRConfig
from ..costs import GuessedCosts, StepCosts
from ..draft_sources import DraftSources
from ..drafting import Draft, Evidence
from ..following import Decisions, exact
from ..lanes import Lane
from ..metrics import SSRMetrics
from ..rounds import Rounds
from ..rows import Row
from ..running.comparing import agreeing
from ..scheduling import Governor
from ..suffix_automaton import SuffixAutomaton

# How long a draft is: as long as it can be; as the governor finds worth its cost; and what neither can know
POLICIES = {
    "off": "as long as possible",
    "governed": "as long as promises most for its cost, by guessed costs",
    "perfect length": "the drafts of 'off', each cut to what is kept of it",
    "perfect source": "the same, or from any place where the last token stood, whichever goes furthest",
}


@dataclass
class Recording:
    """
    A text that was written, in tokens.

    Args:
        task, name (`str`): what it belongs to, and which of these.
        prompt, new (`list[int]`): read, and written.
        opens, closes (`int`, *optional*): new tokens before the thought, and up to its end with the closing marker;
            `None` where there is no thought.
        tail (`tuple[int, ...]`): what may stand between the close and the answer.
        drafts (`list[list[int]]`): of the answer, in order, each with the tail before it.
    """

    task: str
    name: str
    prompt: list[int]
    new: list[int]
    opens: int | None = None
    closes: int | None = None
    tail: tuple[int, ...] = ()
    drafts: list[list[int]] = field(default_factory=list)

    def part(self, position: int) -> str:
        """Of a new token. What comes before a thought counts as answer, as in [`SSRMetrics`]."""
        if self.opens is None or self.closes is None:
            return "answer"
        return "thought" if self.opens <= position < self.closes else "answer"

    def part_end(self, position: int) -> int:
        """A step does not go beyond it: what comes then has another drafter."""
        ends = (end for end in (self.opens, self.closes) if end is not None and end > position)
        return min(ends, default=len(self.new))


@dataclass
class Counts:
    """
    What a part of some texts took.

    Args:
        texts, tokens (`int`): how many; the closing marker counts as thought.
        forwards (`int`): one that reads the prompt, and yields the first token, among them.
        drafted, accepted (`int`): draft tokens, and those that were kept.
        cost (`float`): forwards after the prompt, each weighted by what its size is guessed to take on a CPU.
    """

    texts: int = 0
    tokens: int = 0
    forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    cost: float = 0.0

    @property
    def tokens_per_forward(self) -> float | None:
        """`None` without a forward."""
        return self.tokens / self.forwards if self.forwards else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted; `None` if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    def add_step(self, tokens: int, drafted: int, accepted: int, costs: StepCosts | None) -> None:
        """A forward, which is not the prompt's if it costs anything."""
        self.forwards += 1
        self.tokens += tokens
        self.drafted += drafted
        self.accepted += accepted
        self.cost += 0.0 if costs is None else costs(1, 1 + drafted)

    def add(self, other: "Counts") -> None:
        """Those of another text too."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        rates = {"tokens_per_forward": self.tokens_per_forward, "acceptance_rate": self.acceptance_rate}
        return {**vars(self), **rates}


class _Machine:
    """Stands for a model whose forwards cost what is guessed of a CPU."""

    device, dtype = torch.device("cpu"), torch.float32


class Places:
    """Where a token is followed by another, in some sources and in the text that is being written."""

    def __init__(self):
        self._found: dict[tuple[int, int], list[tuple[list[int], int]]] = defaultdict(list)
        self._written: list[int] = []

    def add(self, tokens: list[int]) -> None:
        """One more source."""
        for index in range(1, len(tokens)):
            self._found[tokens[index - 1], tokens[index]].append((tokens, index))

    def begin(self) -> None:
        """What is written from now on is a source of its own."""
        self._written = []

    def push(self, token: int) -> None:
        """The next token of the text."""
        self._written.append(token)
        if len(self._written) > 1:
            self._found[self._written[-2], token].append((self._written, len(self._written) - 1))

    def longest(self, last: int, coming: Sequence[int]) -> int:
        """Tokens of `coming` that stand behind some place where `last` stood."""
        best = 0
        for tokens, index in self._found.get((last, coming[0]), ()) if coming else ():
            run = 1
            while run < len(coming) and index + run < len(tokens) and tokens[index + run] == coming[run]:
                run += 1
            best = max(best, run)
        return best


class RecordedTarget:
    """Stands for a model that has written a text: a forward says nothing, as each token that comes next is known."""

    takes_uneven_blocks = True

    def __init__(self, prompt: list[int], max_length: int):
        self.metrics = SSRMetrics()
        self.rows = [Row(torch.tensor([prompt]), max_length)]
        self.has_logits = True
        self.last_shape, self.last_seconds = (1, len(prompt)), 0.0

    def line_of(self, row: Row) -> int:
        """There is one."""
        return 0

    def forward(self, phase: str, drafts: Mapping[Row, Draft]) -> dict[Row, Evidence]:
        """Nothing, of each place."""
        self.has_logits = False
        (row,) = self.rows
        width = 1 + len(drafts[row].ids)
        self.last_shape = 1, width
        return {row: Evidence(torch.empty(1, width, 0))}

    def keep(self, rows: Sequence[Row]) -> None:
        """There is no cache."""


class RecordedLane(Lane):
    """
    Writes a recording again, in the rounds of greedy SSR without children.

    Args:
        recording ([`Recording`]): what to write.
        row (`Row`): its prompt.
        config ([`SSRConfig`]): what to draft from, and how much.
        costs ([`StepCosts`]): of forwards.
    """

    def __init__(self, recording: Recording, row: Row, config: SSRConfig, costs: StepCosts):
        self.recording, self.sources, self._costs = (
            recording,
            DraftSources(config, recording.prompt, recording.tail),
            costs,
        )
        super().__init__(row, self.sources.first_drafter(recording.part(0) == "thought"))
        self.position = 0  # of the next token
        self._begin, self._end = 0, recording.part_end(0)  # of the round
        self.counts = {"thought": Counts(), "answer": Counts()}
        self.reach: list[int] = []  # of each position: the end of the kept draft tokens that it lies in, or before

    @property
    def is_thinking(self) -> bool:
        """Whether the next token belongs to the thought."""
        return self.recording.part(self.position) == "thought"

    @property
    def coming(self) -> list[int]:
        """What the round may write, if its draft is right."""
        return self.recording.new[self._begin : min(self._end, self._begin + self.drafter.num_draft_tokens)]

    def phase(self, draft: Draft) -> str:
        """Of the metrics."""
        return "thinking" if self.is_thinking else "speculate"

    def decide(self, draft: Draft, logits: torch.Tensor) -> Decisions:
        """As it was written."""
        return exact(draft, lambda place: self.recording.new[self.position])

    def take(self, token: int, source: str | None) -> bool:
        """The next token, and what begins before or behind it."""
        recording = self.recording
        self.row.append(token)
        self.position += 1
        if self.position == recording.opens:  # its last marker token is the thought's, as in a `Parent`
            self.drafter = self.sources.drafter_of_thought()
        self.drafter.observe(token)
        if self.position == recording.closes:
            for draft in recording.drafts:
                self.sources.add_draft(SuffixAutomaton(draft), [])
            self.drafter = self.sources.drafter_of_answer()
        self.done = self.position == len(recording.new)
        return self.position < self._end

    def note(self, draft: Draft, phase: str, kept: int, has_parted: bool) -> None:
        """The round is counted where it began."""
        part, tokens = self.recording.part(self._begin), kept + has_parted
        self.counts[part].add_step(tokens, len(draft.ids), kept, self._costs if self._begin else None)
        self.reach += [self._begin + kept] * tokens

    def end_round(self) -> None:
        """The next one begins."""
        self._begin, self._end = self.position, self.recording.part_end(self.position)


class PerfectLane(RecordedLane):
    """The same with drafts of perfect length: each is as long as is kept of it."""

    def behind_forced(self, draft: Draft, most: int) -> Draft:
        """What is kept of the draft, or what there ought to have been."""
        kept = agreeing(draft.ids, self.coming)
        self.drafter.record.note(draft, kept)
        return Draft(self.coming[: self._most(kept)])

    def _most(self, kept: int) -> int:
        """Tokens of what is coming that the draft ought to have had; `kept` is what it has."""
        return kept


class PerfectSourceLane(PerfectLane):
    """
    The same with what no policy can know: each round goes as far as the best of three, the drafter's own draft, the
    longest run from any place in the sources, and the draft of `"off"` that the text's position lies in. So it never
    takes more forwards than `"off"`.
    """

    def __init__(self, recording: Recording, row: Row, config: SSRConfig, costs: StepCosts):
        super().__init__(recording, row, config, costs)
        self._real_reach = _written(recording, config, RecordedLane).reach
        self._names, self._places = config.setting("sources"), Places()
        if "prompt" in self._names:
            self._places.add(recording.prompt)

    def _most(self, kept: int) -> int:
        coming, position = self.coming, self.position
        run = self._places.longest(self.recording.new[position - 1], coming)
        return max(kept, run, min(self._real_reach[position] - position, len(coming)))

    def take(self, token: int, source: str | None) -> bool:
        """The next token is a place too."""
        recording = self.recording
        if recording.part(self.position) in self._names:
            self._places.push(token)
        goes_on = super().take(token, source)
        if self.position in (recording.opens, recording.closes):
            self._places.begin()
        if self.position == recording.closes and "draft" in self._names:
            for draft in recording.drafts:
                self._places.add([token, *draft])
        return goes_on


_LANES = {"perfect length": PerfectLane, "perfect source": PerfectSourceLane}


def rewrite(recording: Recording, sources: Sequence[str], policy: str, num_draft_tokens: int) -> dict[str, Counts]:
    """
    What thought and answer of a recording take.

    Args:
        recording ([`Recording`]): what to write.
        sources (`Sequence[str]`): what to draft from: draft, thought, prompt, answer.
        policy (`str`): of `POLICIES`.
        num_draft_tokens (`int`): most tokens of a draft.
    """
    config = SSRConfig(
        sources=list(sources),
        num_draft_tokens=num_draft_tokens,
        max_overhead=None if policy == "governed" else "off",
        max_length=len(recording.prompt) + len(recording.new) + num_draft_tokens + 1,  # it cuts no draft
    )
    counts = _written(recording, config, _LANES.get(policy, RecordedLane)).counts
    for part in counts.values():
        part.texts = int(part.tokens > 0)
    return counts


def _written(recording: Recording, config: SSRConfig, kind: type[RecordedLane]) -> RecordedLane:
    """A lane that has written all of it."""
    target: Any = RecordedTarget(recording.prompt, config.max_length)  # in place of a `Target`
    governor, costs = Governor(config, _Machine()), GuessedCosts(_Machine.device)
    if governor.is_on:
        governor.costs = costs
    governor.begin(*target.last_shape)
    lane, rounds = kind(recording, target.rows[0], config, costs), Rounds(target, governor)
    while not lane.done and recording.new:
        rounds.play([lane])
    return lane
