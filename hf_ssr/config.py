"""`SSRConfig`: every setting of SSR, documented and validated once."""

import copy
import importlib
import warnings
from typing import Any, cast

from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GENERATION_MODES_MAPPING

from .host import is_read_by_continuous_batching
from .markers import resolved_settings
from .validating import SETTINGS, SOURCES, forks_on_request, refuse_lookalikes, validate_settings

# What a setting is when neither the call nor the model's own config says.
DEFAULTS: dict[str, Any] = {
    "draft_budgets": "auto",
    "verify": "exact",
    "num_draft_tokens": 16,
    "min_match_length": 1,
    "sources": SOURCES,
    "draft_seed": 0,
    "speculate_thinking": True,
    "max_overhead": 0.05,
    "grow_in_place": True,
    "strict": False,
}
# The installed package and each copy of it from the Hub register a mode of their own: they can live side by side.
_NAME = "ssr" if __package__ == "hf_ssr" else f"ssr_{__package__}".replace(".", "_")
GENERATION_MODE = cast(GenerationMode, _NAME)  # an enum that cannot be added to


class SSRConfig(GenerationConfig):
    """
    Generation settings that turn on SSR (*Self-Speculation for Reasoning Models*, arXiv 2608.20359).

    Takes every setting of [`~transformers.GenerationConfig`] too. All settings of SSR are keyword-only and `None` by
    default: inherited from the model's own generation config, else detected or set when decoding starts.

    Args:
        draft_budgets (`list[int]` or `"auto"`, *optional*, default `"auto"`):
            Thinking tokens after which the cache is forked and the child drafts the answer, one stage each. `"auto"`
            forks early and again as the thought grows, as far as `max_overhead` allows; `[]` never forks. A budget
            that the thought does not reach never forks.
        draft_interval (`int`, *optional*):
            Fork every so many thinking tokens, instead of `draft_budgets`. Of the two, the one that a call sets
            replaces an inherited one.
        max_draft_length (`int`, *optional*):
            Most tokens that a child drafts, the forced close not counted. Without it a child drafts until its end of
            text, the next fork, or the end of the thought.
        thinking_budget (`int`, *optional*):
            Most thinking tokens of a text, all its thoughts together; then the forced close follows. This changes the
            output: it is that of plain `generate` with [`ThinkingBudgetLogitsProcessor`]. A thought goes on for up to 3
            tokens more where a character would break, if a tokenizer is known: one given to `generate`, or that
            [`SSRConfig.from_tokenizer`] has seen in this process; no file keeps it. A budget that leaves no room in
            `max_new_tokens` for that, the forced close and one token of the answer is cut until it does, with a
            warning.
        thinking_start (`str`, `list[int]` or `list[list[int]]`, *optional*):
            Marker that opens a thought, as text, token ids, or several spellings in ids. `[]`: the thought is open from
            the first new token, and the prompt is not searched for markers. Without it: detected with the tokenizer;
            where only `thinking_end` is known, the thought is open from the first new token.
        thinking_end (`str`, `list[int]` or `list[list[int]]`, *optional*):
            What closes a thought, at its shortest (`</think>`, not `\\n</think>\\n\\n`), in the same forms. Any
            text serves for a model without markers ("Final answer:").
        forced_close (`str` or `list[int]`, *optional*):
            What is appended when a thought is cut, in a draft or at the thinking budget. Must contain `thinking_end`.
            Without it: the way the model itself closes (`\\n</think>\\n\\n`).
        thinks_again (`bool`, *optional*):
            Whether `thinking_start` opens a thought again behind an earlier one; if not, it is text there. Without it:
            yes, if `thinking_start` is given in ids, else what is known of the model's family.
        turn_ends (`list[int]`, *optional*):
            Tokens that end a turn: thinking markers of the prompt before the last of them are of earlier turns. Without
            it: the model's end of text, and what a tokenizer tells.
        verify (`str`, *optional*, default `"exact"`):
            Rule that accepts draft tokens. `"exact"` keeps the very tokens of plain `generate`. The others matter when
            sampling, where they accept more: `"speculative"` and `"block"` draw other tokens from the same
            distribution; `"coupled"` draws tokens that depend on the seed alone, whatever was drafted.
        num_draft_tokens (`int`, *optional*, default 16):
            Most draft tokens in one forward of the target.
        min_match_length (`int`, *optional*, default 1):
            Fewest tokens of the text so far that must match a source before what followed there becomes a draft.
        sources (`list[str]`, *optional*, default `["draft", "thought", "prompt", "answer"]`):
            Where drafts may come from. Without `"draft"` nothing forks; `[]` is plain decoding.
        draft_temperature (`float`, *optional*):
            Temperature of the child; 0 = greedy. Without it 0 under the exact rule, which accepts that most often, else
            the temperature of the output.
        draft_seed (`int`, *optional*, default 0):
            Seed of the child's own generator, if it samples. Changes no output of the exact and the coupled rule,
            and of no rule the distribution.
        speculate_thinking (`bool`, *optional*, default `True`):
            Draft in the thought too, where it repeats the prompt, a draft or itself.
        max_overhead (`float` or `"off"`, *optional*, default 0.05):
            What drafting may cost in vain, as a share of a plain run; held under `"auto"` budgets and without
            `prediction_ids`. Costs are measured while running, in half precision guessed, and drafts are as long as
            pays by them. `"off"`: draft whatever may save forwards.
        grow_in_place (`bool`, *optional*, default `True`):
            Keep room to grow, and append to the cache in place, where transformers copies attention layers at every
            step.
        strict (`bool`, *optional*, default `False`):
            Raise an error where SSR does not apply, instead of a warning and decoding without it.
        prediction_ids (`list[int]` or `list[list[int]]`, *optional*):
            A draft that the caller already has: the expected answer (what follows the thought, if there is one), or
            most of it. Ranks before the child's drafts; with it nothing forks unless budgets are set as well. For a
            batch, one list for each prompt, or one for all. `[]` = none. Not saved to disk.
        kwargs:
            Settings of [`~transformers.GenerationConfig`].

    Raises:
        `ValueError`: for a value out of range, settings that contradict each other, or an unknown setting that looks
            like one of these (`prediction`, `thinking_tokens`), naming the nearest.

    Example:

    ```python
    import hf_ssr
    config = hf_ssr.SSRConfig.from_tokenizer(tokenizer, max_new_tokens=2048, draft_budgets=[256, 512])
    model.generate(**inputs, generation_config=config)
    ```
    """

    is_ssr_config = True  # an installed SSRConfig and a Hub copy's are two classes: recognised by this
    _tokenizer: "_Shared | None" = None  # that `from_tokenizer` has seen

    def __init__(
        self,
        *,
        draft_budgets: list[int] | str | None = None,
        draft_interval: int | None = None,
        max_draft_length: int | None = None,
        thinking_budget: int | None = None,
        thinking_start: str | list[int] | list[list[int]] | None = None,
        thinking_end: str | list[int] | list[list[int]] | None = None,
        forced_close: str | list[int] | None = None,
        thinks_again: bool | None = None,
        turn_ends: list[int] | None = None,
        verify: str | None = None,
        num_draft_tokens: int | None = None,
        min_match_length: int | None = None,
        sources: list[str] | None = None,
        draft_temperature: float | None = None,
        draft_seed: int | None = None,
        speculate_thinking: bool | None = None,
        max_overhead: float | str | None = None,
        grow_in_place: bool | None = None,
        strict: bool | None = None,
        prediction_ids: list[int] | list[list[int]] | None = None,
        **kwargs: Any,
    ):
        self.draft_budgets = draft_budgets
        self.draft_interval = draft_interval
        self.max_draft_length = max_draft_length
        self.thinking_budget = thinking_budget
        self.thinking_start = thinking_start
        self.thinking_end = thinking_end
        self.forced_close = forced_close
        self.thinks_again = thinks_again
        self.turn_ends = turn_ends
        self.verify = verify
        self.num_draft_tokens = num_draft_tokens
        self.min_match_length = min_match_length
        self.sources = sources
        self.draft_temperature = draft_temperature
        self.draft_seed = draft_seed
        self.speculate_thinking = speculate_thinking
        self.max_overhead = max_overhead
        self.grow_in_place = grow_in_place
        self.strict = strict
        self.prediction_ids = prediction_ids
        refuse_lookalikes(kwargs, known=vars(GenerationConfig()))
        super().__init__(**kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SETTINGS and hasattr(value, "tolist"):
            value = value.tolist()  # a tensor or array would not survive JSON
        if name == "prediction_ids" and isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
            value = value[0]  # as a tokenizer returns it
        super().__setattr__(name, value)

    @classmethod
    def from_tokenizer(cls, tokenizer, **kwargs) -> "SSRConfig":
        """
        A config whose thinking markers and turn ends are token ids, so that no tokenizer is needed later.

        Args:
            tokenizer (`PreTrainedTokenizerBase`): of the model; tells the family's markers where `kwargs` do not.
            kwargs: as for [`SSRConfig`].

        Raises:
            `ValueError`: as [`SSRConfig`], or if the tokenizer does not tell how the model closes a thought.
        """
        config = cls(**kwargs)
        for name, value in resolved_settings(config, tokenizer).items():
            setattr(config, name, value)
        config._tokenizer = _Shared(tokenizer)
        config.validate(user_set_attributes=set())
        return config

    @classmethod
    def from_config(cls, config: GenerationConfig) -> "SSRConfig":
        """`config`, of a plain class or another copy of this package, as an `SSRConfig` with all its prepared state."""
        if type(config) is cls:
            return config
        new = cls.__new__(cls)
        new.__dict__.update(dict.fromkeys(SETTINGS))
        new.__dict__.update(copy.copy(config.__dict__))
        new.validate(user_set_attributes=set())
        return new

    def setting(self, name: str) -> Any:
        """The value of a setting of SSR, or its default if it is `None`."""
        value = getattr(self, name)
        return DEFAULTS.get(name) if value is None else value

    @property
    def eos_token_id(self) -> int | list[int] | None:
        """
        As in [`~transformers.GenerationConfig`]. Continuous batching (`generate_batch`) asks no config for its mode. It
        asks for this once, before it changes anything: the one place to say that SSR is left out.
        """
        if is_read_by_continuous_batching():
            reason = "continuous batching (`generate_batch`) does not run it, and does not enforce `thinking_budget`"
            not_applicable(self, reason, "continuous batching without either")
        return vars(self).get("eos_token_id")

    @eos_token_id.setter
    def eos_token_id(self, value: int | list[int] | None) -> None:
        vars(self)["eos_token_id"] = value

    @property
    def rule(self) -> str:
        """The rule that accepts draft tokens: without sampling, they are all one."""
        return self.setting("verify") if self.do_sample else "exact"

    @property
    def forks_on_request(self) -> bool:
        """Whether budgets or an interval were asked for, not left to the default."""
        return forks_on_request(self)

    def get_generation_mode(self, assistant_model=None) -> GenerationMode:
        """The mode of SSR, or the one that other settings ask for, with a warning (an error if `strict`)."""
        other = self.other_mode(assistant_model)
        if other is None:
            if GENERATION_MODE not in GENERATION_MODES_MAPPING:  # this module alone was imported, as by `pickle`
                importlib.import_module(".generate", __package__)
            return GENERATION_MODE
        not_applicable(self, f"other settings ask for {_readable(other)}", _readable(other))
        return other

    def other_mode(self, assistant_model=None) -> GenerationMode | None:
        """
        The mode that beams, prompt lookup or an assistant ask for, or `None` if nothing stands against SSR.

        Raises:
            `ValueError`: if `thinking_budget` is set, which that mode would silently drop.
        """
        mode = super().get_generation_mode(assistant_model)
        if mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            return None
        if self.thinking_budget is not None:
            raise ValueError(
                f"`thinking_budget`={self.thinking_budget} is not enforced in {_readable(mode)}, which other settings "
                "ask for: unset it, and pass a `ThinkingBudgetLogitsProcessor` in `logits_processor` instead."
            )
        return mode

    def update(self, defaults_only: bool = False, allow_custom_entries: bool = False, **kwargs) -> dict[str, Any]:
        """As [`~transformers.GenerationConfig.update`], but what is set replaces what contradicts it."""
        if defaults_only:
            kwargs = {name: value for name, value in kwargs.items() if name not in overruled(vars(self))}
        else:
            for name in overruled(kwargs):
                setattr(self, name, None)
        return super().update(defaults_only=defaults_only, allow_custom_entries=allow_custom_entries, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """As [`~transformers.GenerationConfig.to_dict`]: settings only."""
        return {name: value for name, value in super().to_dict().items() if name != "_tokenizer"}

    def to_json_file(self, json_file_path, use_diff: bool = True, keys_to_pop: list[str] | None = None) -> None:
        """As [`~transformers.GenerationConfig.to_json_file`], without `prediction_ids`: they belong to one call."""
        super().to_json_file(json_file_path, use_diff, [*(keys_to_pop or []), "prediction_ids"])

    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
        """
        Checks the settings of SSR, then the others as [`~transformers.GenerationConfig.validate`] does.

        Raises:
            `ValueError`: naming the setting, the rule, the value, and what to do.
        """
        validate_settings(self)
        super().validate(strict=strict, user_set_attributes=user_set_attributes)


class _Shared:
    """Copies of a config have one tokenizer among them."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __deepcopy__(self, memo) -> "_Shared":
        return self


def _readable(mode: GenerationMode) -> str:
    return mode.value.replace("_", " ")


def overruled(given: dict[str, Any]) -> set[str]:
    """Settings that contradict those of `given`: inherited ones give way."""
    names = set()
    if given.get("draft_budgets") is not None:
        names.add("draft_interval")
    if given.get("draft_interval") is not None:
        names.add("draft_budgets")
    if given.get("sources") is not None and "draft" not in given["sources"]:
        names |= {"draft_budgets", "draft_interval", "prediction_ids"}
    return {name for name in names if given.get(name) is None}


def not_applicable(config: SSRConfig, reason: str, instead: str = "plain decoding") -> None:
    """
    Says that SSR does not apply and what runs instead.

    Raises:
        `ValueError`: if `config.strict`.
    """
    if config.setting("strict"):
        raise ValueError(f"SSR does not apply: {reason}; `strict` is set. Change that, or unset `strict`.")
    warnings.warn(f"SSR does not apply: {reason}; running {instead}.", stacklevel=2)
