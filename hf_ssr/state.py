"""The state of one text: what is written so far, and how the target picks the next token."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from .child import Child, DraftSampling
from .costs import RoundClock
from .drafter_suffix import SuffixDrafter
from .drafting import (
    ANSWER,
    ROW_WISE_PROCESSORS,
    THOUGHT,
    AcceptanceRecord,
    Draft,
    child_processors,
    place_of_budget,
)
from .host import eos_token_ids, pad_token_id
from .metrics import SSRMetrics, Stage
from .output import SSROutput, Stream
from .scheduling import ForkSchedule
from .suffix_automaton import SuffixAutomaton
from .target import Row, Target
from .think_state import ThinkingState
from .thinking import force_token
from .verifying import gumbel_choice


class TextState:
    """
    One prompt and its output. Does what plain `generate` does for each token, in the same order: pick it with the same
    processors and one random draw, append it, ask the stopping criteria, stream it.

    Args:
        row (`Row`): the prompt; its text is the output.
        generation_config, logits_processor, stopping_criteria: as `generate` prepares them.
        thinking ([`ThinkingState`]): follows the text; also forces the tokens of a thinking budget.
        make_drafter (`Callable[..., SuffixDrafter]`): of `own`, a part of the text, `"thought"` or `"answer"`, and of
            `record`, an [`AcceptanceRecord`].
        stream ([`Stream`]): is given each token.
        metrics ([`SSRMetrics`]): counts tokens.
        clock ([`RoundClock`]): of the rounds.
        prediction (`list[int]`): of `prediction_ids`.
    """

    def __init__(
        self,
        row: Row,
        generation_config: GenerationConfig,
        thinking: ThinkingState,
        make_drafter: Callable[..., SuffixDrafter],
        stream: Stream,
        metrics: SSRMetrics,
        clock: RoundClock,
        *,
        prediction: list[int],
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
    ):
        self.row = row
        self.config = generation_config
        self.thinking = thinking
        self.make_drafter = make_drafter
        self.stream = stream
        self.metrics = metrics
        self.clock = clock
        self.logits_processor = logits_processor
        place = place_of_budget(logits_processor)
        self._before_budget = LogitsProcessorList(logits_processor[:place])
        self._behind_budget = LogitsProcessorList(logits_processor[place:])
        self.stopping_criteria = stopping_criteria
        self.prompt = row.ids[0].tolist()
        self.prompt_index = SuffixAutomaton(self.prompt if "prompt" in generation_config.setting("sources") else ())
        self.prediction = prediction
        self.records = {"thought": AcceptanceRecord(), "answer": AcceptanceRecord()}
        self.written = {"thought": SuffixAutomaton(), "answer": SuffixAutomaton()}  # all of each kind
        self.drafter = self._first_drafter()
        self.done = False
        self.child: Child | None = None
        self.drafts: list[tuple[SuffixAutomaton, list, Stage]] = []  # of each stage, from its lead on, and their probs
        self.speculates_thinking = generation_config.setting("speculate_thinking")
        self.seed = 0  # of rules that draw in other ways than plain `generate`
        self.processors_keep_no_state = all(type(each) in ROW_WISE_PROCESSORS for each in logits_processor)
        keep = generation_config.return_dict_in_generate
        self.scores: tuple | None = () if keep and generation_config.output_scores else None
        self.logits: tuple | None = () if keep and generation_config.output_logits else None

    @property
    def eos_ids(self) -> set[int]:
        """Tokens that end the text."""
        return eos_token_ids(self.config)

    def _new_drafter(self, own: str, written: SuffixAutomaton | None = None) -> SuffixDrafter:
        return self.make_drafter(own=own, record=self.records[own], written=written)

    def _first_drafter(self) -> SuffixDrafter:
        """For a thought that is open already, else for what comes before one."""
        own = "thought" if self.thinking.open else "answer"
        drafter = self._new_drafter(own, self.written[own])
        drafter.add("prompt", self.prompt_index)
        drafter.add_draft(SuffixAutomaton(self.prediction), begin=None if self.thinking.open else 0)
        return drafter

    def begin_thought(self) -> None:
        """A thought opens: it repeats itself and those before it, the prompt, the answer so far, and drafts of it."""
        self.drafter = self._new_drafter("thought", self.written["thought"])
        self.drafter.add("prompt", self.prompt_index)
        self.drafter.add("answer", self.written["answer"])
        self.drafts = [(draft, [], stage) for draft, _, stage in self.drafts]  # decisions may have looked at them
        for draft, *_ in self.drafts:
            self.drafter.add_draft(draft, begin=None)
        self.drafter.add_draft(SuffixAutomaton(self.prediction), begin=None)

    def begin_answer(self) -> None:
        """A thought is over: of equally long matches, a later draft wins, then the thoughts."""
        self.drafter = self._new_drafter("answer", self.written["answer"])
        self.drafter.add("thought", self.written["thought"])
        self.drafter.add("prompt", self.prompt_index)
        for draft, probs, stage in self.drafts:
            self.drafter.add_draft(draft, probs or None, stage=stage)
        tail, prediction = list(self.thinking.tail), self.prediction
        if prediction:
            has_tail = prediction[: len(tail)] == tail
            self.drafter.add_draft(SuffixAutomaton(prediction if has_tail else [*tail, *prediction]))

    def fork(self, thinking_tokens: int) -> None:
        """A child goes on from the text with the forced close. Its draft begins as the last one did."""
        config, rule, lead = self.config, self.config.rule, self.thinking.tail
        temperature = config.draft_temperature
        as_parent = temperature is None and rule != "exact"
        if temperature is None:
            temperature = float(as_parent)  # the parent's own is among its processors
        sampling = DraftSampling(temperature)
        if rule == "coupled":
            sampling.noise = self.seed, self.thinking.other_tokens + len(lead)
        elif temperature > 0:
            # other rules than the exact one are right only if drafts differ from run to run
            seed = (config.setting("draft_seed") + thinking_tokens + self.seed) % 2**63
            sampling.generator = torch.Generator(self.row.ids.device).manual_seed(seed)
            sampling.keeps_probs = rule != "exact"
        drafter = self._new_drafter("answer")
        drafter.add("thought", self.written["thought"])
        drafter.add("prompt", self.prompt_index)
        drafter.add("answer", self.written["answer"])
        for draft, *_ in self.drafts:
            drafter.add_draft(draft, begin=len(lead))
        for token in lead:
            drafter.written.extend(token)
        self.child = Child(
            self.row.fork(),
            thinking_tokens,
            self.thinking.markers.forced_close,
            child_processors(self.logits_processor, temperature == 0, not as_parent),
            sampling,
            self.eos_ids,
            drafter,
            config.max_draft_length,
        )

    def propose(self, limit: int) -> Draft:
        """At most `limit` tokens of a draft of what comes next."""
        return self.drafter.propose(min(self.drafter.num_draft_tokens, limit))

    @RoundClock.as_plain
    def choose(self, logits: torch.FloatTensor) -> int:
        """
        The target's next token, as plain `generate` picks it; under the coupled rule, with noise of its own.

        Args:
            logits (`torch.FloatTensor` of shape `(1, vocab_size)`): what the target says comes next.
        """
        scores, logits = self.processed(logits)
        self.keep_scores(scores, logits)
        if not self.config.do_sample:
            return int(scores.argmax(dim=-1))
        if self.config.rule == "coupled":
            return gumbel_choice(scores, self.seed, self._place)
        return int(torch.multinomial(scores.softmax(dim=-1), num_samples=1))

    def processed(self, logits: torch.FloatTensor) -> tuple[torch.FloatTensor, torch.FloatTensor]:
        """
        Scores of the next token after the processors, and the logits as these leave them (some work in place); both of
        shape `(1, vocab_size)`.

        Args:
            logits (`torch.FloatTensor` of shape `(1, vocab_size)`): what the target says comes next.
        """
        return self._processed(self.row.ids, logits, self.thinking.forced)

    def processed_ahead(
        self, logits: torch.FloatTensor, draft: Sequence[int]
    ) -> tuple[torch.FloatTensor, torch.FloatTensor]:
        """
        The same at consecutive positions, each behind the draft tokens before it; of shape `(positions, vocab_size)`.

        Args:
            logits (`torch.FloatTensor` of shape `(1, positions, vocab_size)`): what the target says there.
            draft (`Sequence[int]`): tokens to suppose behind the text.
        """
        ids = torch.cat([self.row.ids, self.row.ids.new_tensor([draft])], dim=1)
        rows = []
        for position, forced in zip(range(logits.shape[1]), self.thinking.forced_along(draft), strict=False):
            rows.append(self._processed(ids[:, : self.row.length + position], logits[:, position], forced))
        scores, logits = zip(*rows, strict=True)
        return torch.cat(scores), torch.cat(logits)

    def _processed(
        self, ids: torch.LongTensor, logits: torch.FloatTensor, forced: int | None
    ) -> tuple[torch.FloatTensor, torch.FloatTensor]:
        logits = logits.to(copy=True, dtype=torch.float32, device=ids.device)
        scores = self._before_budget(ids, logits)
        if forced is not None:
            scores = force_token(scores, forced)
        return self._behind_budget(ids, scores), logits

    def keep_scores(self, scores: torch.FloatTensor, logits: torch.FloatTensor) -> None:
        """For the output, where it was asked for: those of each emitted token, as they were processed."""
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)

    @property
    def _place(self) -> tuple[int, int]:
        """Of the next token: what it is part of, and its index among all of that kind: a child knows it beforehand."""
        thinking = self.thinking
        return (THOUGHT, thinking.thinking_tokens) if thinking.open else (ANSWER, thinking.other_tokens)

    def choices(self, logits: torch.FloatTensor) -> Iterator[int]:
        """
        The target's tokens at consecutive positions. Each must be emitted before the next is asked for.

        Args:
            logits (`torch.FloatTensor` of shape `(1, positions, vocab_size)`): what comes at each, if the ones before
                agree.
        """
        # in a block of the thought, the budget may be reached on the way
        argmax_will_do = not (self.config.do_sample or self.logits_processor or self.thinking.may_be_forced)
        if argmax_will_do and self.scores is None and self.logits is None:
            yield from logits[0].float().argmax(dim=-1).tolist()
        else:
            for position in range(logits.shape[1]):
                yield self.choose(logits[:, position])

    @RoundClock.as_plain
    def emit(self, token: int, source: str = "model") -> None:
        """Appends the next token, which was drafted from `source`; the text may be done after it."""
        self.row.append(token)
        self.metrics.add_token(source)
        was_open = self.thinking.open
        self.thinking.push(token)
        if self.thinking.open and not was_open:
            self.begin_thought()
        self.done = bool(self.stopping_criteria(self.row.ids, self.scores).all())
        if self.stream.streamer is not None:
            self.stream.put(self.row.last.clone())

    def next_budget(self, schedule: ForkSchedule) -> int | None:
        """Thinking tokens, of now or later, after which a stage begins."""
        stages = self.metrics.stages
        last = self.child.draft_budget if self.child is not None else stages[-1].draft_budget if stages else None
        return schedule.next_budget(
            self.thinking.thinking_tokens, [draft.tokens for draft, *_ in self.drafts[-2:]], last
        )

    def can_draft_ahead_of(self, token: int) -> bool:
        """Whether the thought goes on with `token`, and there is room for its close and an answer."""
        closing = self.thinking.forced is not None or self.thinking.closes_with(token)
        return not closing and self.row.room > len(self.thinking.markers.forced_close) + 1

    def end_stage(self, reason: str) -> None:
        """The child drafts no more; its tokens stay as a draft."""
        if self.child is None:
            return
        child, tokens, probs = self.child, self.child.tokens, self.child.probs
        stage = Stage(child.draft_budget, len(tokens), reason, child.forwards, child.seconds, draft=tokens)
        self.metrics.stages.append(stage)
        if tokens:
            # only the last draft is followed from its first token, so only its probabilities are of use
            probs = [None] * len(self.thinking.tail) + probs
            self.drafts = [(draft, [], of) for draft, _, of in self.drafts] + [(child.drafter.written, probs, stage)]
            size = sum(q.nbytes for q in probs if q is not None)
            self.metrics.draft_probs_bytes = max(self.metrics.draft_probs_bytes, size)
        self.child = None


def collect(target: Target, texts: list[TextState]) -> SSROutput | torch.LongTensor:
    """What `generate` returns: the texts, padded at their end, and what was counted."""
    config, metrics = target.config, target.metrics
    for text in texts:
        text.metrics.new_tokens = text.row.length - len(text.prompt)
        text.metrics.thinking_tokens = text.thinking.thinking_tokens
        text.metrics.thoughts = text.thinking.spans
        text.metrics.thinking_budget = text.thinking.budget
        text.metrics.thinking_budget_capped = text.thinking.budget_capped
    if len(texts) > 1:
        metrics.add_rows([text.metrics for text in texts])
    length = max(text.row.length for text in texts)
    pad = pad_token_id(config)
    sequences = torch.cat([F.pad(text.row.ids, (0, length - text.row.length), value=pad) for text in texts])
    if not config.return_dict_in_generate:
        return sequences
    if len(texts) > 1:
        return SSROutput(sequences=sequences, metrics=metrics)
    return SSROutput(
        sequences=sequences, scores=texts[0].scores, logits=texts[0].logits, cache=target.cache, metrics=metrics
    )
