"""Rules for the settings of SSR: each error names the setting, the rule, the value, and what to do."""

import difflib
from collections.abc import Iterable
from typing import Any

SOURCES = ("draft", "thought", "prompt", "answer")
VERIFY_RULES = ("exact", "speculative", "block", "coupled")
SETTINGS = (
    "draft_budgets",
    "draft_interval",
    "max_draft_length",
    "thinking_budget",
    "thinking_start",
    "thinking_end",
    "forced_close",
    "thinks_again",
    "turn_ends",
    "verify",
    "num_draft_tokens",
    "min_match_length",
    "sources",
    "draft_temperature",
    "draft_seed",
    "speculate_thinking",
    "max_overhead",
    "grow_in_place",
    "strict",
    "prediction_ids",
)

# Words that no setting of transformers has: an unknown one with such a word is meant for SSR.
_OWN_WORDS = {"draft", "thinking", "budget", "overhead", "prediction", "verify", "speculate"}
_SAME_WORD = {
    **dict.fromkeys(("think", "thought"), "thinking"),
    **dict.fromkeys(("speculative", "speculation"), "speculate"),
    "predicted": "prediction",
    "verification": "verify",
}
_MISSPELT = 0.85  # how alike two names are, as `difflib` has it, if one is the other misspelt


def refuse_lookalikes(names: Iterable[str], known: Iterable[str] = ()) -> None:
    """
    Refuses settings that were meant for SSR and are none: transformers would keep them, and nothing would heed them.

    Args:
        names (`Iterable[str]`): those of SSR, those that begin with `_`, and those that look like none of SSR pass.
        known (`Iterable[str]`): settings of others, which pass too, as do names that are nearer to these.

    Raises:
        `ValueError`: naming the settings that are nearest.
    """
    known = list(known)
    for name in names:
        if name in known or name in SETTINGS or name.startswith("_"):
            continue
        near = difflib.get_close_matches(name, [*SETTINGS, *known], n=1, cutoff=_MISSPELT)
        near = near or _with_the_same_words(name)
        if near and near[0] in SETTINGS:
            meant = " or ".join(f"`{setting}`" for setting in near)
            raise ValueError(f"`{name}` is not a setting of SSRConfig: did you mean {meant}?")


def _with_the_same_words(name: str) -> list[str]:
    """Settings that share most words with `name`, at least one of them a word of ours; at most three."""
    if not _words(name) & _OWN_WORDS:
        return []
    shared = {setting: len(_words(name) & _words(setting)) for setting in SETTINGS if _words(name) & _words(setting)}
    most = [setting for setting, count in shared.items() if count == max(shared.values())]
    return difflib.get_close_matches(name, most, n=3, cutoff=0.0)


def _words(name: str) -> set[str]:
    words = {word.removesuffix("s") for word in name.lower().split("_")}
    limit = {"budget"} if {"token", "thinking"} <= words else set()  # a number of thinking tokens is a budget
    return {_SAME_WORD.get(word, word) for word in words} | limit


def validate_settings(config) -> None:
    """
    Checks an [`SSRConfig`] on its own; what depends on the model is checked when decoding starts.

    Raises:
        `ValueError`: for a value out of range, and for settings that contradict each other.
    """
    _validate_numbers(config)
    _validate_markers(config)
    _validate_drafts(config)


def _validate_numbers(config) -> None:
    for name, least in (
        ("draft_interval", 1),
        ("max_draft_length", 1),
        ("thinking_budget", 0),
        ("num_draft_tokens", 1),
        ("min_match_length", 1),
        ("draft_seed", 0),
    ):
        value = getattr(config, name)
        if value is not None and not _is_int(value, least):
            raise ValueError(f"`{name}` must be an integer of at least {least}, but is {value!r}.")
    value = config.draft_temperature
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e6):
        raise ValueError(f"`draft_temperature` must be a number of at least 0 (0 = greedy), but is {value!r}.")
    value = config.max_overhead
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e6
    if value is not None and value != "off" and not is_number:
        raise ValueError(
            f"`max_overhead` must be a number of at least 0 (0.05 = 5 % of a plain run) or 'off', but is {value!r}."
        )
    for name in ("strict", "speculate_thinking", "grow_in_place", "thinks_again"):
        value = getattr(config, name)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"`{name}` must be True or False, but is {value!r}.")
    if config.verify is not None and config.verify not in VERIFY_RULES:
        raise ValueError(f"`verify` must be one of {list(VERIFY_RULES)}, but is {config.verify!r}.")


def _validate_markers(config) -> None:
    for name in ("thinking_start", "thinking_end", "forced_close"):
        value = getattr(config, name)
        if value is None or (isinstance(value, str) and value):
            continue
        nested = name != "forced_close" and _is_ids_list(value) and len(value) > 0
        if not (_is_ids(value) or nested) or (len(value) == 0 and name != "thinking_start"):
            raise ValueError(
                f"`{name}` must be a non-empty text or list of token ids"
                f"{' (only `thinking_start` may be `[]`)' if value == [] else ''}, but is {value!r}."
            )
    if config.turn_ends is not None and not _is_ids(config.turn_ends):
        raise ValueError(f"`turn_ends` must be a list of token ids (`[]` = none), but is {_short(config.turn_ends)}.")


def _validate_drafts(config) -> None:
    budgets = config.draft_budgets
    is_list = isinstance(budgets, (list, tuple)) and all(_is_int(b, 0) for b in budgets)
    if budgets is not None and budgets != "auto" and not is_list:
        raise ValueError(
            f"`draft_budgets` must be 'auto' or a list of integers of at least 0 (thinking tokens), but is {budgets!r}."
        )
    if budgets is not None and config.draft_interval is not None:
        raise ValueError(
            f"`draft_budgets`={budgets!r} and `draft_interval`={config.draft_interval!r} exclude each other: set one."
        )
    given = config.prediction_ids
    if given is not None and not _is_ids(given) and not (isinstance(given, (list, tuple)) and all(map(_is_ids, given))):
        raise ValueError(
            f"`prediction_ids` must be a list of token ids, or of such lists, one a prompt, but is {_short(given)}."
        )
    sources = config.sources
    if sources is None:
        return
    if not isinstance(sources, (list, tuple)) or not all(s in SOURCES for s in sources):
        raise ValueError(f"`sources` must be a list of some of {list(SOURCES)}, but is {sources!r}.")
    for name, wanted in (("prediction_ids", bool(config.prediction_ids)), ("draft_budgets", forks_on_request(config))):
        if wanted and "draft" not in sources:
            name = "draft_interval" if name == "draft_budgets" and config.draft_interval is not None else name
            raise ValueError(
                f"`{name}`={_short(getattr(config, name))} needs drafts, but `sources`={list(sources)!r} leaves them "
                "out: add 'draft' to `sources`."
            )


def forks_on_request(config) -> bool:
    """Whether budgets or an interval were asked for, not left to the default."""
    return config.draft_interval is not None or config.draft_budgets not in (None, "auto", [])


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_ids(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(_is_int(v, 0) for v in value)


def _is_ids_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(_is_ids(v) and len(v) > 0 for v in value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
