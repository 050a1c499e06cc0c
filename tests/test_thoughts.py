"""
Several thoughts in one text, wherever they open and close: SSR is plain `generate` with the budget's processor, greedy
and sampled, one prompt and batches, under every rule; and what is counted, split and streamed is right.

The number of examples is set by `HF_SSR_EXAMPLES` (default 12 of each kind).
"""

import itertools
import os
import random
from collections import Counter
from functools import lru_cache

import pytest
import torch
from conftest import build_once, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_batches import generate, prompts
from test_stream import Recorder
from test_verifying import chi_square, sharper
from tiny_models import prompt_ids
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria

import hf_ssr.choosing
from hf_ssr import SSRConfig, ThinkingBudgetLogitsProcessor
from hf_ssr.choosing import Chooser
from hf_ssr.draft_sources import DraftSources
from hf_ssr.markers import resolve_markers
from hf_ssr.think_state import ThinkingState
from hf_ssr.verifying import gumbel_choice

EXAMPLES = int(os.environ.get("HF_SSR_EXAMPLES", "12"))
LENGTH, NEW = 20, 48
OPEN, CLOSE, FIRST = 5, 6, 8  # two markers, and the first token that is neither they nor in the forced close


class Script(LogitsProcessor):
    """
    Pulls each row towards a text of its own: what comes next in it, behind a budget's forced tokens too, is `pull`
    likelier than the model has it. A function of `input_ids`, row by row.
    """

    def __init__(self, texts: list[list[int]], length: int, pull: float = 1e4):
        self.texts, self.length, self.pull = texts, length, pull

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, text in enumerate(self.texts[: len(scores)]):
            place = input_ids.shape[1] - self.length
            if place < len(text):
                scores[row, text[place]] += self.pull
        return scores


class SetAt(StoppingCriteria):
    """Sets a handle when the text has so many new tokens."""

    stops_thinking = True

    def __init__(self, count: int):
        self.count, self.is_set = count, False

    def __call__(self, input_ids, scores, **kwargs):
        self.is_set = self.is_set or input_ids.shape[1] - LENGTH >= self.count
        return torch.zeros(len(input_ids), dtype=torch.bool)


@st.composite
def scripts(draw):
    """A text in which thoughts open and close, with words that repeat."""
    words = st.lists(st.integers(FIRST, FIRST + 6), max_size=9)
    parts = draw(
        st.lists(st.tuples(words, st.sampled_from([[OPEN], [OPEN], [CLOSE], [CLOSE], [CLOSE, OPEN]])), max_size=8)
    )
    return [token for part, marker in parts for token in [*part, *marker]] + draw(words)


cases = st.fixed_dictionaries(
    {
        "script": scripts(),
        "opened": st.booleans(),
        "seed": st.integers(0, 2**31),
        "sampling": st.sampled_from([{"do_sample": False}, {"do_sample": True, "temperature": 0.8}]),
        "pull": st.sampled_from([1e4, 1e4, 6.0]),
        "thinking_budget": st.one_of(st.none(), st.integers(0, 20)),
        "stop_at": st.one_of(st.none(), st.none(), st.integers(0, 40)),
        "tail": st.lists(st.integers(FIRST, FIRST + 3), max_size=2),
        "budgets": st.one_of(
            st.builds(lambda b: {"draft_budgets": b}, st.lists(st.integers(0, 25), min_size=1, max_size=5)),
            st.builds(lambda n: {"draft_interval": n}, st.integers(5, 12)),
        ),
        "prediction": st.one_of(st.none(), scripts()),
        "num_draft_tokens": st.integers(1, 16),
        "speculate_thinking": st.sampled_from([None, False]),
        "max_new_tokens": st.integers(1, NEW),
    }
)


def settings_of(case) -> dict:
    names = ("num_draft_tokens", "speculate_thinking", "thinking_budget", "max_new_tokens")
    markers = {"thinking_start": [OPEN], "thinking_end": [CLOSE], "forced_close": [7, CLOSE, *case["tail"]]}
    own = {name: case[name] for name in names} | markers | case["sampling"] | case["budgets"]
    return own | {"prediction_ids": case["prediction"], "max_overhead": "off", "return_dict_in_generate": True}


def prompt_of(case) -> torch.LongTensor:
    ids = prompt_ids(LENGTH, case["seed"]).clamp(min=FIRST)
    ids[0, -1] = OPEN if case["opened"] else FIRST
    return ids


def check_counts(metrics, config, sequence: list[int]) -> None:
    """The thoughts, told anew from the text."""
    state = ThinkingState(resolve_markers(config), sequence[:LENGTH])
    for token in sequence[LENGTH:]:
        state.push(token)
    assert metrics.thoughts == state.spans and metrics.thinking_tokens == state.thinking_tokens
    accounted = metrics.accepted_tokens + metrics.recovered_tokens + metrics.bonus_tokens + metrics.plain_tokens
    assert metrics.answer_tokens == accounted and metrics.plain_reason is None
    assert sum(count for _, count in metrics.spans) == metrics.new_tokens
    if config.thinking_budget is not None:
        closes = len(config.forced_close)
        assert all(opens + max(0, config.thinking_budget) + closes >= ends for opens, ends in state.spans)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen3_5"])
@given(case=cases)
@settings(
    deadline=None, max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@pytest.mark.filterwarnings("ignore")
def test_one_text(architecture, case):
    model, ids = build_once(architecture), prompt_of(case)
    config = SSRConfig(**settings_of(case))
    script = Script([case["script"]], LENGTH, case["pull"])
    criteria = [] if case["stop_at"] is None else [SetAt(case["stop_at"])]
    processors = LogitsProcessorList([script])
    stop = None if case["stop_at"] is None else lambda: criteria[0].is_set
    if config.thinking_budget is not None or stop is not None:
        processors.append(
            ThinkingBudgetLogitsProcessor(
                config, prompt_length=LENGTH, max_new_tokens=case["max_new_tokens"], stop=stop
            )
        )
    call = {"max_new_tokens": case["max_new_tokens"], **case["sampling"]}
    theirs, ours = Recorder(), Recorder()
    expected = run(
        model, ids, call, case["seed"], logits_processor=processors, streamer=theirs, stopping_criteria=criteria
    )
    after = torch.rand(1)
    criteria = [] if case["stop_at"] is None else [SetAt(case["stop_at"])]
    output = run(
        model,
        ids,
        {},
        case["seed"],
        generation_config=config,
        logits_processor=[script],
        streamer=ours,
        stopping_criteria=criteria,
    )
    assert output.sequences.tolist() == expected.tolist()
    assert torch.equal(torch.rand(1), after)
    assert [v.tolist() for v in ours.values] == [v.tolist() for v in theirs.values]
    check_counts(output.metrics, config, output.sequences[0].tolist())


@pytest.mark.parametrize("seed", range(int(EXAMPLES / 2)))
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_rows_of_a_batch(architecture, seed):
    """Each in a thought, an answer, or a later thought of its own; tokens of their greedy texts are the markers."""
    rng, model = random.Random(seed), build_once(architecture)
    inputs, call = (
        prompts(lengths := [rng.randint(1, 24) for _ in range(4)]),
        {"max_new_tokens": 60, "do_sample": False},
    )
    width = max(lengths)
    new = generate(model, inputs, call)[:, width:].tolist()
    common = [token for token, count in Counter(t for row in new for t in row).most_common(12) if token != 7]
    opens, closes = rng.sample(common, 2)
    budget = rng.choice([None, rng.randint(1, 30)])
    markers = {
        "thinking_start": [opens],
        "thinking_end": [closes],
        "forced_close": [7, closes],
        "thinking_budget": budget,
    }
    processors = []
    if budget is not None:
        processors = [ThinkingBudgetLogitsProcessor(SSRConfig(**markers), prompt_length=width, max_new_tokens=60)]
    expected = generate(model, inputs, call, logits_processor=processors)
    config = SSRConfig(
        **markers,
        **call,
        draft_budgets=sorted(rng.sample(range(30), 6)),
        num_draft_tokens=rng.randint(1, 9),
        prediction_ids=[row[rng.randint(5, 30) :] for row in new],
        max_overhead="off",
        return_dict_in_generate=True,
    )
    output = generate(model, inputs, {}, generation_config=config)
    assert output.metrics.plain_reason is None
    assert output.sequences.tolist() == expected.tolist()
    for ids, _, sequence, metrics in zip(*inputs.values(), expected, output.metrics.per_row, strict=True):
        state = ThinkingState(resolve_markers(config), ids.tolist())
        for token in sequence[width:].tolist():
            state.push(token)
        assert metrics.thoughts == state.spans and metrics.thinking_tokens == state.thinking_tokens
    assert output.metrics.thinking_tokens == sum(row.thinking_tokens for row in output.metrics.per_row)


def twice(words: int = 12) -> list[int]:
    """Two long thoughts, each with an answer that the first thought already has."""
    thought, answer = [*range(10, 10 + words), *range(40, 52)], list(range(40, 52))
    return [OPEN, *thought, CLOSE, *answer, OPEN, *thought[::-1], *answer, CLOSE, *answer, 9]


def test_forks_and_drafts_go_on(model, count_forwards):
    """In a later thought too: what is drafted there, or was before, is what the answer behind it is taken from."""
    script = twice()
    settings = {"thinking_start": [OPEN], "thinking_end": [CLOSE], "max_new_tokens": len(script), "do_sample": False}
    settings |= {"max_overhead": "off", "return_dict_in_generate": True}
    second = script.index(OPEN, 1) + 1
    ids, processors = prompt_ids().clamp(min=FIRST), [Script([script], LENGTH)]
    for own, budgets in (({"draft_budgets": [5, 40]}, [5, 40]), ({"draft_budgets": []}, [])):
        counter = count_forwards(model)
        output = run(model, ids, {}, generation_config=SSRConfig(**settings, **own), logits_processor=processors)
        metrics = output.metrics
        assert output.sequences[0, LENGTH:].tolist() == script
        assert metrics.thoughts == [[1, 26], [second, second + 37]] and metrics.thinking_tokens == 62
        assert [stage.draft_budget for stage in metrics.stages] == budgets
        assert counter.count == metrics.target_forwards < len(script) - 20
        spans = [source for source, count in metrics.spans for _ in range(count)]
        assert {"answer", "thought"} & set(spans[second + 24 : second + 36]), "the answer of before, within the thought"
        assert set(spans[second + 39 :]) - {"model"}


def test_a_budget_ends_within_a_block_of_the_second_thought(model):
    """Which repeats the first, so that blocks are long; whatever is left of the budget."""
    script = [OPEN, *range(10, 24), CLOSE, 30, 31, OPEN, *range(10, 24), CLOSE, 30, 31, 32]
    ids, processors = prompt_ids().clamp(min=FIRST), [Script([script], LENGTH)]
    for budget in range(34):
        own = {"thinking_start": [OPEN], "thinking_end": [CLOSE], "forced_close": [7, CLOSE, 33]}
        settings = {"max_new_tokens": 44, "do_sample": False}
        config = SSRConfig(**own, **settings, thinking_budget=budget, max_overhead="off", return_dict_in_generate=True)
        processor = ThinkingBudgetLogitsProcessor(config, prompt_length=LENGTH, max_new_tokens=44)
        expected = run(model, ids, settings, logits_processor=[*processors, processor])
        output = run(model, ids, {}, generation_config=config, logits_processor=processors)
        assert output.sequences.tolist() == expected.tolist()
        assert output.metrics.thinking_budget == budget and output.metrics.thoughts
        if budget > 15:
            assert output.metrics.thoughts[1][1] - 19 == (budget - 15 + 2 if budget < 30 else 15)
            assert max(int(shape.split("x")[1]) for shape in output.metrics.shapes["thinking"]) > 8


def test_all_rules_where_there_is_one_choice(model):
    """A block that holds the marker of the next thought is cut there; what follows is of another part."""
    script, ids = twice(), prompt_ids().clamp(min=FIRST)
    prediction = script[script.index(CLOSE) + 1 :]
    for rule in ("exact", "speculative", "block", "coupled"):
        for own in ({"draft_budgets": [5, 30, 45]}, {"draft_interval": 9, "prediction_ids": prediction}):
            config = SSRConfig(
                thinking_start=[OPEN],
                thinking_end=[CLOSE],
                do_sample=True,
                verify=rule,
                max_new_tokens=len(script),
                return_dict_in_generate=True,
                **own,
            )
            output = run(model, ids, {}, generation_config=config, logits_processor=[Script([script], LENGTH)])
            assert output.sequences[0, LENGTH:].tolist() == script
            check_counts(output.metrics, config, output.sequences[0].tolist())


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_coupled_noise_is_the_place_in_the_text_alone(architecture, monkeypatch):
    """No two places of a text share it, a child has its parent's, and no draft changes what is drawn."""
    places, choose = [], Chooser.choose

    def recorded(chooser, logits):
        """Not what a child draws."""
        with monkeypatch.context() as patch:
            patch.setattr(
                hf_ssr.choosing, "gumbel_choice", lambda *args: places.append(args[-1]) or gumbel_choice(*args)
            )
            return choose(chooser, logits)

    monkeypatch.setattr(Chooser, "choose", recorded)
    model, script, ids = build_once(architecture), twice(6), prompt_ids().clamp(min=FIRST)
    common = {"thinking_start": [OPEN], "thinking_end": [CLOSE], "forced_close": [7, CLOSE], "thinking_budget": 40}
    common |= {"do_sample": True, "verify": "coupled", "max_new_tokens": 90, "return_dict_in_generate": True}
    texts = []
    for own in (
        {"draft_budgets": [], "sources": []},
        {"draft_budgets": [3, 24, 30], "max_overhead": "off"},
        {"draft_interval": 4, "num_draft_tokens": 3},
        {"prediction_ids": script[20:], "draft_budgets": [25]},
    ):
        places.clear()
        config = SSRConfig(**common, **own)
        output = run(model, ids, {}, generation_config=config, logits_processor=[Script([script], LENGTH, pull=9.0)])
        texts.append(output.sequences.tolist())
        assert len(output.metrics.thoughts) > 1
        assert len(places) == len(set(places)) == 90
    assert texts[1:] == texts[:1] * 3


START, END, LEAD = 150, 159, 157
FIRST_THOUGHT = [*range(140, 147), END]


def sharp_call(samples: int, **own) -> tuple[torch.LongTensor, SSRConfig, dict]:
    """
    A prompt, and biases that make a model without attention write: a thought, the lead, one token of its own, a second
    thought of two tokens, the lead, one token of its own. These two are drawn from one distribution, independently.
    """
    ids = torch.cat([prompt_ids(8), torch.tensor([[START, 130]])], dim=1)
    with torch.no_grad():
        likely = sharper()(torch.tensor([[LEAD]])).logits[0, -1].topk(8).indices.tolist()
    bias = [[[a, b], 1e4] for a, b in itertools.pairwise([130, *FIRST_THOUGHT, LEAD])]
    bias += [[[LEAD, token, START], 1e4] for token in likely]
    markers = {"thinking_start": [START], "thinking_end": [END], "forced_close": [158, END, LEAD]}
    markers["thinking_budget"] = len(FIRST_THOUGHT) + 2
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 4, "num_return_sequences": samples}
    settings |= {"max_new_tokens": len(FIRST_THOUGHT) + 11, "sequence_bias": bias}
    return ids, SSRConfig(**markers, **settings, **own), settings


def own_tokens(new: torch.LongTensor) -> list[tuple[int, int]]:
    """The two tokens of the model's own, in each row whose second thought has not closed by itself."""
    begin = len(FIRST_THOUGHT)
    assert (new[:, : begin + 1] == torch.tensor([*FIRST_THOUGHT, LEAD])).all() and (new[:, begin + 2] == START).all()
    kept = new[(new[:, begin + 5 : begin + 8] == torch.tensor([158, END, LEAD])).all(dim=1)]
    assert len(kept) > len(new) / 2
    return list(map(tuple, kept[:, [begin + 1, begin + 8]].tolist()))


SAMPLES = 1500


@lru_cache
def plain_tokens() -> list[tuple[int, int]]:
    ids, config, settings = sharp_call(SAMPLES)
    processor = ThinkingBudgetLogitsProcessor(config, prompt_length=ids.shape[1])
    return own_tokens(run(sharper(), ids, settings, 6, logits_processor=[processor])[:, ids.shape[1] :])


def drafted_tokens(rule: str, budgets: list[int]) -> list[tuple[int, int]]:
    ids, config, _ = sharp_call(SAMPLES, verify=rule, draft_temperature=3.0, draft_budgets=budgets)
    return own_tokens(run(sharper(), ids, {}, 5, generation_config=config)[:, ids.shape[1] :])


@pytest.mark.parametrize(
    ("rule", "budgets"),
    [("speculative", [1]), ("speculative", [1, 8]), ("block", [1])],
)
@pytest.mark.slow
def test_the_law_behind_a_second_thought(rule, budgets):
    """A draft of the first thought is followed again behind the second: it is no fresh sample any more."""
    statistic, limit = chi_square(drafted_tokens(rule, budgets), plain_tokens())
    assert statistic < limit


@pytest.mark.slow
def test_a_bias_behind_a_second_thought_is_noticed(monkeypatch):
    """The same test, where a draft is taken for a fresh sample again."""
    drafter_of_thought = DraftSources.drafter_of_thought

    def forgetful(self):
        drafts = self.drafts
        drafter = drafter_of_thought(self)
        self.drafts = drafts
        return drafter

    monkeypatch.setattr(DraftSources, "drafter_of_thought", forgetful)
    statistic, limit = chi_square(drafted_tokens("speculative", [1]), plain_tokens())
    assert statistic > limit


def test_coupled_drafts_agree_behind_a_second_thought():
    """Its child draws with the very noise of its parent: where the distributions are the same, it drafts the answer."""
    script = [START, 130, 131, 132, END, LEAD, 20, 21, START, *range(130, 142), END, LEAD]
    ids, answer, agreed = prompt_ids(), 6, 0
    for seed in range(4):
        config = SSRConfig(
            thinking_start=[START],
            thinking_end=[END],
            forced_close=[END, LEAD],
            draft_budgets=[6],
            do_sample=True,
            verify="coupled",
            max_overhead="off",
            speculate_thinking=False,
            max_new_tokens=len(script) + answer,
            return_dict_in_generate=True,
        )
        output = run(sharper(), ids, {}, seed, generation_config=config, logits_processor=[Script([script], LENGTH)])
        assert output.sequences[0, LENGTH : LENGTH + len(script)].tolist() == script
        (stage,) = output.metrics.stages
        drafted = list(itertools.takewhile(lambda token: token != START, stage.draft[:answer]))
        assert output.sequences[0, -answer:].tolist()[: len(drafted)] == drafted
        agreed += len(drafted)
        assert stage.accepted_tokens >= len(drafted) - 1
    assert agreed > 2 * answer
