"""Markers, the state of a thought, the thinking budget, and the split of thought and answer."""

import codecs

import pytest
import torch
from conftest import build_once, plain_run, run
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import prompt_ids
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast

from hf_ssr import SSRConfig, StopThinking, ThinkingBudgetLogitsProcessor, split_thinking
from hf_ssr.families import FAMILIES, family_of
from hf_ssr.markers import require_markers, resolve_markers
from hf_ssr.think_state import ThinkingState


def tokenizer_with(*special: str, template: str = "") -> PreTrainedTokenizerFast:
    """Byte-level, every byte a token; `special` tokens; a chat template."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(alphabet))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_tokens(list(special), special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def state_of(tokenizer, prompt: str, text: str = "", **kwargs) -> ThinkingState:
    markers = resolve_markers(SSRConfig(**kwargs), tokenizer)
    state = ThinkingState(markers, tokenizer.encode(prompt))
    for token in tokenizer.encode(text):
        state.push(token)
    return state


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
@pytest.mark.parametrize("spelling", ["tokens", "text"])
def test_every_family(family, spelling):
    """Detected, opened by the prompt or by the model, closed, and the answer's lead known."""
    signs = [s for s in family.signs if s.startswith("<") and "\\n" not in s]
    special = [*signs, "<|start|>", "<|end|>"] if spelling == "tokens" else []
    tokenizer = tokenizer_with(*special, template=" ".join(family.signs))
    assert family_of(tokenizer) == family
    state = state_of(tokenizer, "question", family.start + "thought" + family.close + "answer")
    assert state.progress == "closed"
    assert tokenizer.decode(state.tokens[state.thoughts[0].closes :]).endswith("answer")
    assert tokenizer.decode(state.tail) == family.close[family.close.index(family.end) + len(family.end) :]
    assert state_of(tokenizer, "question" + family.start).progress == "open"
    assert state_of(tokenizer, "question" + family.start + family.close).progress == "closed"
    assert state_of(tokenizer, "question").progress == "unstarted"


def test_family_by_response_template():
    tokenizer = tokenizer_with("<a>", "</a>")
    assert family_of(tokenizer) is None
    tokenizer.response_template = {"fields": {"reasoning_content": {"open": "<a>", "close": "</a>"}}}
    assert (family_of(tokenizer).start, family_of(tokenizer).end) == ("<a>", "</a>")


def test_prompt_with_history():
    tokenizer = tokenizer_with("<think>", "</think>", "<|im_end|>")
    tokenizer.eos_token = "<|im_end|>"
    turn = "<think>\nhm\n</think>\n\nyes<|im_end|>next"
    assert state_of(tokenizer, turn).progress == "unstarted"
    assert state_of(tokenizer, turn + "<think>\n").progress == "open"
    assert state_of(tokenizer, turn + "<think>\n\n</think>\n\n").progress == "closed"
    # a prompt that only mentions the marker, in an earlier turn
    assert state_of(tokenizer, "what is <think>?<|im_end|>").progress == "unstarted"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
@pytest.mark.parametrize("spelling", ["tokens", "text"])
@pytest.mark.parametrize("settled", [False, True], ids=["tokenizer", "config"])
def test_which_families_think_again(family, spelling, settled):
    """Those of the table, by tokens that no text spells: not where an answer mentions the marker."""
    signs = ["[THINK]", "[/THINK]"] if family.name == "magistral" else family.signs
    special = ["<|start|>", "<|end|>", *(s for s in signs if s[0] in "<[" and "\\n" not in s)]
    tokenizer = tokenizer_with(*(special if spelling == "tokens" else ()), template=" ".join(family.signs))
    known = None if settled else tokenizer
    config = SSRConfig.from_tokenizer(tokenizer) if settled else SSRConfig()
    state = ThinkingState(resolve_markers(config, known), tokenizer.encode("question"))
    for token in tokenizer.encode(family.start + "one" + family.close + "two" + family.end + family.start + "three"):
        state.push(token)
    again = spelling == "tokens" and family.thinks_again
    assert len(state.thoughts) == 1 + again and state.open == again
    assert config.thinks_again is (again if settled else None)
    for token in (t for character in family.end + family.start for t in tokenizer.encode(character)):
        state.push(token)  # letter by letter
    assert len(state.thoughts) == 1 + again


def test_by_whom_a_model_thinks_again():
    """Ids that a user gives open again; a text of the user's does not, unless asked for."""
    tokenizer = tokenizer_with("<think>", "</think>")
    think, end = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    for own, again in (
        ({}, False),
        ({"thinking_start": "<think>"}, False),
        ({"thinking_start": "<think>", "thinks_again": True}, True),
        ({"thinking_start": [think], "thinking_end": [end]}, True),
        ({"thinking_start": [think], "thinking_end": [end], "thinks_again": False}, False),
        ({"thinking_start": "hm:", "thinking_end": "so:", "thinks_again": True}, True),
        ({"thinking_start": []}, False),
    ):
        for config in (SSRConfig(**own), SSRConfig.from_tokenizer(tokenizer, **own)):
            assert (resolve_markers(config, tokenizer).later_start is not None) == again, own
    with pytest.raises(ValueError, match=r"`forced_close`.*opens a thought again behind `thinking_end`"):
        resolve_markers(SSRConfig(thinking_start=[7], thinking_end=[8], forced_close=[8, 7]))
    resolve_markers(SSRConfig(thinking_start=[7], thinking_end=[8], forced_close=[8, 7], thinks_again=False))


def test_a_later_thought():
    """Is counted with the first; a marker that lies across a close opens none, and an end outside a thought is text."""
    config = SSRConfig(thinking_start=[7, 8], thinking_end=[9, 7])
    state = ThinkingState(resolve_markers(config), [7, 8])
    for token in (1, 9, 7, 8, 2, 9, 7, 7, 8, 3, 4, 9, 7):
        state.push(token)
    assert state.spans == [[0, 3], [9, 13]] and state.progress == "closed"
    assert (state.thinking_tokens, state.other_tokens) == (7, 6)
    state.rewind(10)
    assert state.spans == [[0, 3], [9, 10]] and state.open and state.thinking_tokens == 4
    state.rewind(8)
    assert state.spans == [[0, 3]] and not state.open


def test_a_later_marker_is_text_where_a_model_thinks_once():
    tokenizer = tokenizer_with("<think>", "</think>")
    state = state_of(tokenizer, "q<think>", "abc</think>d<think>e</think>f")
    assert state.spans == [[0, 4]]


def test_start_is_open_from_the_first_token_without_a_start_marker():
    tokenizer = tokenizer_with()
    for kwargs in ({"thinking_start": []}, {}):
        assert state_of(tokenizer, "q", thinking_end=[66], **kwargs).progress == "open"
    # the prompt is searched unless `thinking_start` is []
    assert state_of(tokenizer, "q</t>", thinking_end="</t>").progress == "closed"
    assert state_of(tokenizer, "q</t>", thinking_end="</t>", thinking_start=[]).progress == "open"


@pytest.mark.parametrize(
    "text", ["Final answer: 42", "so.\nFinal answer:\n42", "**Final answer:** 42", "Final answer:42"]
)
def test_any_text_closes_however_it_is_tokenised(text):
    """With merges across the marker's borders, and byte by byte."""
    backend = Tokenizer(models.BPE(byte_fallback=False))
    from tokenizers import trainers

    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    corpus = ["Final answer: 42", "\nFinal answer:\n", "**Final answer:** 4", "Final", " answer:", "answer:42"] * 20
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(corpus, trainer)
    merged = PreTrainedTokenizerFast(tokenizer_object=backend)
    for tokenizer in (merged, tokenizer_with()):
        ids = tokenizer.encode(text)
        state = ThinkingState(resolve_markers(SSRConfig(thinking_end="Final answer:"), tokenizer), [])
        for token in ids:
            state.push(token)
        (closes,) = (thought.closes for thought in state.thoughts)
        closed = tokenizer.decode(ids[:closes])
        assert "Final answer:" in closed and "Final answer:" not in tokenizer.decode(ids[: closes - 1])


def test_from_tokenizer_needs_no_tokenizer_later():
    tokenizer = tokenizer_with("<think>", "</think>")
    config = SSRConfig.from_tokenizer(tokenizer, max_new_tokens=5)
    think, end = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    assert (config.thinking_start, config.thinking_end) == ([think], [end])
    assert config.forced_close == tokenizer.encode("\n</think>\n\n")
    text = SSRConfig.from_tokenizer(tokenizer_with(), thinking_end="Final answer:")
    ids = tokenizer_with().encode("so: Final answer: 4")
    assert split_thinking(ids, text).answer == tokenizer_with().encode(" 4")
    assert SSRConfig.from_tokenizer(tokenizer, thinking_start=[]).thinking_start == []


def test_from_tokenizer_without_markers():
    with pytest.raises(ValueError, match="the tokenizer does not tell how this model closes a thought"):
        SSRConfig.from_tokenizer(tokenizer_with())


def test_forced_close_must_close():
    with pytest.raises(ValueError, match=r"`forced_close`.*must contain `thinking_end`"):
        resolve_markers(SSRConfig(thinking_end=[5], forced_close=[4, 6]))


MARKERS = {"thinking_start": [7], "thinking_end": [8, 9], "forced_close": [4, 8, 9, 4]}
new_tokens = st.lists(st.integers(4, 9), max_size=30)


def brute_force(text: list[int], budget: int | None, opened: bool) -> tuple[list[list[int]], int | None]:
    """(thoughts, forced next token) by reading the whole text."""
    thoughts, begin, forced = [], 0, None
    while True:
        is_prompts = opened and not thoughts
        start = 0 if is_prompts else next((i + 1 for i in range(begin, len(text)) if text[i] == 7), None)
        if start is None:
            return thoughts, forced
        used = sum(close - open_ for open_, close in thoughts)
        begin = next((i for i in range(start + 2, len(text) + 1) if text[i - 2 : i] == [8, 9]), None)
        thoughts.append([start, len(text) if begin is None else begin])
        forced = None
        if budget is not None:
            cut = start + max(0, budget - used)
            if (begin is None or begin > cut) and 0 <= len(text) - cut < 4:
                forced = MARKERS["forced_close"][len(text) - cut]
        if begin is None:
            return thoughts, forced


@given(new_tokens, st.one_of(st.none(), st.integers(0, 12)), st.booleans(), st.lists(st.integers(0, 30), max_size=3))
@settings(deadline=None, max_examples=300)
def test_state_is_a_function_of_the_text(text, budget, opened, cuts):
    """However often it is rewound."""
    markers = resolve_markers(SSRConfig(**MARKERS))
    state = ThinkingState(markers, [5, 7] if opened else [5], budget)
    for cut in [*cuts, len(text)]:
        state.rewind(min(cut, len(state.tokens)))
        for n in range(len(state.tokens), len(text) + 1):
            assert (state.spans, state.forced) == brute_force(text[:n], budget, opened)
            if n < len(text):
                state.push(text[n])


@given(st.lists(st.tuples(st.integers(0, 20), st.lists(st.integers(4, 9), max_size=8)), max_size=6), st.integers(0, 9))
@settings(deadline=None, max_examples=200)
def test_processor_is_a_function_of_input_ids(changes, budget):
    """Called with texts that share any prefix, as drafts are verified and rolled back."""
    config = SSRConfig(thinking_budget=budget, **MARKERS)
    processor = ThinkingBudgetLogitsProcessor(config, prompt_length=2)
    text = [5, 7]
    scores = torch.zeros(1, 12)
    for keep, tail in changes:
        text = text[: max(2, keep)] + tail
        forced = brute_force(text[2:], budget, True)[1]
        processed = processor(torch.tensor([text]), scores)
        if forced is None:
            assert torch.equal(processed, scores)
        else:
            assert processed[0, forced] == 0 and processed.isinf().sum() == 11
    assert not scores.any()


def test_processor_takes_rows_of_other_lengths_of_thought():
    processor = ThinkingBudgetLogitsProcessor(SSRConfig(thinking_budget=2, **MARKERS), prompt_length=1)
    rows = torch.tensor([[7, 5, 5], [5, 7, 5]])
    out = processor(rows, torch.zeros(2, 12))
    assert out[0, 4] == 0 and out[0].isinf().sum() == 11
    assert not out[1].any()


@pytest.mark.parametrize("budget", [0, 1, 5, 17])
@pytest.mark.parametrize("opens", ["prompt", "prompt and newline", "model"])
def test_budget_is_exact(model, budget, opens):
    """The forced close begins at that very token, in plain `generate` and in SSR, whatever is drafted."""
    plain = plain_run(model, {"max_new_tokens": 60, "do_sample": False})
    start = {"prompt": plain.ids[0, -1], "prompt and newline": plain.ids[0, -2], "model": plain.new[2]}[opens]
    markers = {"thinking_start": [int(start)], "thinking_end": [159], "forced_close": [4, 159, 6]}
    config = SSRConfig(thinking_budget=budget, draft_budgets=[0, 3], **markers, **plain.settings)
    processor = ThinkingBudgetLogitsProcessor(config, prompt_length=plain.ids.shape[1])
    expected = run(model, plain.ids, plain.settings, logits_processor=LogitsProcessorList([processor]))
    begin = plain.ids.shape[1] + budget + (3 if opens == "model" else 0)
    assert expected[0, begin : begin + 3].tolist() == [4, 159, 6]
    assert 159 not in expected[0, plain.ids.shape[1] : begin]
    assert torch.equal(run(model, plain.ids, {}, generation_config=config), expected)
    for draft in (expected[0, begin + 2 :].tolist(), plain.new):
        predicted = SSRConfig(thinking_budget=budget, prediction_ids=draft, **markers, **plain.settings)
        assert torch.equal(run(model, plain.ids, {}, generation_config=predicted), expected)


def test_no_thought_no_budget(model):
    """Thinking switched off in the prompt, and a model that never thinks: left alone."""
    plain = plain_run(model, {"max_new_tokens": 40, "do_sample": False})
    unused = next(t for t in range(3, 160) if t not in plain.sequences[0].tolist())
    last = int(plain.ids[0, -1])
    for markers in (
        {"thinking_start": [unused], "thinking_end": [last]},  # closed by the prompt
        {"thinking_start": [unused], "thinking_end": [unused - 1]},  # never opened
    ):
        config = SSRConfig(
            thinking_budget=3, draft_budgets=[2], return_dict_in_generate=True, **markers, **plain.settings
        )
        output = run(model, plain.ids, {}, generation_config=config)
        assert torch.equal(output.sequences, plain.sequences)
        assert output.metrics.stages == [] and output.metrics.thinking_tokens == 0
        assert output.metrics.suffix_accepted["answer"] > 0  # but it speculates


@pytest.mark.parametrize("budget", [12, 16, 20])
def test_budget_leaves_room_for_an_answer(model, budget):
    ids = prompt_ids()
    config = SSRConfig(
        thinking_start=[],
        thinking_end=[159],
        forced_close=[4, 159, 6],
        thinking_budget=budget,
        max_new_tokens=16,
        do_sample=False,
        return_dict_in_generate=True,
    )
    if budget < 16:
        output = run(model, ids, {}, generation_config=config)
    else:
        with pytest.warns(UserWarning, match=r"`thinking_budget`=\d+ leaves no room.*cut to 12"):
            output = run(model, ids, {}, generation_config=config)
    new = output.sequences[0, 20:].tolist()
    assert len(new) == 16 and new[12:15] == [4, 159, 6]
    assert output.metrics.thinking_budget == 12
    assert output.metrics.thinking_budget_capped == (budget >= 16)
    stop = StopThinking()
    stop.set()
    if budget < 16:  # told to end is not cut
        told = run(model, ids, {}, generation_config=config, stopping_criteria=[stop]).metrics
        assert told.thinking_budget == 0 and not told.thinking_budget_capped
    assert split_thinking(output.sequences, config, 20).answer.tolist() == new[15:]


def test_processor_without_a_prompt():
    processor = ThinkingBudgetLogitsProcessor(SSRConfig(thinking_budget=1, thinking_end=[8]), prompt_length=0)
    assert not processor(torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 12)).any()
    assert processor(torch.tensor([[5]]), torch.zeros(1, 12)).isinf().sum() == 11


def test_split_thinking():
    config = SSRConfig(thinking_start=[7], thinking_end=[8, 9])
    assert split_thinking([5, 7, 1, 2, 8, 9, 3], config) == ([1, 2], [3])
    assert split_thinking([5, 7, 1, 2, 8, 9, 3], config, prompt_length=2) == ([1, 2], [3])
    assert split_thinking([5, 7, 1, 2], config, 2) == ([1, 2], [])
    assert split_thinking([5, 1, 2], config, 1) == ([], [1, 2])
    tensors = split_thinking(torch.tensor([[5, 7, 1, 8, 9, 3]]), config, 2)
    assert tensors.thought.tolist() == [1] and tensors.answer.tolist() == [3]
    led = SSRConfig(thinking_start=[7], thinking_end=[8], forced_close=[4, 8, 3, 3])
    assert split_thinking([7, 1, 8, 3, 3, 5], led) == (
        [1],
        [5],
    )  # what the close leads to the answer with is not the answer
    assert split_thinking([7, 1, 8, 3, 5], led) == ([1], [3, 5])
    assert split_thinking([7, 1, 8, 3, 3, 5, 7, 2, 8, 6, 8, 7], led) == ([1, 2], [5, 6, 8])
    assert split_thinking(torch.tensor([7, 1, 8, 3, 7, 2, 8, 3, 3, 6]), led).answer.tolist() == [6]  # half a lead
    assert split_thinking([4, 8, 3, 7, 2, 8, 5], led, 2) == ([2], [3, 5])  # the prompt has closed the first
    with pytest.raises(ValueError, match="`ids` must be one text, but has 2 rows"):
        split_thinking(torch.tensor([[1], [2]]), config)
    with pytest.raises(ValueError, match="`thinking_end` is not set, and there is no tokenizer"):
        split_thinking([1, 2], SSRConfig())


def test_forced_tokens_along_a_draft():
    """What is forced behind tokens that are only supposed; the state is as before."""
    markers = require_markers(SSRConfig(thinking_start=[], thinking_end=[9], forced_close=[8, 9, 7, 6]))
    state = ThinkingState(markers, [1], thinking_budget=2)
    for token in (3, 4, 8):
        state.push(token)
    assert state.forced_along([9, 7, 6, 5]) == [9, 7, 6, None, None]
    assert state.tokens == [3, 4, 8] and state.open and state.forced == 9
    for token in (9, 7):
        state.push(token)
    assert state.forced_along([6]) == [6, None] and state.forced_along([]) == [6]
    assert (state.tokens, state.spans) == ([3, 4, 8, 9, 7], [[0, 4]])


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As SentencePiece has it: a token for some words, a byte token for each byte of the rest."""
    words = ["so", "ok", "\u2581", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
    return tokenizer


CHARACTERS = "ok \U0001f600 \u6f22\u5b57 \u00e9!"
TOKENIZERS = {"bytes": lambda: tokenizer_with("<think>", "</think>"), "byte fallback": byte_fallback_tokenizer}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=6))
@settings(deadline=None, max_examples=60)
def test_whole_characters(kind, text):
    """Told from the last few tokens alone, wherever they begin."""
    tokenizer = TOKENIZERS[kind]()
    markers = resolve_markers(SSRConfig(), tokenizer)
    ids = [tokenizer.convert_tokens_to_ids(f"<0x{b:02X}>") for b in text.encode()]
    ids = tokenizer.encode(text) if kind == "bytes" else ids
    decoder = codecs.getincrementaldecoder("utf-8")()
    for count, byte in enumerate(text.encode(), 1):
        decoder.decode(bytes([byte]))
        whole = not decoder.getstate()[0]
        assert markers.is_whole(ids[:count]) == whole
        assert markers.is_whole(ids[max(0, count - 4) : count]) == whole


class Pull(LogitsProcessor):
    """The text is this one."""

    def __init__(self, text: list[int], length: int):
        self.text, self.length = text, length

    def __call__(self, input_ids, scores):
        place = input_ids.shape[1] - self.length
        if place < len(self.text):
            scores = torch.full_like(scores, -1e4)
            scores[:, self.text[place]] = 0.0
        return scores


@pytest.mark.parametrize("knows", ["config", "call", "model"])
def test_a_budget_breaks_no_character(knows):
    """It waits for up to 3 tokens, in SSR and in plain `generate`, whatever is left for the answer."""
    tokenizer = tokenizer_with("<think>", "</think>")
    think, end = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    model, length = build_once("qwen3", vocab_size=320), 4
    model.generation_config.eos_token_id = None
    text = [think, *tokenizer.encode(CHARACTERS), end, *tokenizer.encode(CHARACTERS)]
    ids, call = torch.full((1, length), 70), {"max_new_tokens": 40, "do_sample": False}
    pull, waits = Pull(text, length), 0
    settings = {**call, "draft_budgets": [2, 9], "return_dict_in_generate": True}
    own = SSRConfig.from_tokenizer(tokenizer, **settings)
    for budget in range(len(tokenizer.encode(CHARACTERS)) + 1):
        for most in (40, budget + 8) if budget % 3 else (40,):
            config = SSRConfig(**settings) if knows == "call" else SSRConfig.from_tokenizer(tokenizer, **settings)
            config.update(thinking_budget=budget, max_new_tokens=most)
            given_tokenizer = {"tokenizer": tokenizer} if knows == "call" else {}
            if knows == "model":  # a config from a file has ids, and no tokenizer
                config = SSRConfig.from_dict(config.to_dict())
                model.generation_config = own
            try:
                output = run(model, ids, {}, generation_config=config, logits_processor=[pull], **given_tokenizer)
            finally:
                model.generation_config = type(model.generation_config)(pad_token_id=0)
            if knows != "model":
                processor = ThinkingBudgetLogitsProcessor(
                    config, prompt_length=length, max_new_tokens=most, **given_tokenizer
                )
                plain = {**call, "max_new_tokens": most}
                expected = run(model, ids, plain, logits_processor=[pull, processor])
                assert output.sequences.tolist() == expected.tolist()
            thought, answer = split_thinking(output.sequences, own, length)
            assert "\ufffd" not in tokenizer.decode(thought) and len(answer) > 0
            if most == 40:
                cut = len(thought) - (len(thought) < len(tokenizer.encode(CHARACTERS)))  # a line break of the close
                waits = max(waits, cut - budget)
                assert 0 <= cut - budget <= 3 or end in output.sequences[0, : length + 1 + budget]
    assert waits == 3


def test_without_a_tokenizer_a_budget_is_exact():
    """And a config has none that comes from a file."""
    tokenizer = tokenizer_with("<think>", "</think>")
    config = SSRConfig.from_tokenizer(tokenizer, thinking_budget=4)
    for known, patience in ((config, 3), (SSRConfig.from_dict(config.to_dict()), 0)):
        assert resolve_markers(known).patience == patience
    assert config == SSRConfig.from_dict(config.to_dict()) and "okenizer" not in config.to_json_string()


@pytest.mark.parametrize("count", range(1, 12))
def test_a_handle_breaks_no_character(count):
    tokenizer, stop, length = tokenizer_with("<think>", "</think>"), StopThinking(), 4
    think, _ = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    model, text = build_once("qwen3", vocab_size=320), [think, *tokenizer.encode(CHARACTERS)]

    class SetAt(Pull):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == length + 1 + count:
                stop.set()
            return super().__call__(input_ids, scores)

    config = SSRConfig.from_tokenizer(tokenizer, max_new_tokens=40, do_sample=False, return_dict_in_generate=True)
    output = run(
        model,
        torch.full((1, length), 70),
        {},
        generation_config=config,
        logits_processor=[SetAt(text, length)],
        stopping_criteria=[stop],
    )
    thought = split_thinking(output.sequences, config, length).thought
    assert "\ufffd" not in tokenizer.decode(thought) and count <= len(thought) - 1 <= count + 4


TEMPLATES = {
    "qwen": ("<|im_start|>{role}\n{content}<|im_end|>\n", ["<|im_end|>"]),
    "glm": ("<|{role}|>\n{content}", ["<|assistant|>", "<|user|>"]),
    "gemma": ("<start_of_turn>{role}\n{content}<end_of_turn>\n", ["<end_of_turn>"]),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_turn_ends(name):
    """What the chat template writes behind messages, though the tokenizer's end of text is another."""
    form, ends = TEMPLATES[name]
    special = ["<|im_start|>", "<|im_end|>", "<|assistant|>", "<|user|>", "<start_of_turn>", "<end_of_turn>", "<eos>"]
    tokenizer = tokenizer_with("<think>", "</think>", *special)
    tokenizer.eos_token = "<eos>"
    body = form.format(role="{{ m.role }}", content="{{ m.content }}").replace("\n", "{{ '\\n' }}")
    tokenizer.chat_template = "{% for m in messages %}" + body + "{% endfor %}{# <think> #}"
    config = SSRConfig.from_tokenizer(tokenizer)
    assert sorted(tokenizer.convert_ids_to_tokens(config.turn_ends)) == sorted(["<eos>", *ends])
    assert config.eos_token_id is None  # the model's own list decides where a text ends
    cut = tokenizer.encode(f"<think>a thought that was cut{ends[0]}next")
    assert resolve_markers(SSRConfig(), tokenizer).progress_of_prompt(cut) == "unstarted"
    assert resolve_markers(config).progress_of_prompt(cut) == "unstarted"
    assert resolve_markers(SSRConfig.from_tokenizer(tokenizer, turn_ends=[])).progress_of_prompt(cut) == "open"


def test_gpt_oss_ends_thoughts_and_messages_alike():
    tokenizer = tokenizer_with("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    )
    tokenizer.eos_token = "<|return|>"
    assert tokenizer.convert_ids_to_tokens(SSRConfig.from_tokenizer(tokenizer).turn_ends) == ["<|return|>"]


def test_an_earlier_turn_that_ended_in_its_thought(model, tokenizer):
    """SSR and the budget in plain `generate` look for the thought in the same part of the prompt."""
    text = "Sum? <think>a long thought that was cut<eos>And now? "
    for prompt, budgeted in ((text, False), (text + "<think>", True)):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        call = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 2}
        config = SSRConfig.from_tokenizer(tokenizer, thinking_budget=4, max_new_tokens=12, do_sample=False)
        processor = ThinkingBudgetLogitsProcessor(config, prompt_length=ids.shape[1], max_new_tokens=12)
        expected = run(model, ids, call, logits_processor=[processor])
        assert run(model, ids, {"eos_token_id": 2}, generation_config=config).tolist() == expected.tolist()
        assert (expected[0, ids.shape[1] :].tolist() != run(model, ids, call)[0, ids.shape[1] :].tolist()) == budgeted


@pytest.mark.parametrize(
    "template",
    [
        "U: {{ messages[0].content }} A: <think>",  # nothing of the other messages
        "{% for m in messages %}{% if m.role == 'user' %}U: {{ m.content }} A: <think></think>{% else %}{{ m.content }}"
        "{% endif %}{% endfor %}",
    ],
    ids=["the first message", "a thought before each answer"],
)
def test_a_marker_ends_no_turn(template):
    """Though it is the first added token behind a message: the thought that a prompt opens would be missed."""
    tokenizer = tokenizer_with("<think>", "</think>", "<eos>")
    tokenizer.eos_token, tokenizer.chat_template = "<eos>", template
    config = SSRConfig.from_tokenizer(tokenizer)
    assert tokenizer.convert_ids_to_tokens(config.turn_ends) == ["<eos>"]
    for known in ((config, None), (SSRConfig(), tokenizer)):
        assert resolve_markers(*known).progress_of_prompt(tokenizer.encode("U: q A: <think>")) == "open"
