"""Thinking markers: what to look for, in tokens or in text, and which of them a model uses."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .families import FAMILIES, Family, decode, encode, family_of, spellings_of, turn_ends_of

LONGEST_CHARACTER = 4  # tokens, as many as its bytes


@dataclass(frozen=True)
class Marker:
    """
    A marker to look for: token sequences that spell it, or a text that is found however it is tokenised.

    Args:
        spellings (`tuple[tuple[int, ...], ...]`): token ids, one tuple a spelling; not used if `text` is set.
        text (`str`, *optional*): what to find in the decoded tokens.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): decodes the tokens if `text` is set.
    """

    spellings: tuple[tuple[int, ...], ...] = ()
    text: str | None = None
    tokenizer: Any = field(default=None, compare=False, repr=False)

    @cached_property
    def window(self) -> int:
        """Most tokens that an occurrence can take."""
        if self.text is not None:  # a token is at least a byte; one more, as the first may be half a character
            return len(self.text.encode()) + 1
        return max(map(len, self.spellings))

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether the last of `tokens` completes the marker, given that no token before it did."""
        if self.text is not None:
            return self.text in decode(self.tokenizer, tokens[-self.window :])
        return any(tuple(tokens[-len(spelling) :]) == spelling for spelling in self.spellings)

    def begin_in(self, tokens: Sequence[int]) -> int:
        """Index where the marker begins that `tokens` end with."""
        return next(begin for begin in range(len(tokens) - 1, -1, -1) if self.ends(tokens[begin:]))

    def begun_by(self, tokens: Sequence[int]) -> int:
        """Most of the last of `tokens` with which the marker may have begun."""
        if self.text is not None:
            return min(len(tokens), self.window - 1)
        lengths = range(min(len(tokens), self.window - 1), 0, -1)
        return next((n for n in lengths if any(tuple(tokens[-n:]) == s[:n] != s for s in self.spellings)), 0)

    def first_end(self, tokens: Sequence[int]) -> int | None:
        """Index just past the first occurrence in `tokens`, `None` if there is none."""
        return next((end for end in range(1, len(tokens) + 1) if self.ends(tokens[:end])), None)


@dataclass(frozen=True)
class ThinkingMarkers:
    """
    How one model marks its thoughts, resolved to what decoding needs.

    Args:
        start (`Marker`, *optional*): opens a thought; `None` = the thought is open from the first new token.
        end (`Marker`): the shortest marker that closes a thought.
        forced_close (`tuple[int, ...]`): what is appended when a thought is cut.
        later_start (`Marker`, *optional*): opens a thought behind an earlier one; `None` = it is text there.
        scan_prompt (`bool`): whether to look for markers in the prompt.
        turn_ends (`frozenset[int]`): tokens that end a turn; markers before the last of them are of earlier turns.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): tells white space from text behind a close in the prompt, and
            whether a character is whole.
    """

    start: Marker | None
    end: Marker
    forced_close: tuple[int, ...]
    later_start: Marker | None = None
    scan_prompt: bool = True
    turn_ends: frozenset[int] = frozenset()
    tokenizer: Any = field(default=None, compare=False, repr=False)

    @cached_property
    def tail(self) -> tuple[int, ...]:
        """What follows the end marker inside the forced close: `\\n\\n`, or the opening of gpt-oss's final channel."""
        return self.forced_close[self.end.first_end(self.forced_close) :]

    def __deepcopy__(self, memo) -> "ThinkingMarkers":
        return self  # nothing of it changes

    @property
    def patience(self) -> int:
        """Most tokens that a thought goes on to complete its last character, before it is cut."""
        return 0 if self.tokenizer is None else LONGEST_CHARACTER - 1

    def is_whole(self, tokens: Sequence[int]) -> bool:
        """Whether some tokens end with a whole character, as far as a tokenizer tells. The last few are enough."""
        if self.tokenizer is None or not tokens:
            return True
        # a decoder that finds half a character at the beginning may take what follows for broken, too
        counts = range(1, min(len(tokens), LONGEST_CHARACTER) + 1)
        return any(not decode(self.tokenizer, tokens[-count:]).endswith("\ufffd") for count in counts)

    def progress_of_prompt(self, prompt: Sequence[int]) -> str:
        """`"open"` if the prompt ends inside a thought, `"closed"` if just past one, else `"unstarted"`."""
        unmarked = "open" if self.start is None else "unstarted"
        if not self.scan_prompt:
            return unmarked
        turn = max((i + 1 for i, token in enumerate(prompt) if token in self.turn_ends), default=0)
        opened, closed, at_answer = self._last_marks(list(prompt[turn:]))
        if opened >= closed:
            return "open" if opened > 0 else unmarked
        return "closed" if at_answer else unmarked

    def _last_marks(self, tokens: list[int]) -> tuple[int, int, bool]:
        """
        Where the last start and the last end marker end (-1: nowhere), and whether an answer can begin behind that end:
        behind a close only white space or the close's own tail may stand, else it is history, or text.
        """
        marks = [self.start, self.end]
        if all(mark is None or mark.text is None for mark in marks):
            opened, closed = (-1 if mark is None else _last_end(tokens, mark.spellings) for mark in marks)
            rest = tokens[closed:]
            blank = self.tokenizer is not None and not decode(self.tokenizer, rest).strip()
            return opened, closed, blank or not rest or tuple(rest) == self.tail
        text = decode(self.tokenizer, tokens)
        opened, closed = (-1 if mark is None else _last_end_in_text(text, mark, self.tokenizer) for mark in marks)
        behind = text[closed:]
        return opened, closed, not behind.strip() or behind == decode(self.tokenizer, self.tail)


def _last_end(tokens: list[int], spellings: tuple[tuple[int, ...], ...]) -> int:
    ends = (
        end
        for end in range(len(tokens), 0, -1)
        if any(tokens[end - 1] == s[-1] and tuple(tokens[max(0, end - len(s)) : end]) == s for s in spellings)
    )
    return next(ends, -1)


def _last_end_in_text(text: str, marker: Marker, tokenizer) -> int:
    texts = [marker.text] if marker.text is not None else [decode(tokenizer, s) for s in marker.spellings]
    return max((text.rfind(t) + len(t) for t in texts if t in text), default=-1)


def resolve_markers(config, tokenizer=None) -> ThinkingMarkers | None:
    """
    The thinking markers of a model: what `config` sets, completed from the tokenizer's family.

    Args:
        config (`GenerationConfig`, or any object): with `thinking_start`, `thinking_end`, `forced_close` (text, ids or
            `None`), `thinks_again`, `turn_ends` and `eos_token_id`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): of the model.

    Returns:
        [`ThinkingMarkers`], or `None` if neither knows where a thought ends.

    Raises:
        `ValueError`: for text without a tokenizer, or a `forced_close` that does not hold `thinking_end`.
    """
    family = None if tokenizer is None else family_of(tokenizer)
    end = None if config.thinking_end is None else _marker("thinking_end", config.thinking_end, tokenizer)
    if end is None:
        if family is None:
            return None
        end = _marker("thinking_end", family.end, tokenizer)
    elif family is not None and end != _marker("thinking_end", family.end, tokenizer):
        family = None  # the caller's own way to close: the family's other markers do not belong to it
    if family is None and isinstance(config.thinking_end, str):
        family = next((f for f in reversed(FAMILIES) if f.end == config.thinking_end), None)
    start_setting = config.thinking_start
    if start_setting is None and family is not None:
        start_setting = family.start
    start = _marker("thinking_start", start_setting, tokenizer) if start_setting else None
    markers = ThinkingMarkers(
        start=start,
        end=end,
        forced_close=_forced_close(config, end, family, tokenizer),
        later_start=_later_start(config, start, family, tokenizer),
        scan_prompt=config.thinking_start is None or len(config.thinking_start) > 0,
        turn_ends=_turn_ends(config, (start, end), tokenizer),
        tokenizer=known_tokenizer(config) if tokenizer is None else tokenizer,
    )
    if markers.later_start is not None and markers.later_start.first_end(markers.tail) is not None:
        raise ValueError(
            f"`forced_close`={config.forced_close!r} opens a thought again behind `thinking_end`: leave "
            "`thinking_start` out of it, or set `thinks_again=False`."
        )
    return markers


def known_tokenizer(config) -> Any:
    """The tokenizer that `SSRConfig.from_tokenizer` has seen, in this process."""
    holder = getattr(config, "_tokenizer", None)
    return None if holder is None else holder.tokenizer


def require_markers(config, tokenizer=None) -> ThinkingMarkers:
    """[`resolve_markers`], or a `ValueError` that says which settings to give."""
    markers = resolve_markers(config, tokenizer)
    if markers is None:
        why = "there is no tokenizer" if tokenizer is None else "the tokenizer does not tell"
        way = " or pass `tokenizer=`" if tokenizer is None else ""
        raise ValueError(
            f"`thinking_end` is not set, and {why} how this model closes a thought: set `thinking_end` (and "
            f"`thinking_start`, if the model opens its thoughts itself) to its markers{way}."
        )
    return markers


def _marker(name: str, setting, tokenizer) -> Marker:
    if not isinstance(setting, str):
        spellings = setting if isinstance(setting[0], (list, tuple)) else [setting]
        return Marker(spellings=tuple(tuple(s) for s in spellings))
    if tokenizer is None:
        raise _needs_tokenizer(name, setting)
    ids = encode(tokenizer, setting)
    if all(i in tokenizer.added_tokens_decoder for i in ids):  # spelt in one way only
        return Marker(spellings=(tuple(ids),))
    return Marker(text=setting, tokenizer=tokenizer)


def _needs_tokenizer(name: str, setting: str) -> ValueError:
    return ValueError(
        f"`{name}`={setting!r} is text, which needs a tokenizer: pass `tokenizer=`, make the config with "
        "`SSRConfig.from_tokenizer(tokenizer, ...)`, or give token ids."
    )


def _forced_close(config, end: Marker, family: Family | None, tokenizer) -> tuple[int, ...]:
    setting = config.forced_close
    if setting is None:
        own = end.text if end.text is not None else end.spellings[0]
        setting = own if family is None else family.close
    if isinstance(setting, str):
        if tokenizer is None:
            raise _needs_tokenizer("forced_close", setting)
        setting = encode(tokenizer, setting)
    close = tuple(setting)
    if end.first_end(close) is None:
        raise ValueError(
            f"`forced_close`={config.forced_close!r} must contain `thinking_end`={config.thinking_end!r}, or the "
            "thought would stay open: add the marker to it."
        )
    return close


def _later_start(config, start: Marker | None, family: Family | None, tokenizer) -> Marker | None:
    """What opens a thought behind an earlier one: what was asked for, else tokens that no text spells."""
    if start is None or config.thinks_again is False:
        return None
    if config.thinks_again or (config.thinking_start is not None and not isinstance(config.thinking_start, str)):
        return start
    if family is None or not family.thinks_again:
        return None
    if start.text is None:
        return start
    added = tokenizer.added_tokens_decoder
    spellings = tuple(s for s in spellings_of(tokenizer, start.text) if any(i in added for i in s))
    return Marker(spellings) if spellings else None


def _turn_ends(config, markers: Sequence[Marker | None], tokenizer) -> frozenset[int]:
    if config.turn_ends is not None:
        return frozenset(config.turn_ends)
    eos = config.eos_token_id
    ids = set() if eos is None else set(eos) if isinstance(eos, (list, tuple)) else {eos}
    if tokenizer is not None:
        ids |= set(turn_ends_of(tokenizer))
    for marker in markers:  # a template may begin each answer with a thought; gpt-oss ends thoughts and messages alike
        if marker is not None:
            spellings = marker.spellings if marker.text is None else [encode(tokenizer, marker.text)]
            ids -= {i for spelling in spellings for i in spelling}
    return frozenset(ids)


def resolved_settings(config, tokenizer) -> dict[str, Any]:
    """
    The thinking markers and `turn_ends` as token ids, for a config that needs no tokenizer later.

    A text that is no token of its own can be spelt in many ways; the usual ones are listed, by encoding it between
    letters, digits, punctuation and white space.

    Raises:
        `ValueError`: if no thinking marker is known.
    """
    markers = require_markers(config, tokenizer)

    def ids(marker: Marker | None) -> list:
        if marker is None:
            return []
        spellings = spellings_of(tokenizer, marker.text) if marker.text is not None else marker.spellings
        return list(spellings[0]) if len(spellings) == 1 else [list(s) for s in spellings]

    settings: dict[str, Any] = {"thinking_end": ids(markers.end), "forced_close": list(markers.forced_close)}
    if markers.start is not None or not markers.scan_prompt:
        settings["thinking_start"] = ids(markers.start)
    settings["thinks_again"] = markers.later_start is not None
    settings["turn_ends"] = sorted(markers.turn_ends)
    return settings
