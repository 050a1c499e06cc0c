"""What is compared: plain `generate`, what transformers has to speed it up, and SSR, whole and part by part."""

from typing import Any

ONE_BUDGET = 64  # thinking tokens, where a method has one fork only
LOOKUP_TOKENS = 10  # of prompt lookup
ORACLE = "oracle"

_NO_FORK = {"sources": ["thought", "prompt", "answer"]}
_ONE_FORK = {"draft_budgets": [ONE_BUDGET], "speculate_thinking": False, "max_overhead": "off"}
SSR_SETTINGS: dict[str, dict[str, Any]] = {
    "suffix_answer": {**_NO_FORK, "speculate_thinking": False, "max_overhead": "off"},
    "suffix_only": {**_NO_FORK, "max_overhead": "off"},
    "suffix_governed": _NO_FORK,
    "fork": {**_ONE_FORK, "sources": ["draft"]},
    "fork_suffix": _ONE_FORK,
    "stages": {"speculate_thinking": False, "max_overhead": "off"},
    "ssr_off": {"max_overhead": "off"},
    "ssr": {},
    ORACLE: {"sources": ["draft"], "draft_budgets": [], "speculate_thinking": False, "max_overhead": "off"},
}
METHODS = {
    "plain": "generate, one token a forward",
    "plain_static": "generate with a static cache; compiled on a GPU",
    "prompt_lookup": f"generate(prompt_lookup_num_tokens={LOOKUP_TOKENS})",
    "suffix_answer": "no fork: suffix speculation in the answer alone",
    "suffix_only": "no fork: suffix speculation in thought and answer",
    "suffix_governed": "the same, as much as pays",
    "fork": f"one fork at {ONE_BUDGET} thinking tokens: its draft, matches in it",
    "fork_suffix": "the same, and suffix matches in thought, prompt and answer",
    "stages": "forks at automatic budgets",
    "ssr_off": "and speculation in the thought: all there is, at any cost",
    "ssr": "the default: all there is, as much as pays",
    ORACLE: "plain's own answer as the draft: what a perfect one saves",
}


def arguments_of(
    method: str,
    common: dict[str, Any],
    tokenizer,
    ssr: dict[str, Any],
    prompt_length: int = 0,
    answer: list[int] | None = None,
) -> dict[str, Any]:
    """
    Keywords of `generate`.

    Args:
        method (`str`): of `METHODS`.
        common (`dict`): settings of every method: length, sampling.
        tokenizer (`PreTrainedTokenizerBase`): tells the thinking markers.
        ssr (`dict`): settings of every method with SSR: markers; the others take `thinking_budget` from it.
        prompt_length (`int`): tokens of the prompt, for the thinking budget.
        answer (`list[int]`, *optional*): plain's, for the oracle.
    """
    from transformers import GenerationConfig  # here, so that the names of methods need not wait for it

    from ..config import SSRConfig
    from ..thinking import ThinkingBudgetLogitsProcessor

    common = {**common, "return_dict_in_generate": True}
    if method not in SSR_SETTINGS:
        arguments: dict[str, Any] = {"generation_config": GenerationConfig(**common)}
        if method == "plain_static":
            arguments["generation_config"].cache_implementation = "static"
        elif method == "prompt_lookup":
            arguments["generation_config"].prompt_lookup_num_tokens = LOOKUP_TOKENS
        if ssr.get("thinking_budget") is not None:
            most = common["max_new_tokens"]
            budget = ThinkingBudgetLogitsProcessor(
                SSRConfig(**ssr), prompt_length=prompt_length, tokenizer=tokenizer, max_new_tokens=most
            )
            arguments["logits_processor"] = [budget]
        return arguments
    config = SSRConfig(**common, **ssr, **SSR_SETTINGS[method])
    if method == ORACLE:
        config.prediction_ids = answer or None
    return {"generation_config": config, "tokenizer": tokenizer}
