"""All that the lanes of one text may draft from, and the drafter of each part of it."""

from collections.abc import Callable

from .draft_records import AcceptanceRecord
from .drafter_suffix import SuffixDrafter
from .drafting import Drafter
from .metrics import Stage
from .suffix_automaton import SuffixAutomaton

# What drafts, by name. Each is made with the settings of a call, and is the drafter of one part of a text.
DRAFTERS: dict[str, Callable[..., Drafter]] = {"suffix": SuffixDrafter.from_config}


class DraftSources:
    """
    The prompt, what is written, the stages' drafts, and a prediction; and how often drafts from them were kept.

    Args:
        config ([`SSRConfig`]): as `generate` prepares it.
        prompt (`list[int]`): of the text.
        tail (`Sequence[int]`): what may stand between a thought's close and the answer.
        prediction (`list[int]`): of `prediction_ids`.
    """

    def __init__(self, config, prompt: list[int], tail=(), prediction=()):
        self._config, self.tail, self.prediction = config, list(tail), list(prediction)
        self._prompt = SuffixAutomaton(prompt if "prompt" in config.setting("sources") else ())
        self.written = {"thought": SuffixAutomaton(), "answer": SuffixAutomaton()}  # all of each kind
        self._records = {"thought": AcceptanceRecord(), "answer": AcceptanceRecord()}
        self.drafts: list[tuple[SuffixAutomaton, list, Stage | None]] = []  # of each stage, behind the close; and probs

    def add_draft(self, tokens: SuffixAutomaton, probs: list, stage: Stage | None = None) -> None:
        """A stage's draft. Only the last is followed from its first token, so only its probabilities are of use."""
        self._forget_probs()
        self.drafts.append((tokens, probs, stage))

    def first_drafter(self, is_open: bool) -> Drafter:
        """For a thought that is open already, else for what comes before one."""
        own = "thought" if is_open else "answer"
        drafter = self._drafter(own, self.written[own])
        drafter.add("prompt", self._prompt)
        drafter.add_draft(SuffixAutomaton(self.prediction), begin=None if is_open else 0)
        return drafter

    def drafter_of_thought(self) -> Drafter:
        """A thought opens: it repeats itself and those before it, the prompt, the answer so far, and drafts of it."""
        drafter = self._drafter("thought", self.written["thought"])
        drafter.add("prompt", self._prompt)
        drafter.add("answer", self.written["answer"])
        self._forget_probs()  # decisions may have looked at them
        for draft, *_ in self.drafts:
            drafter.add_draft(draft, begin=None)
        drafter.add_draft(SuffixAutomaton(self.prediction), begin=None)
        return drafter

    def drafter_of_answer(self) -> Drafter:
        """A thought is over: of equally long matches, a later draft wins, then the thoughts."""
        drafter = self._drafter("answer", self.written["answer"])
        drafter.add("thought", self.written["thought"])
        drafter.add("prompt", self._prompt)
        for draft, probs, stage in self.drafts:
            drafter.add_draft(draft, probs or None, stage=stage)
        tail, prediction = self.tail, self.prediction
        if prediction:
            has_tail = prediction[: len(tail)] == tail
            drafter.add_draft(SuffixAutomaton(prediction if has_tail else [*tail, *prediction]))
        return drafter

    def drafter_of_child(self) -> Drafter:
        """A child's draft begins as the last one did. It is written from the tail of the close on."""
        drafter = self._drafter("answer")
        drafter.add("thought", self.written["thought"])
        drafter.add("prompt", self._prompt)
        drafter.add("answer", self.written["answer"])
        for draft, *_ in self.drafts:
            drafter.add_draft(draft, begin=len(self.tail))
        for token in self.tail:
            drafter.written.extend(token)
        return drafter

    def _drafter(self, own: str, written: SuffixAutomaton | None = None) -> Drafter:
        return DRAFTERS["suffix"](self._config, self.tail, own=own, record=self._records[own], written=written)

    def _forget_probs(self) -> None:
        self.drafts = [(draft, [], stage) for draft, _, stage in self.drafts]
