"""Is a text before, in, or past a thought, and what does the thinking budget force next? Integers only; no tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .markers import Marker, ThinkingMarkers


@dataclass
class Thought:
    """
    A thought, in new tokens.

    Args:
        opens (`int`): before its first token.
        closes (`int`, *optional*): up to and with its closing marker; `None` = it is open.
        earlier (`int`): of the thoughts before it.
        stopped (`int`, *optional*): before it was told to end.
    """

    opens: int
    closes: int | None = None
    earlier: int = 0
    stopped: int | None = None


class ThinkingState:
    """
    Follows one text token by token: is it before a thought, in one, or past one, and which token does the thinking
    budget force next? An end marker outside a thought is text, and so is a start marker behind one, unless the model
    thinks more than once in an answer.

    Args:
        markers (`ThinkingMarkers`, *optional*): of the model; `None` = it never thinks.
        prompt (`Sequence[int]`): the prompt's token ids.
        thinking_budget (`int`, *optional*): most thinking tokens, of all thoughts together; the forced close follows,
            token by token.
        max_new_tokens (`int`, *optional*): most new tokens. A thinking budget that leaves no room for the forced close
            and one token of the answer is cut until it does.
        stop (`Callable[[], bool]`, *optional*): whether the thought is to end now; asked at each token.
    """

    def __init__(
        self,
        markers: ThinkingMarkers | None,
        prompt: Sequence[int],
        thinking_budget: int | None = None,
        max_new_tokens: int | None = None,
        stop: Callable[[], bool] | None = None,
    ):
        self.markers = markers
        progress = "closed" if markers is None else markers.progress_of_prompt(prompt)
        self.tokens: list[int] = []  # the new tokens so far
        self.thoughts = [Thought(0)] if progress == "open" else []  # in order; only the last can be open
        self.progress_of_prompt = progress
        self._budget = thinking_budget
        self._max_new_tokens = max_new_tokens
        self._stop = stop

    @property
    def known_markers(self) -> ThinkingMarkers:
        """The markers, of a model that thinks."""
        assert self.markers is not None, "nothing thinks here"
        return self.markers

    @property
    def progress(self) -> str:
        """`"unstarted"`, `"open"` or `"closed"`: what the next token is."""
        if not self.thoughts:
            return self.progress_of_prompt
        return "open" if self.open else "closed"

    @property
    def open(self) -> bool:
        """Whether the next token belongs to a thought."""
        return bool(self.thoughts) and self.thoughts[-1].closes is None

    @property
    def thinking_tokens(self) -> int:
        """Tokens of all thoughts so far, their closing markers among them."""
        if not self.thoughts:
            return 0
        last = self.thoughts[-1]
        return last.earlier + (len(self.tokens) if last.closes is None else last.closes) - last.opens

    @property
    def other_tokens(self) -> int:
        """New tokens so far that are of no thought."""
        return len(self.tokens) - self.thinking_tokens

    @property
    def spans(self) -> list[list[int]]:
        """Where each thought begins and, closing marker included, ends among the new tokens."""
        return [
            [thought.opens, len(self.tokens) if thought.closes is None else thought.closes] for thought in self.thoughts
        ]

    @property
    def tail(self) -> tuple[int, ...]:
        """What follows the end marker inside the forced close."""
        return () if self.markers is None else self.markers.tail

    @property
    def budget(self) -> int | None:
        """The thinking budget in force, in tokens; `None` where nothing thinks."""
        if self.markers is None or (self.progress_of_prompt == "closed" and not self.thoughts):
            return None
        thought = self.thoughts[-1] if self.thoughts else Thought(0)
        cut = self._earliest_cut(thought)
        if cut is None:
            return None
        used = thought.earlier + cut - thought.opens
        return used if self._budget is None else min(used, self._budget)  # a close of before may have gone beyond it

    @property
    def budget_capped(self) -> bool:
        """Whether the budget was cut so that an answer fits."""
        if self._budget is None or self.budget is None:
            return False
        thought = self.thoughts[-1] if self.thoughts else Thought(0)
        cut = self._cut_by_budget(thought)
        return cut is not None and thought.earlier + cut - thought.opens < self._budget

    @property
    def may_be_forced(self) -> bool:
        """Whether a token that is to come may be forced."""
        return (self._budget is not None or self._stop is not None) and (self.open or self.forced is not None)

    @property
    def forced(self) -> int | None:
        """The token that the thinking budget forces at the next position, if any."""
        self._stop_if_asked()
        cut = self._cut()
        if cut is None:
            return None
        step = len(self.tokens) - cut
        close = self.known_markers.forced_close
        return close[step] if step < len(close) else None

    def _earliest_cut(self, thought: Thought) -> int | None:
        """New tokens behind which a thought is to end, be its last character whole or not."""
        cuts = thought.stopped, self._cut_by_budget(thought)
        return min((cut for cut in cuts if cut is not None), default=None)

    def _cut_by_budget(self, thought: Thought) -> int | None:
        """The same, were it never told to end."""
        if self._budget is None:
            return None
        cut = thought.opens + max(0, self._budget - thought.earlier)
        latest = self._latest_cut(self.known_markers.patience)
        return cut if latest is None else max(thought.opens, min(cut, latest))

    def _latest_cut(self, patience: int) -> int | None:
        """New tokens behind which the forced close and one token of the answer fit, if it waits so many tokens."""
        if self._max_new_tokens is None:
            return None
        return self._max_new_tokens - len(self.known_markers.forced_close) - 1 - patience

    def _cut(self) -> int | None:
        """New tokens before the forced close of the last thought; `None` if it is not due, or was over long ago."""
        if not self.thoughts:
            return None
        thought, count, patience = self.thoughts[-1], len(self.tokens), self.known_markers.patience
        earliest = self._earliest_cut(thought)
        if earliest is None or not earliest <= count < earliest + patience + len(self.known_markers.forced_close):
            return None
        for cut in range(earliest, min(earliest + patience, count) + 1):
            if thought.closes is not None and thought.closes <= cut:
                return None  # the thought closed by itself
            if cut == earliest + patience or self._is_whole(thought, cut):
                return cut
        return None

    def _is_whole(self, thought: Thought, count: int) -> bool:
        """Whether the thought ends no character halfway, `count` new tokens into the text."""
        markers = self.known_markers
        return markers.is_whole(self.tokens[max(thought.opens, count - 1 - markers.patience) : count])

    def _stop_if_asked(self) -> None:
        """The open thought is to end here, if it is told to and an answer fits."""
        if self._stop is None or not self.open or not self._stop():
            return
        thought, count = self.thoughts[-1], len(self.tokens)
        if thought.stopped is not None and thought.stopped <= count:
            return
        latest = self._latest_cut(0 if self._is_whole(thought, count) else self.known_markers.patience)
        if latest is None or count <= latest:
            thought.stopped = count

    def forced_along(self, draft: Sequence[int]) -> list[int | None]:
        """The same at the next position, and behind each of some tokens that are only supposed."""
        count, forced = len(self.tokens), [self.forced]
        for token in draft:
            self.push(token)
            forced.append(self.forced)
        self.rewind(count)
        return forced

    def closes_with(self, token: int) -> bool:
        """Whether `token` would complete the closing marker of the open thought."""
        return self._completes(self.known_markers.end, token, self.thoughts[-1].opens)

    def _opens_with(self, token: int) -> bool:
        """Whether `token` would complete the marker that opens the next thought."""
        if self.progress == "unstarted":
            start = self.known_markers.start
            assert start is not None  # else the thought would be open
            return self._completes(start, token, 0)
        if self.markers is None or self.markers.later_start is None:
            return False
        begin = self.thoughts[-1].closes if self.thoughts else 0
        assert begin is not None  # no thought is open
        return self._completes(self.markers.later_start, token, begin)

    def _completes(self, marker: Marker, token: int, begin: int) -> bool:
        """Whether `token` would complete a marker that lies behind the first `begin` new tokens."""
        return marker.ends([*self.tokens[max(begin, len(self.tokens) + 1 - marker.window) :], token])

    def push(self, token: int) -> None:
        """Take the next token into account: O(1)."""
        if self.open:
            closes, opens = self.closes_with(token), False
        else:
            closes, opens = False, self._opens_with(token)
        earlier = self.thinking_tokens
        self.tokens.append(token)
        if closes:
            self.thoughts[-1].closes = len(self.tokens)
        elif opens:
            self.thoughts.append(Thought(len(self.tokens), earlier=earlier))

    def rewind(self, count: int) -> None:
        """Forget all but the first `count` new tokens."""
        del self.tokens[count:]
        while self.thoughts and self.thoughts[-1].opens > count:
            self.thoughts.pop()
        if self.thoughts and (self.thoughts[-1].closes or 0) > count:
            self.thoughts[-1].closes = None
