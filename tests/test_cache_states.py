"""Layers that keep a state: each row goes back to behind what it keeps, and nothing else is to be seen of it."""

import random
import sys
import threading
from itertools import pairwise, product

import pytest
import torch
from conftest import build_once, plain_run, run
from test_stream import StopAt
from tiny_models import VOCAB_SIZE, build, prompt_ids
from transformers import DynamicCache, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer

import hf_ssr.cache_states
from hf_ssr import SSRConfig
from hf_ssr.cache_slots import into_slots
from hf_ssr.cache_states import FEW_PLACES, States
from hf_ssr.forking import Rollback, shift_rows
from hf_ssr.self_check import why_not_in_blocks, why_not_in_rows

RULED = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid", "kimi_linear"]
CONVOLUTIONS = ["lfm2", "lfm2_moe"]
PROMPT, NEW = 12, 40


def prompts(rows: int = 3) -> torch.LongTensor:
    return torch.cat([prompt_ids(PROMPT, seed) for seed in range(rows)])


def states_of(cache: DynamicCache) -> list[torch.Tensor]:
    found = []
    for layer in cache.layers:
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            found += [state.clone() for state in states.values() if state is not None]
    return found


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) > 0 and all(map(torch.equal, some, others))


class Batch:
    """Rows that are written in steps of several places, each row with a draft of its own length, shifted as in SSR."""

    def __init__(self, model, ids: torch.LongTensor):
        self.model, self.cache = model, DynamicCache(config=model.config)
        self.texts = ids.tolist()
        self.mask = torch.ones_like(ids)
        self.fed: list[set[int]] = [set() for _ in self.texts]  # positions whose tokens a row has kept
        self.twice = 0  # kept places that had been kept before
        with torch.no_grad():
            logits = model(ids, attention_mask=self.mask, cache=self.cache, use_cache=True).logits[:, -1]
        into_slots(self.cache)
        self.rollback = Rollback(model, self.cache, ids.shape[1])
        for text, token in zip(self.texts, logits.argmax(-1).tolist(), strict=True):
            text.append(token)

    def step(self, drafts: list[list[int]], width: int) -> list[int]:
        """A forward of `width` places over the last token of each row and its draft; the counts that were kept."""
        blocks = [[text[-1], *draft] for text, draft in zip(self.texts, drafts, strict=True)]
        filler = [[random.randrange(3, VOCAB_SIZE) for _ in range(width - len(block))] for block in blocks]
        ids = torch.tensor([block + fill for block, fill in zip(blocks, filler, strict=True)])
        begins = torch.tensor([[len(text) - 1] for text in self.texts])
        mask = torch.cat([self.mask, torch.ones_like(ids)], dim=1)
        with torch.no_grad(), self.rollback.stepping(is_draft=True):
            positions = begins + torch.arange(width)
            found = self.model(ids, attention_mask=mask, position_ids=positions, cache=self.cache, use_cache=True)
        kept = []
        for text, draft, picked in zip(self.texts, drafts, found.logits.argmax(-1).tolist(), strict=True):
            count = next((i for i, token in enumerate(draft) if token != picked[i]), len(draft))
            text += picked[: count + 1]
            kept.append(count + 1)
        assert self.rollback.states.settle(kept, width) == kept
        for row, (begin, count) in enumerate(zip(begins[:, 0].tolist(), kept, strict=True)):
            places = set(range(begin, begin + count))
            self.twice += len(places & self.fed[row])
            self.fed[row] |= places
        excess, length = [width - count for count in kept], max(map(len, self.texts)) - 1
        self.mask = shift_rows(self.cache, {"attention_mask": mask}, [*range(len(kept))], len(kept), excess, length)[
            "attention_mask"
        ]
        return kept


def drafts_from(truth: list[list[int]], texts: list[list[int]], chance: random.Random, most: int) -> list[list[int]]:
    """Of each row a draft of random length that goes wrong somewhere, or not."""
    drafts = []
    for row, text in zip(truth, texts, strict=True):
        known = row[len(text) :][: chance.randint(0, most)]
        drafts.append([token if chance.random() > 0.2 else chance.randrange(3, VOCAB_SIZE) for token in known])
    return drafts


@pytest.mark.parametrize("architecture", [*RULED, *CONVOLUTIONS])
@pytest.mark.parametrize("widest", [5, FEW_PLACES + 5], ids=["token by token", "over chunks"])
def test_rows_keep_differently_many(architecture, widest):
    model = build_once(architecture)
    model.generation_config.eos_token_id = None
    ids, chance = prompts(), random.Random(widest)
    truth = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW + widest, pad_token_id=0
    ).tolist()
    batch, all_kept = Batch(model, ids), []
    while min(map(len, batch.texts)) < PROMPT + NEW:
        all_kept.append(batch.step(drafts_from(truth, batch.texts, chance, widest - 1), widest))
    for text, expected in zip(batch.texts, truth, strict=True):
        assert text[: PROMPT + NEW] == expected[: PROMPT + NEW]
    assert batch.twice == 0 and any(len(set(kept)) == 3 for kept in all_kept)


def linear_only(architecture: str, dtype: torch.dtype):
    """Without attention, whose kernels depend on how long the longest row is."""
    settings = {"layer_types": ["linear_attention"] * 3, "num_hidden_layers": 3, "mlp_only_layers": [0, 1, 2]}
    if architecture == "qwen3_5":
        settings.pop("mlp_only_layers")
    return build(architecture, dtype, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("architecture", ["qwen3_5", "qwen3_next"])
def test_bits_at_one_width_do_not_depend_on_drafts(architecture, dtype):
    # 3 rows x 8 places x 4 heads are a multiple of 32: what is left over at the end of a loop over float32 is rounded
    # in another way by torch on a CPU
    model, ids, width = linear_only(architecture, dtype), prompts(), 8
    masks = {"full_attention": None, "linear_attention": None}

    def write(truth, seed):
        chance, cache = random.Random(seed), DynamicCache(config=model.config)
        positions = torch.arange(PROMPT)[None].expand(3, -1)
        texts, bits = ids.tolist(), [[], [], []]
        with torch.no_grad():
            found = model(ids, attention_mask=masks, position_ids=positions, cache=cache, use_cache=True)
            states = States(model, cache)
            logits, kept, drafts = found.logits[:, -1:], [1, 1, 1], [[], [], []]
            while True:
                for row, text in enumerate(texts):
                    picked = logits[row].argmax(-1).tolist()
                    kept[row] = next((i for i, t in enumerate(drafts[row]) if t != picked[i]), len(drafts[row])) + 1
                    text += picked[: kept[row]]
                    bits[row] += logits[row, : kept[row]]
                if logits.shape[1] == width:
                    states.settle(kept, width)
                if min(map(len, texts)) >= PROMPT + NEW:
                    return texts, bits
                drafts = drafts_from(truth, texts, chance, width - 1)
                block = torch.tensor([[t[-1], *d, *[0] * (width - 1 - len(d))] for t, d in zip(texts, drafts)])  # noqa: B905
                positions = torch.tensor([[len(text) - 1] for text in texts]) + torch.arange(width)
                with states.stepping(may_reject=True):
                    found = model(block, attention_mask=masks, position_ids=positions, cache=cache, use_cache=True)
                logits = found.logits

    truth, expected = write([[], [], []], 0)
    assert len(set(truth[0])) > 8
    for seed in range(3):
        texts, bits = write(truth, seed)
        for row in range(3):
            assert texts[row][: PROMPT + NEW] == truth[row][: PROMPT + NEW]
            for place in range(NEW):
                assert torch.equal(bits[row][place], expected[row][place]), (row, place)


@pytest.mark.parametrize("architecture", ["qwen3_5", "qwen3_next", "kimi_linear", "lfm2"])
def test_no_token_is_fed_twice(architecture, request):
    """Replay begins where the block before began."""
    model = build_once(architecture)
    assert why_not_in_blocks(model) is None
    plain = plain_run(model, {"max_new_tokens": 48, "do_sample": False})
    wrong = [t if i % 7 else (t + 1) % VOCAB_SIZE for i, t in enumerate(plain.new)]
    begins = []
    hook = model.register_forward_hook(
        lambda module, args, kwargs, output: begins.append(int(kwargs["position_ids"].flatten()[0])), with_kwargs=True
    )
    request.addfinalizer(hook.remove)
    settings = {"sources": ["draft", "answer"], "num_draft_tokens": 6, "max_overhead": "off", **plain.settings}
    config = SSRConfig(prediction_ids=wrong, thinking_end=[plain.marker], return_dict_in_generate=True, **settings)
    output = run(model, plain.ids, {}, generation_config=config)
    assert torch.equal(output.sequences, plain.sequences)
    assert output.metrics.wasted_draft_tokens > 0 and output.metrics.accepted_tokens > 0
    assert all(before < after for before, after in pairwise(begins[1:]))


@pytest.mark.parametrize("architecture", ["qwen3_5", "lfm2", "mamba2"])
@pytest.mark.filterwarnings("ignore")
def test_the_cache_that_is_left(architecture):
    """Of a text that ends anywhere beside its child, which may have been the longer one: no padding is left in it."""
    model, cached = build_once(architecture), set()
    ids, call = prompt_ids(PROMPT, 1), {"max_new_tokens": 24, "do_sample": False}
    text = run(model, ids, call)[0, PROMPT:].tolist()
    for marker, budget, stop_at in product(text[2:8:3], (0, 1, 3), range(2, 16)):
        criteria = {"stopping_criteria": StoppingCriteriaList([StopAt(PROMPT + stop_at)])}
        markers = {"thinking_start": [], "thinking_end": [marker], "forced_close": [7, marker]}
        config = SSRConfig(**markers, **call, draft_budgets=[budget], max_overhead="off", return_dict_in_generate=True)
        output = run(model, ids, {}, generation_config=config, **criteria)
        assert output.sequences.tolist() == run(model, ids, call, **criteria).tolist()
        layers = [layer for layer in output.cache.layers if isinstance(layer, DynamicLayer)]
        cached |= {int(layer.get_seq_length()) - (PROMPT + stop_at - 1) for layer in layers}
    assert cached == (set() if architecture == "mamba2" else {0})  # that has no keys


def test_others_see_nothing():
    """A thread that runs plain `generate` in the midst of a step."""
    model, ids = build("qwen3_5", torch.float32), prompts()
    settings = {"do_sample": False, "max_new_tokens": 12, "return_dict_in_generate": True, "output_logits": True}

    def plain():
        mask = torch.ones_like(ids)
        return model.generate(ids, attention_mask=mask, pad_token_id=0, eos_token_id=None, **settings)

    def blocks():
        with torch.no_grad():
            cache = DynamicCache(config=model.config)
            return [model(block, cache=cache, use_cache=True).logits for block in ids.split(4, dim=1)]

    expected, expected_blocks, found = plain(), blocks(), []
    batch = Batch(model, ids)
    inside = hf_ssr.cache_states._Step.apply

    def interrupted(*args, **kwargs):
        thread = threading.Thread(target=lambda: found.append((plain(), blocks())))
        thread.start()
        thread.join()
        return inside(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_ssr.cache_states._Step, "apply", interrupted)
        batch.step([[5, 6], [7], []], 4)
    assert len(found) == 3  # layers
    for output, logits in [*found, (plain(), blocks())]:
        assert torch.equal(output.sequences, expected.sequences)
        assert all(map(torch.equal, output.logits, expected.logits))
        assert all(map(torch.equal, logits, expected_blocks))


@pytest.mark.parametrize("architecture", ["qwen3_5", "lfm2", "mamba2"])
def test_abandon(architecture, request):
    model, ids = build(architecture), prompts(1)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, cache=cache, use_cache=True)
    states, before = States(model, cache), states_of(cache)

    def fail(*args):
        raise KeyboardInterrupt

    block = prompt_ids(4, 9)
    hook = list(model.modules())[-1].register_forward_pre_hook(fail)  # the head: all layers have been reached
    with torch.no_grad(), pytest.raises(KeyboardInterrupt), states.stepping(may_reject=True):
        model(block, cache=cache, use_cache=True)
    assert not same(states_of(cache), before)
    assert states.abandon() and states.abandon()
    assert same(states_of(cache), before)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt), states.stepping(may_reject=False):
        model(block, cache=cache, use_cache=True)
    assert not states.abandon()
    hook.remove()


@pytest.mark.parametrize("architecture", ["mamba2", "qwen3_5"])
def test_copy_and_replay(architecture, monkeypatch):
    """Layers that go forward only, or whose rule is not seen: all is fed again, and rows go together."""
    monkeypatch.setattr(hf_ssr.cache_states, "_watched", lambda chunked, names, per_token: chunked)
    model, ids = build(architecture), prompts(2)
    for rule in ("torch_chunk_gated_delta_rule",):
        module = sys.modules[type(model).__module__]
        if hasattr(module, rule):
            monkeypatch.setattr(module, rule, getattr(getattr(module, rule), "__wrapped__", getattr(module, rule)))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, cache=cache, use_cache=True)
    states, before = States(model, cache), states_of(cache)
    assert states.settles_rows == (architecture == "qwen3_5")  # as it seems

    def step():
        with torch.no_grad(), states.stepping(may_reject=True):
            model(prompts(2)[:, :4], cache=cache, use_cache=True)

    step()
    assert states.settle([2, 2], 4) == [0, 0] and same(states_of(cache), before)
    step()
    after = states_of(cache)
    assert states.settle([4, 4], 4) == [4, 4]
    assert same([state[..., -4:] for state in states_of(cache)], [state[..., -4:] for state in after])
    after = states_of(cache)
    step()
    with pytest.raises(RuntimeError, match="can only go back together"):
        states.settle([1, 2], 4)
    assert why_not_in_rows(model) is not None and why_not_in_blocks(model) is None
    del after


@pytest.mark.parametrize("architecture", ["qwen3_5", "lfm2"])
def test_rows_are_selected(architecture):
    model = build(architecture)
    batch = Batch(model, prompts())
    batch.step([[5, 6, 7], [8], []], 5)
    states, before = batch.rollback.states, states_of(batch.cache)
    states.select_rows([2, 0, 0, 1])
    assert same(states_of(batch.cache), [state[[2, 0, 0, 1]] for state in before])


def test_a_forward_of_one_place():
    """There the model calls another function; a row may still keep nothing."""
    batch = Batch(build("qwen3_5"), prompts())
    states, before = batch.rollback.states, states_of(batch.cache)
    with torch.no_grad(), states.stepping(may_reject=True):
        batch.model(torch.tensor([[5], [6], [7]]), cache=batch.cache, use_cache=True)
    after = [state[..., -old.shape[-1] :] for state, old in zip(states_of(batch.cache), before, strict=True)]
    assert states.settle([1, 0, 1], 1) == [1, 0, 1]
    expected = [torch.stack([new[0], old[1], new[2]]) for new, old in zip(after, before, strict=True)]
    assert same(states_of(batch.cache), expected)


def test_compiled_as_it_was():
    """A user's compiled model: one graph, and the rule over chunks, even within a step."""
    model = build("qwen3_5", torch.float32)
    batch = Batch(model, prompts(1))
    module = sys.modules[type(model).__module__]
    rule = module.torch_chunk_gated_delta_rule
    assert rule.watches and not hasattr(rule.__wrapped__, "watches")
    compiled = torch.compile(rule, backend="eager", fullgraph=True)
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 4, 4, 16).unbind()
    g, beta = -torch.rand(1, 4, 4), torch.rand(1, 4, 4)
    state = torch.randn(1, 4, 16, 16)
    arguments = {"g": g, "beta": beta, "initial_state": state, "output_final_state": True}
    expected = rule.__wrapped__(query, key, value, **arguments)
    with batch.rollback.stepping(is_draft=True):
        assert all(map(torch.equal, compiled(query, key, value, **arguments), expected))
    assert why_not_in_rows(model) is None
    model.compile(backend="eager")  # compiled at its first call, which is not made
    assert "would have to go back for each row alone" in why_not_in_rows(model)
