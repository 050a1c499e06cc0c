"""`SSRMetrics`: everything that is counted while SSR decodes, and the rates derived from it."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch

from .printing import rows_of
from .validating import SOURCES

# Where the target's forwards are spent: `drafting` are the steps in which a child drafts while its parent thinks;
# `verify` are the rounds up to the first mismatch with the draft, `speculate` all later steps of the answer.
PHASES = ("prefill", "thinking", "drafting", "verify", "speculate")


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


@dataclass
class Stage:
    """
    One fork and its draft.

    Args:
        draft_budget (`int`): thinking tokens before the fork, of all thoughts so far.
        draft_tokens (`int`): tokens that the child drafted, the forced close not counted.
        ended_by (`str`): `"eos"`, `"max_draft_length"`, `"max_length"`, `"fork"` (the next stage began), `"close"` (the
            thought ended), `"overhead"` (`max_overhead` allows no more), `"stop"` (generation ended) or
            `"out_of_memory"` (there was no room for the fork, or, where all layers are attention, for its next step).
        forwards (`int`), seconds (`float`): those that the child took part in, and what they took in all.
        accepted_tokens (`int`): tokens of the answer that were taken from this draft.
        draft (`list[int]`): the draft itself. Not in `to_dict` of the metrics.
    """

    draft_budget: int
    draft_tokens: int = 0
    ended_by: str = ""
    forwards: int = 0
    seconds: float = 0.0
    accepted_tokens: int = 0
    draft: list[int] = field(default_factory=list, repr=False)


@dataclass
class Timer:
    """Seconds of what was timed."""

    seconds: float = 0.0


@dataclass
class SSRMetrics:
    """
    Counts (tokens, forwards) and times (seconds) of one prompt's generation; rates are properties, `nan` where
    undefined. Of a batch: tokens of all prompts, and the forwards and seconds that they share, each counted as the
    first of drafting, thinking, verify and speculate that some row is in.

    Args:
        prompt_tokens, new_tokens, thinking_tokens (`int`): lengths; a thought's closing marker counts as thought. Of
            several thoughts, all tokens.
        thoughts (`list[list[int]]`): where each thought begins and ends among the new tokens.
        stages (`list[Stage]`): the forks, in order.
        rounds (`int`): target forwards of the answer that verified a draft.
        drafted_tokens (`int`): draft tokens that were given to verification.
        prefix_accepted (`int`): draft tokens accepted before the first mismatch with the draft.
        suffix_accepted (`dict[str, int]`): draft tokens accepted later, by the source they were drafted from.
        accepted_by_position (`list[list[int]]`): of the first, second, ... draft token of a round: how often it was
            verified, how often kept.
        recovered_tokens, bonus_tokens, plain_tokens (`int`): tokens of the model itself: replacing a rejected draft
            token, after a fully accepted draft, and from steps without a draft.
        spans (`list`): the new tokens in order as runs of [source, count]: `"model"`, `"prefix"` (of a draft, before
            the first mismatch), or `"draft"`, `"thought"`, `"prompt"`, `"answer"` (past a mismatch).
        lookups, hits (`int`): steps of the answer past the first mismatch; those in which a draft token was accepted.
        forwards (`dict[str, int]`): target forwards by phase.
        shapes (`dict[str, dict[str, list]]`): forwards after the prefill by phase and by rows x tokens: how many, and
            their seconds.
        timeline (`list[tuple]`): each forward in order: phase, rows, tokens, seconds since the start, seconds that it
            took. Not in `to_dict`.
        thinking_drafted_tokens, thinking_accepted_tokens (`int`): draft tokens verified, and kept, in the thought; the
            other counts are of the answer.
        seconds (`dict[str, float]`): wall time by phase. Drafting is hidden in the thought, except for
            `drafting_exposed`, the part of it in which the parent waits: to fork, drop the row, pick the child's
            tokens.
        forward_seconds, total_seconds (`float`): inside the model's forwards, and of the whole generation.
        thinking_budget (`int`, *optional*): the budget in force; `thinking_budget_capped`: whether it was cut to leave
            room for an answer.
        draft_probs_bytes (`int`): memory of the largest draft's probabilities, which some rules keep; a batch's sum.
        extra_places (`int`): most places of the cache in use beyond the texts, for children and draft tokens; room to
            grow is not counted. In a batch each row has as many as the longest. A child that is a row of its own has
            places for all that its parent has.
        plain_reason (`str`, *optional*): why plain decoding ran instead of SSR.
        per_row (`list[SSRMetrics]`): of a batch, each row's own tokens, and the forwards that it took part in;
            no times, as they are shared.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    thinking_tokens: int = 0
    thoughts: list[list[int]] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    rounds: int = 0
    drafted_tokens: int = 0
    prefix_accepted: int = 0
    suffix_accepted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    accepted_by_position: list[list[int]] = field(default_factory=list, repr=False)
    recovered_tokens: int = 0
    bonus_tokens: int = 0
    plain_tokens: int = 0
    spans: list[list] = field(default_factory=list)
    lookups: int = 0
    hits: int = 0
    forwards: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    thinking_drafted_tokens: int = 0
    thinking_accepted_tokens: int = 0
    shapes: dict[str, dict[str, list]] = field(default_factory=dict)
    timeline: list[tuple[str, int, int, float, float]] = field(default_factory=list, repr=False)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*PHASES, "drafting_exposed"), 0.0))
    forward_seconds: float = 0.0
    total_seconds: float = 0.0
    thinking_budget: int | None = None
    thinking_budget_capped: bool = False
    draft_probs_bytes: int = 0
    extra_places: int = 0
    plain_reason: str | None = None
    per_row: list["SSRMetrics"] = field(default_factory=list)

    def __post_init__(self):
        self._began = time.perf_counter()

    def add_rows(self, rows: list["SSRMetrics"]) -> None:
        """The tokens of a batch, and its rows."""
        self.per_row = rows
        for name in _SUMS:
            setattr(self, name, sum(getattr(row, name) for row in rows))
        for row in rows:
            self.stages += row.stages
            row.total_seconds = row.forward_seconds = math.nan  # they are shared
            self.seconds["drafting_exposed"] += row.seconds["drafting_exposed"]
            for source, count in row.suffix_accepted.items():
                self.suffix_accepted[source] = self.suffix_accepted.get(source, 0) + count
            self.add_positions(row.accepted_by_position)
        budgets = [row.thinking_budget for row in rows if row.thinking_budget is not None]
        self.thinking_budget = max(budgets, default=None)
        self.thinking_budget_capped = any(row.thinking_budget_capped for row in rows)

    def add_positions(self, positions: list[list[int]]) -> None:
        """`accepted_by_position` of another run."""
        for position, (verified, kept) in enumerate(positions):
            if position == len(self.accepted_by_position):
                self.accepted_by_position.append([0, 0])
            self.accepted_by_position[position][0] += verified
            self.accepted_by_position[position][1] += kept

    def add_round(self, draft, verified: int, kept: int, has_parted: bool) -> None:
        """
        Of a [`Draft`] of the answer so many tokens were `verified` and `kept`; whether a token of the model's own came
        behind them.
        """
        if draft.is_prefix:
            self.prefix_accepted += kept
        else:
            self.hits += kept > 0
            if draft.source is not None:
                self.suffix_accepted[draft.source] = self.suffix_accepted.get(draft.source, 0) + kept
        if draft.stage is not None:
            draft.stage.accepted_tokens += kept
        self.rounds += verified > 0
        self.drafted_tokens += verified
        self.add_positions([[1, place < kept] for place in range(verified)])
        if has_parted:
            own = "plain_tokens" if not verified else "bonus_tokens" if kept == verified else "recovered_tokens"
            setattr(self, own, getattr(self, own) + 1)

    def add_token(self, source: str | None) -> None:
        """The next new token comes from there."""
        if not self.spans or self.spans[-1][0] != source:
            self.spans.append([source, 0])
        self.spans[-1][1] += 1

    @contextmanager
    def timed_forward(self, phase: str, rows: int, tokens: int, device: torch.device) -> Iterator["Timer"]:
        """Counts one target forward of `rows` x `tokens` and its time. Waits for the device, as picking would."""
        timer, begin = Timer(), time.perf_counter()
        yield timer
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        elapsed = timer.seconds = time.perf_counter() - begin
        self.forwards[phase] += 1
        self.forward_seconds += elapsed
        self.timeline.append((phase, rows, tokens, begin - self._began, elapsed))
        if phase != "prefill":
            shape = self.shapes.setdefault(phase, {}).setdefault(f"{rows}x{tokens}", [0, 0.0])
            shape[0] += 1
            shape[1] += elapsed

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the wall time of the block to `seconds[phase]`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - begin

    @contextmanager
    def timed_in_all(self) -> Iterator[None]:
        """Measures `total_seconds`."""
        self._began = time.perf_counter()
        try:
            yield
        finally:
            self.total_seconds = time.perf_counter() - self._began

    @property
    def target_forwards(self) -> int:
        """All forwards, the prefill among them."""
        return sum(self.forwards.values())

    @property
    def answer_forwards(self) -> int:
        """Forwards after the thought (after the prefill, if there is none)."""
        return self.forwards["verify"] + self.forwards["speculate"]

    @property
    def answer_tokens(self) -> int:
        """New tokens outside the thought."""
        return self.new_tokens - self.thinking_tokens

    @property
    def draft_tokens(self) -> int:
        """Tokens drafted by the children of all stages."""
        return sum(stage.draft_tokens for stage in self.stages)

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens that were kept."""
        return self.prefix_accepted + sum(self.suffix_accepted.values())

    @property
    def wasted_draft_tokens(self) -> int:
        """Draft tokens that were verified in vain."""
        return self.drafted_tokens - self.accepted_tokens

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens / verified draft tokens."""
        return _ratio(self.accepted_tokens, self.drafted_tokens)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens gained by a round: 1 + accepted / rounds."""
        return 1 + _ratio(self.accepted_tokens, self.rounds)

    @property
    def mean_draft_length(self) -> float:
        """Draft tokens of a round."""
        return _ratio(self.drafted_tokens, self.rounds)

    @property
    def suffix_hit_rate(self) -> float:
        """Share of the answer's steps past the first mismatch in which a draft token was accepted."""
        return _ratio(self.hits, self.lookups)

    @property
    def tokens_per_forward(self) -> float:
        """New tokens / forwards, over the whole generation."""
        return _ratio(self.new_tokens, self.target_forwards)

    @property
    def answer_tokens_per_forward(self) -> float:
        """Answer tokens / forwards after the thought."""
        return _ratio(self.answer_tokens, self.answer_forwards)

    def _mean_seconds(self, select) -> float:
        """Mean time of the forwards whose phase, rows and tokens `select` takes."""
        shapes = [(phase, shape, v) for phase, found in self.shapes.items() for shape, v in found.items()]
        chosen = [v for phase, shape, v in shapes if select(phase, *map(int, shape.split("x")))]
        return _ratio(sum(seconds for _, seconds in chosen), sum(count for count, _ in chosen))

    @property
    def plain_step_seconds(self) -> float:
        """Mean time of a one-row, one-token forward in this run; undefined in a batch, as what is based on it."""
        return math.nan if self.per_row else self._mean_seconds(lambda _, rows, tokens: rows == tokens == 1)

    @property
    def verify_overhead(self) -> float:
        """Time of a forward that verifies a draft / time of a plain step."""
        verifying = self._mean_seconds(lambda phase, rows, tokens: phase != "drafting" and rows == 1 < tokens)
        return _ratio(verifying, self.plain_step_seconds)

    @property
    def thinking_slowdown(self) -> float:
        """Time of a step with a child / time of a plain step: what a child costs the parent while it is there."""
        return _ratio(self._mean_seconds(lambda phase, *_: phase == "drafting"), self.plain_step_seconds)

    @property
    def answer_speedup(self) -> float:
        """Time of the answer in plain steps, one a token, / its time here. Prefill and thought are not counted."""
        here = self.seconds["verify"] + self.seconds["speculate"]
        return _ratio(self.answer_tokens * self.plain_step_seconds, here)

    @property
    def cost(self) -> float:
        """All forwards after the prefill, each weighted by its measured time, in plain steps."""
        seconds = sum(seconds for shapes in self.shapes.values() for _, seconds in shapes.values())
        return _ratio(seconds, self.plain_step_seconds)

    @property
    def overhead_seconds(self) -> float:
        """Time outside the model's forwards."""
        return self.total_seconds - self.forward_seconds

    def to_dict(self) -> dict:
        """Counts, times and rates for JSON; an undefined rate is `None`."""
        rates = {name: getattr(self, name) for name in _DERIVED}
        values = {**asdict(self), **rates, "per_row": [row.to_dict() for row in self.per_row]}
        for stage in values["stages"]:
            del stage["draft"]
        del values["timeline"]
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}

    def __str__(self) -> str:
        return "\n".join(f"{name:<28}{value}" for name, value in rows_of(self, _DERIVED))


_SUMS = (
    *("prompt_tokens", "new_tokens", "thinking_tokens", "rounds", "drafted_tokens", "prefix_accepted", "lookups"),
    *("hits", "recovered_tokens", "bonus_tokens", "plain_tokens", "draft_probs_bytes"),
    *("thinking_drafted_tokens", "thinking_accepted_tokens"),
)
_DERIVED = tuple(name for name, value in vars(SSRMetrics).items() if isinstance(value, property))
