"""How each model family marks its thoughts: one row a family, and how a tokenizer tells which family it is of."""

from collections.abc import Sequence
from typing import NamedTuple


class Family(NamedTuple):
    """
    Thinking markers of a family, as text.

    Args:
        name (`str`): of the family.
        signs (`tuple[str, ...]`): what the vocabulary or the chat template of its tokenizers contains, all of it.
        start, end (`str`): what opens and, at its shortest, closes a thought.
        close (`str`): how the model itself goes from thought to answer.
        thinks_again (`bool`): whether a later `start` in one answer opens another thought.
    """

    name: str
    signs: tuple[str, ...]
    start: str
    end: str
    close: str
    thinks_again: bool = False


THINK = ("<think>", "</think>")

# Only families whose start is a control token, which no text spells, think again: channels and blocks that take turns
# with the answer. An answer that mentions `<think>`, or says "Here is my thought process:", writes the very marker.
#
# The first row whose signs are all there is taken: the peculiar before the common.
FAMILIES = (
    Family(
        "gpt-oss",
        ("<|channel|>", "<|message|>"),
        "<|channel|>analysis<|message|>",
        "<|end|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        thinks_again=True,
    ),
    Family(
        "gemma-4",
        ("<|channel>", "<channel|>"),
        "<|channel>thought\n",
        "<channel|>",
        "\n<channel|>",
        thinks_again=True,
    ),
    Family(
        "kimi-k3",
        ("<|open|>", "<|close|>", "<|sep|>"),
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        "<|close|>think<|sep|><|open|>response<|sep|>",
        thinks_again=True,
    ),
    Family("kimi-vl", ("◁think▷", "◁/think▷"), "◁think▷", "◁/think▷", "◁/think▷"),
    Family("magistral", ("[THINK]", "[/THINK]"), "[THINK]", "[/THINK]", "[/THINK]", thinks_again=True),
    Family("seed-oss", ("<seed:think>", "</seed:think>"), "<seed:think>", "</seed:think>", "</seed:think>\n"),
    Family("minimax-m3", ("<mm:think>", "</mm:think>"), "<mm:think>", "</mm:think>", "</mm:think>"),
    Family(
        "hy3",
        ("<think:opensource>", "</think:opensource>"),
        "<think:opensource>",
        "</think:opensource>",
        "</think:opensource>",
    ),
    Family(
        "command-a",
        ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>"),
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        "<|END_THINKING|><|START_RESPONSE|>",
        thinks_again=True,
    ),
    Family(
        "command-a (v4)",
        ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>"),
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        "<|END_THINKING|><|START_TEXT|>",
        thinks_again=True,
    ),
    Family(
        "apertus",
        ("<|inner_prefix|>", "<|inner_suffix|>"),
        "<|inner_prefix|>",
        "<|inner_suffix|>",
        "<|inner_suffix|>",
        thinks_again=True,
    ),
    Family("exaone-deep", ("<thought>", "</thought>"), "<thought>", "</thought>", "\n</thought>\n\n"),
    Family("hunyuan-a13b", (*THINK, "<answer>"), *THINK, "\n</think>\n<answer>\n"),
    Family("granite-3.3", ("<|start_of_role|>", *THINK, "<response>"), *THINK, "</think><response>"),
    Family("ernie-4.5", (*THINK, "<response>"), *THINK, "\n</think>\n\n<response>\n"),
    Family(
        "granite-3.2",
        ("<|start_of_role|>", "Here is my thought process:", "Here is my response:"),
        "Here is my thought process:",
        "Here is my response:",
        "Here is my response:",
    ),
    Family(
        "apriel",
        ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
        "Here are my reasoning steps:\n",
        "[BEGIN FINAL RESPONSE]",
        "\n[BEGIN FINAL RESPONSE]",
    ),
    Family("glm-4.5", ("<|assistant|>", *THINK), *THINK, "</think>\n"),
    Family("deepseek-r1", ("<｜Assistant｜><think>\\n", "</think>"), *THINK, "\n</think>\n\n"),
    Family("deepseek-v3.1", ("<｜Assistant｜>", "</think>"), *THINK, "</think>"),
    Family("phi-4-reasoning", ("<|im_sep|>", *THINK), *THINK, "</think>"),
    Family("smollm3", ("/no_think", *THINK), *THINK, "\n</think>\n"),
    Family("think", THINK, *THINK, "\n</think>\n\n"),  # Qwen3, Qwen3.5, QwQ, MiniMax-M2, MiMo, Nemotron, ...
    Family("olmo-3", THINK[:1], *THINK, "\n</think>\n\n"),  # the template opens the thought, and nothing else is said
)


def family_of(tokenizer) -> Family | None:
    """
    The family that a tokenizer belongs to: by its `response_template`, then by the table above.

    Returns:
        [`Family`], or `None` if nothing says how its model marks a thought.
    """
    template = tokenizer.chat_template or ""
    if not isinstance(template, str):  # several named templates
        template = "\n".join(template.values())
    row = next((f for f in FAMILIES if all(sign in template or is_token(tokenizer, sign) for sign in f.signs)), None)
    declared = _declared_markers(tokenizer)
    if declared is None:
        return row
    start, end = declared
    if row is not None and row.end == end:
        return row._replace(start=start)
    return Family("declared", (), start, end, end)


def _declared_markers(tokenizer) -> tuple[str, str] | None:
    """The literal `open` and `close` of the reasoning field of `tokenizer.response_template`, if it has one."""
    template = getattr(tokenizer, "response_template", None)
    fields = template.get("fields", {}) if isinstance(template, dict) else {}
    for name in ("reasoning_content", "thinking", "reasoning"):
        field = fields.get(name)
        if isinstance(field, dict) and isinstance(field.get("open"), str) and isinstance(field.get("close"), str):
            return field["open"], field["close"]
    return None


def is_token(tokenizer, text: str) -> bool:
    """Whether `text` is one token of the vocabulary."""
    index = tokenizer.convert_tokens_to_ids(text)
    return index is not None and tokenizer.convert_ids_to_tokens(index) == text


def turn_ends_of(tokenizer) -> list[int]:
    """The tokens that end a message: the tokenizer's end of text, and what its chat template writes behind messages."""
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    asked, said, asks = "One?", "Two!", "Three?"
    messages = [("user", asked), ("assistant", said), ("user", asks)]
    try:
        text = tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in messages], tokenize=False)
    except Exception:  # there is no template, or it wants other messages
        return ends
    for content, following in ((asked, said), (said, asks)):
        _, found, rest = text.partition(content)
        between, follows, _ = rest.partition(following)
        if found and follows:  # else it leaves one of them out
            ends += [i for i in encode(tokenizer, between) if i in tokenizer.added_tokens_decoder][:1]
    return ends


def encode(tokenizer, text: str) -> list[int]:
    """Token ids of `text` alone."""
    return tokenizer.encode(text, add_special_tokens=False)


def decode(tokenizer, tokens: Sequence[int]) -> str:
    """The text of `tokens`, special tokens included."""
    return tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)


_BEFORE = ("", " ", "\n", "\n\n", "a", "a ", "a.", ".\n\n", "1", ")", "`", "*", "**", "#", "# ", '"', ",", ":", "(")
_BEHIND = ("", " ", "\n", "\n\n", "a", " a", "1", " 1", ".", ",", "*", "**", "`", '"', ":", " $", "(")


def spellings_of(tokenizer, text: str) -> list[tuple[int, ...]]:
    """The token sequences that spell `text` between common neighbours; a first or last token may reach beyond it."""
    alone, added = encode(tokenizer, text), tokenizer.added_tokens_decoder
    found: dict[tuple[int, ...], None] = {tuple(alone): None}
    for before in ("",) if alone[0] in added else _BEFORE:  # an added token merges with nothing
        for behind in ("",) if alone[-1] in added else _BEHIND:
            ids = encode(tokenizer, before + text + behind)
            end = next((n for n in range(1, len(ids) + 1) if text in decode(tokenizer, ids[:n])), None)
            if end is None:
                continue
            start = next(n for n in range(end - 1, -1, -1) if text in decode(tokenizer, ids[n:end]))
            found[tuple(ids[start:end])] = None
    # of two spellings that end alike the shorter finds all that the longer does
    return [s for s in found if not any(s != other and s[len(s) - len(other) :] == other for other in found)]
