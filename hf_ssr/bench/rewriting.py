"""Speculation over a text that is known: what it would have taken to write it, by our own drafter, without a model."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..comparing import agreeing
from ..config import SSRConfig
from ..costs import GuessedCosts, StepCosts
from ..drafter_suffix import SuffixDrafter
from ..drafting import AcceptanceRecord, Draft
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
        is_thought = self.opens is not None and self.opens <= position < self.closes
        return "thought" if is_thought else "answer"

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

    device = torch.device("cpu")


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


class Rewriting:
    """
    Writes a recording again, in the steps of greedy SSR without children.

    Args:
        recording ([`Recording`]): what to write.
        sources (`Sequence[str]`): what to draft from: draft, thought, prompt, answer.
        policy (`str`): of `POLICIES`.
        num_draft_tokens (`int`): most tokens of a draft.
    """

    def __init__(self, recording: Recording, sources: Sequence[str], policy: str, num_draft_tokens: int):
        self._recording, self._sources, self._policy = recording, tuple(sources), policy
        self._num_draft_tokens = num_draft_tokens
        self._costs = GuessedCosts(_Machine.device)
        is_governed = policy == "governed"
        self._governor = Governor(SSRConfig(max_overhead=None if is_governed else "off"), _Machine())
        if is_governed:
            self._governor.costs = self._costs
        self._governor.begin(1, len(recording.prompt))
        self._records = {"thought": AcceptanceRecord(), "answer": AcceptanceRecord()}
        self._written = {"thought": SuffixAutomaton(), "answer": SuffixAutomaton()}  # as in `TextState`
        self._prompt = SuffixAutomaton(recording.prompt if "prompt" in self._sources else ())
        self._position = 0
        self._drafter = self._new_drafter(recording.part(0))
        self._drafter.add("prompt", self._prompt)
        self.counts = {"thought": Counts(), "answer": Counts()}
        self.reach: list[int] = []  # of each position: the end of the kept draft tokens that it lies in, or before

    def run(self) -> dict[str, Counts]:
        """What thought and answer took."""
        while self._position < len(self._recording.new):
            self._step()
        for counts in self.counts.values():
            counts.texts = int(counts.tokens > 0)
        return self.counts

    def _new_drafter(self, own: str) -> SuffixDrafter:
        most = len(self._recording.prompt) + len(self._recording.new) + self._num_draft_tokens
        least, tail = SSRConfig().setting("min_match_length"), self._recording.tail
        own_of = own, self._records[own], self._written[own]
        return SuffixDrafter(self._sources, least, self._num_draft_tokens, most, tail, *own_of)

    def _step(self) -> None:
        """One forward: the draft as far as it agrees, and one token further."""
        begin, part = self._position, self._recording.part(self._position)
        end = self._recording.part_end(begin)
        needs_forward = begin > 0  # the prompt's yields the first token
        draft = self._drafter.propose(self._num_draft_tokens) if needs_forward else Draft()
        draft = self._governor.fitted(draft, lambda length: (1, 1 + length))
        coming = self._recording.new[begin : min(end, begin + self._num_draft_tokens)]
        kept = agreeing(draft.ids, coming)
        most = self._most(kept, coming)
        grown = min(most + 1, end - begin)
        record = self._drafter.record
        for _ in range(grown):
            self._push()
        record.note(draft, kept)
        if needs_forward:
            self._governor.pay([grown], 1, 1 + len(draft.ids))
        drafted = most if self._policy.startswith("perfect") else len(draft.ids)
        self.counts[part].add_step(grown, drafted, most, self._costs if needs_forward else None)
        self.reach += [begin + most] * grown

    def _most(self, kept: int, coming: list[int]) -> int:
        """Tokens of what is `coming` that the step's draft ought to have had; `kept` is what it has."""
        return kept

    def _push(self) -> None:
        """The next token of the text, and what begins before or behind it."""
        token = self._recording.new[self._position]
        self._position += 1
        if self._position == self._recording.opens:  # its last marker token is the thought's, as in `TextState.emit`
            self._drafter = self._new_drafter("thought")
            self._drafter.add("prompt", self._prompt)
            self._drafter.add("answer", self._written["answer"])
        self._drafter.observe(token)
        if self._position == self._recording.closes:
            self._begin_answer()

    def _begin_answer(self) -> None:
        self._drafter = self._new_drafter("answer")
        self._drafter.add("thought", self._written["thought"])
        self._drafter.add("prompt", self._prompt)
        for draft in self._recording.drafts:
            self._drafter.add_draft(SuffixAutomaton(draft))


class PerfectRewriting(Rewriting):
    """
    The same with what no policy can know: each step goes as far as the best of three, the drafter's own draft, the
    longest run from any place in the sources, and the draft of `"off"` that the text's position lies in. So it never
    takes more forwards than `"off"`.
    """

    def __init__(self, recording: Recording, sources: Sequence[str], num_draft_tokens: int):
        super().__init__(recording, sources, "perfect source", num_draft_tokens)
        real = Rewriting(recording, sources, "off", num_draft_tokens)
        real.run()
        self._real_reach, self._places = real.reach, Places()
        if "prompt" in sources:
            self._places.add(recording.prompt)

    def _most(self, kept: int, coming: list[int]) -> int:
        if not self._position or not coming:
            return kept
        run = self._places.longest(self._recording.new[self._position - 1], coming)
        return max(kept, run, min(self._real_reach[self._position] - self._position, len(coming)))

    def _push(self) -> None:
        recording, position = self._recording, self._position
        token = recording.new[position]
        if recording.part(position) in self._sources:
            self._places.push(token)
        super()._push()
        if self._position in (recording.opens, recording.closes):
            self._places.begin()
        if self._position == recording.closes and "draft" in self._sources:
            for draft in recording.drafts:
                self._places.add([token, *draft])


def rewrite(recording: Recording, sources: Sequence[str], policy: str, num_draft_tokens: int) -> dict[str, Counts]:
    """What thought and answer of a recording take, with a policy of `POLICIES`; the rest as in [`Rewriting`]."""
    if policy == "perfect source":
        return PerfectRewriting(recording, sources, num_draft_tokens).run()
    return Rewriting(recording, sources, policy, num_draft_tokens).run()
