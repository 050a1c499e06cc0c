"""
A cache of slots: rows go on by differently many tokens, children and trees are branches, and the tokens are those of
plain `generate`, as are the keys and values that are left.
"""

import inspect
import random

import pytest
import torch
from conftest import build_once
from tiny_models import ARCHITECTURES, RECURRENT, VOCAB_SIZE, build, way_of
from transformers import BloomConfig, BloomForCausalLM, DynamicCache, FalconConfig, FalconForCausalLM
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_ssr import SSRConfig
from hf_ssr.cache_slots import SlotLayer, as_plain, into_slots
from hf_ssr.drafting import Draft
from hf_ssr.metrics import SSRMetrics
from hf_ssr.rows import Row
from hf_ssr.self_check import tells_texts_apart
from hf_ssr.target import Target
from hf_ssr.target_rows import AlignedRows
from hf_ssr.target_slots import RowsInSlots

PADDING = (0, 3, 7)
PROMPT, NEW = 14, 50
EXACT = 1e-6  # of logits in float64; norms and routers are in float32


def prompts_of(padding=PADDING, length: int = PROMPT, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, padded on the left."""
    ids = torch.randint(3, VOCAB_SIZE, (len(padding), length), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(length)[None] >= torch.tensor(padding)[:, None]).long()
    return ids * mask, mask


def target_of(model, ids, mask, new: int = NEW, **settings) -> Target:
    config = SSRConfig(max_length=ids.shape[1] + new, **settings)  # as `generate` prepares it
    config._pad_token_tensor = torch.tensor(0)
    positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    kwargs = {"cache": cache, "use_cache": True, "position_ids": positions, "attention_mask": mask}
    target = Target(model, ids, config, SSRMetrics(), kwargs)
    target.prefill()
    return target


@torch.no_grad()
def logits_alone(model, row: Row, padding: int, *more: int) -> torch.Tensor:
    """What comes after a text, and `more` behind it, in a forward of its own without a cache."""
    ids = torch.cat([row.ids, torch.tensor([more], dtype=torch.long)], dim=1)[:, padding:]
    return model(input_ids=ids, use_cache=False).logits[0, -1]


def path_to(parents: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


class Writer:
    """
    Writes the greedy texts of a batch with drafts of random lengths that hold errors, children that go on at random,
    and trees; compares logits with forwards without a cache as it goes.
    """

    def __init__(self, model, target: Target, truth: list[list[int]], seed: int, padding=PADDING, **does):
        self.model, self.target, self.truth = model, target, truth
        self.chance = random.Random(seed)
        self.texts = list(target.rows)
        self.padding = dict(zip(self.texts, padding, strict=True))
        self.children: dict[Row, Row] = {}
        self.does = {"children": True, "trees": False, "compares": 0.15, **does}
        self.lengths = set()

    def draft_of(self, row: Row) -> Draft:
        """From the true text, a fifth of it wrong; of a child, anything."""
        most = min(self.chance.randint(0, 7), row.room - 1)
        known = self.truth[self.texts.index(row)][row.length :] if row in self.texts else []
        known = (known + [self.chance.randrange(3, VOCAB_SIZE) for _ in range(most)])[:most]
        ids = [token if self.chance.random() > 0.2 else self.chance.randrange(3, VOCAB_SIZE) for token in known]
        if not self.does["trees"] or len(ids) < 2 or self.chance.random() < 0.3:
            return Draft(ids)
        parents, tokens = [], []
        for node, token in enumerate(ids):  # wrong brothers beside it, here and there
            parent = len(tokens) - 1 if node else -1
            if self.chance.random() < 0.5:
                tokens.append(self.chance.choice([t for t in range(3, 40) if t != token]))
                parents.append(parent)
            tokens.append(token)
            parents.append(parent)
        return Draft(tokens, parents=parents)

    def follow(self, row: Row, draft: Draft, logits: torch.Tensor, pick) -> None:
        """Along what is picked, and one token further."""
        node, parents = -1, draft.parents or list(range(-1, len(draft.ids) - 1))
        assert logits.shape[:2] == (1, len(draft.ids) + 1)
        self.compare(row, draft.ids, parents, logits)
        while True:
            token = pick(logits[0, node + 1], node)
            row.append(token)
            following = [i for i, parent in enumerate(parents) if parent == node and draft.ids[i] == token]
            if not following or row.length >= row.max_length:
                return
            node = following[0]

    def compare(self, row: Row, ids: list[int], parents: list[int], logits: torch.Tensor) -> None:
        for node in range(-1, len(ids)):
            if self.chance.random() < self.does["compares"]:
                more = [ids[i] for i in path_to(parents, node)]
                alone = logits_alone(self.model, row, self.padding[row], *more)
                assert (alone - logits[0, node + 1]).abs().max() < EXACT, (row.length, node, row in self.texts)

    @torch.no_grad()
    def write(self) -> None:
        """Until all texts are as long as they may be."""
        target, chance = self.target, self.chance
        evidence = target.forward("thinking", {})
        for row in self.texts:
            row.append(int(evidence[row].logits[0, -1].argmax()))
        target.keep(target.rows)
        while running := [row for row in self.texts if row.room > 0]:
            children = [self.children[row] for row in running if row in self.children]
            if target.rows != [*running, *children]:
                target.keep([*running, *children])
            if self.does["children"]:
                self.fork(running)
            drafts = {row: self.draft_of(row) for row in target.rows}
            drafts = {row: draft for row, draft in drafts.items() if draft.ids or chance.random() < 0.5}
            evidence = target.forward("drafting", drafts)
            for row in target.rows:
                draft = drafts.get(row, Draft())
                if row in self.texts:
                    self.follow(row, draft, evidence[row].logits, lambda scores, _: int(scores.argmax()))
                else:
                    self.follow(row, draft, evidence[row].logits, self.pick_any(draft))
            kept = [row for row in target.rows if row in self.texts or (row.room > 1 and chance.random() > 0.1)]
            kept = [row for row in kept if row in self.texts or row.origin.room > 0]
            self.children = {row.origin: row for row in kept if row not in self.texts}
            target.keep(kept)
            self.lengths.add(tuple(row.cached for row in target.rows))

    def pick_any(self, draft: Draft):
        """A child may write anything; often what is drafted."""
        parents = draft.parents or list(range(-1, len(draft.ids) - 1))

        def pick(_, node: int) -> int:
            following = [draft.ids[i] for i, parent in enumerate(parents) if parent == node]
            right = following and self.chance.random() < 0.7
            return self.chance.choice(following) if right else self.chance.randrange(3, VOCAB_SIZE)

        return pick

    def fork(self, running: list[Row]) -> None:
        new = [row for row in running if row not in self.children and row.room > 12 and self.chance.random() < 0.3]
        for row in new:
            child = self.children[row] = row.fork()
            self.padding[child] = self.padding[row]
            child.length -= 1  # a fork is made before the parent's token
            child.append(self.chance.randrange(3, VOCAB_SIZE))
        if new:
            self.target.fork([self.children[row] for row in new])


def generated(model, ids, mask, new: int = NEW, **kwargs):
    torch.manual_seed(0)
    settings = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=mask, **settings, **kwargs)


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_batches_with_children(architecture, trees):
    """Three rows with padding: the tokens of `generate`; logits of texts, children and nodes as without a cache."""
    model = build_once(architecture)
    ids, mask = prompts_of()
    truth = generated(model, ids, mask).tolist()
    target = target_of(model, ids, mask)
    assert type(target._layout) is RowsInSlots and target.takes_uneven_blocks and target.takes_trees
    writer = Writer(model, target, truth, seed=int(trees), trees=trees)
    writer.write()
    assert [row.ids[0].tolist() for row in writer.texts] == truth
    assert any(len(set(lengths[:3])) > 1 for lengths in writer.lengths)  # they did part


def cached(cache) -> list[tuple]:
    return [
        (type(layer), layer.get_seq_length(), layer.keys, layer.values)
        for layer in cache.layers
        if hasattr(layer, "get_seq_length")  # not of a layer that shares
    ]


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("new", [NEW, 9])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "mistral", "gpt_oss", "deepseek_v3", "gemma4_shared"])
def test_the_cache_is_left_as_plain_leaves_it(architecture, new, trees):
    """Types, lengths, keys and values, in order; windows hold no more than plain's."""
    model = build_once(architecture)
    ids, mask = prompts_of((2,))
    output = generated(model, ids, mask, new, return_dict_in_generate=True)
    target = target_of(model, ids, mask, new, return_dict_in_generate=True)
    writer = Writer(model, target, output.sequences.tolist(), 5, padding=(2,), trees=trees, compares=0)
    writer.write()
    cache = target.cache
    target.settle()
    assert target.cache is cache and writer.texts[0].ids.tolist() == output.sequences.tolist()
    for ours, plain in zip(cached(cache), cached(output.cache), strict=True):
        assert ours[:2] == plain[:2]
        for held, expected in zip(ours[2:], plain[2:], strict=True):
            assert held.shape == expected.shape and torch.allclose(held, expected, atol=EXACT)
    with torch.no_grad():  # and goes on as plain's does
        token = output.sequences[:, -1:]
        position = torch.tensor([[token.shape[1] + output.sequences.shape[1] - 2 - 2]])
        seen = torch.cat([mask, mask.new_ones((1, new))], dim=1)
        after = [
            model(input_ids=token, cache=each, position_ids=position, attention_mask=seen).logits
            for each in (cache, output.cache)
        ]
    assert torch.allclose(*after, atol=EXACT)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_a_child_may_be_a_row_of_its_own(architecture, monkeypatch):
    """As beside layers that keep a state: rows need not agree in length there either."""
    monkeypatch.setattr(RowsInSlots, "takes_branches", False)
    model = build_once(architecture)
    ids, mask = prompts_of()
    truth = generated(model, ids, mask).tolist()
    target = target_of(model, ids, mask)
    writer = Writer(model, target, truth, 3, trees=True)
    writer.write()
    assert [row.ids[0].tolist() for row in writer.texts] == truth


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("window", [None, 8, 40])
def test_a_layer_of_slots_is_a_layer_of_transformers(window, seed):
    """Whatever is done to both: appended, cropped past a window too, rows selected, replaced, given back."""
    torch.manual_seed(seed)
    rng, rows = random.Random(seed), 1
    ours = SlotLayer(window, spares=bool(seed % 4))
    theirs = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
    theirs.record_past = True
    last = 0
    for _ in range(80):
        kind = rng.choice(["append", "append", "append", "crop", "rows", "turn"])
        if kind == "append" or not ours.is_initialized:
            last = rng.choice([1, 1, 1, 7, 16, 300])
            keys, values = torch.randn(rows, 2, last, 4), torch.randn(rows, 2, last, 3)
            assert ours.get_mask_sizes(last) == theirs.get_mask_sizes(last)
            returned, expected = ours.update(keys, values), theirs.update(keys, values)
            assert all(map(torch.equal, returned, expected))
            if rng.random() < 0.5:
                theirs.crop(0), (last := 0)
        elif kind == "crop":
            count = rng.randint(0, last)
            ours.crop(-count), theirs.crop(-count)
            last = 0
        elif kind == "rows":
            theirs.crop(0)
            chosen = torch.tensor([rng.randrange(rows) for _ in range(rng.choice([1, 2]))])
            ours.reorder_cache(chosen), theirs.reorder_cache(chosen)
            rows, last = len(chosen), 0
        else:
            theirs.crop(0)
            ours, last = SlotLayer.of(ours.as_plain(), spares=bool(seed % 4)), 0
        if last == 0:
            assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.is_sliding == theirs.is_sliding and ours.get_max_length() == theirs.get_max_length()


def test_appending_copies_nothing():
    layer, places = SlotLayer(), set()
    layer.update(torch.randn(1, 2, 1000, 4), torch.randn(1, 2, 1000, 4))
    for count in [1, 16] * 100:
        layer.update(torch.randn(1, 2, count, 4), torch.randn(1, 2, count, 4))
        layer.crop(-15 if count == 16 else 0)
        places.add(layer.keys.data_ptr())
    assert len(places) == 1 and layer.get_seq_length() == 1200


def test_a_window_moves_seldom_and_stays_small():
    layer, places, window = SlotLayer(1000), set(), 1000
    layer.update(torch.randn(1, 2, 20, 4), torch.randn(1, 2, 20, 4))
    for _ in range(5000):
        layer.update(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4))
        places.add(layer._keys.data_ptr())
        assert layer._keys.shape[-2] <= window + window // 4 + 1
    assert len(places) <= 30 and layer.keys.shape[-2] == window - 1


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3])
def test_memory(rows):
    """A row has room for its text, a quarter of that to grow, and a child; a window has no more than twice its own."""
    model = build_once("gemma3")
    ids, mask = prompts_of(PADDING[:rows], 300)
    target = target_of(model, ids, mask, 400)
    writer = Writer(model, target, [[]] * rows, 1, padding=PADDING[:rows], compares=0)
    writer.write()
    full, windows = [], []
    for layer in target.cache.layers:
        (full if layer.window is None else windows).append(layer._keys.shape[-2])
    kinds = target._layout._slots.kinds
    assert max(full) <= 1.25 * 700 + 16 + kinds[None].region and kinds[None].region <= 512
    assert max(windows) <= 2 * (8 + 64 + 16)
    assert target.metrics.extra_places > 0


class Attention(list):
    """What the attention layers of a model are given: mask, and how many keys."""

    def __init__(self, model, monkeypatch):
        functions = model.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS[functions]

        def noted(module, query, key, value, attention_mask, *args, **kwargs):
            self.append((None if attention_mask is None else attention_mask.clone(), key.shape[-2], key))
            return attend(module, query, key, value, attention_mask, *args, **kwargs)

        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, functions, noted)


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2])
def test_steps_of_plain_shape_take_plains_mask_and_kernel(model, rows, monkeypatch):
    """One row, or rows that agree, without child and tree: no mask of ours, and no slot behind the last place."""
    ids, mask = prompts_of((0,) * rows)
    target = target_of(model, ids, mask)
    given = Attention(model, monkeypatch)
    evidence = target.forward("thinking", {})
    for step in range(12):
        drafts = {}
        for row in target.rows:
            row.append(int(evidence[row].logits[0, -1].argmax()) if row in evidence else 5)
            drafts[row] = Draft([7, 9, 11][: step % 4])
        target.keep(target.rows)
        given.clear()
        evidence = target.forward("thinking", drafts)
        begin, width = target.rows[0].cached, 1 + step % 4
        assert {keys for _, keys, _ in given} == {begin + width}
        if width == 1:
            assert all(mask is None for mask, *_ in given)
        evidence = {row: each.of(0, 0, 1) for row, each in evidence.items()}


@torch.no_grad()
def test_attention_reads_no_further_than_the_longest_row(model, monkeypatch):
    ids, mask = prompts_of((0, 0))
    target = target_of(model, ids, mask)
    target.forward("thinking", {})
    first, second = target.rows
    for row, count in ((first, 1), (second, 1)):
        row.append(count)
    target.keep(target.rows)
    target.forward("thinking", {first: Draft([5, 6, 7])})
    for token in (5, 6, 9):
        first.append(token)
    second.append(4)
    target.keep(target.rows)
    assert (first.cached, second.cached) == (PROMPT + 3, PROMPT + 1)
    given = Attention(model, monkeypatch)
    target.forward("thinking", {second: Draft([5])})
    assert {keys for _, keys, _ in given} == {PROMPT + 5} and all(mask.shape == (2, 1, 2, 19) for mask, *_ in given)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_no_slot_is_anything_but_a_number(architecture, monkeypatch):
    """Attention multiplies what it hides by 0: memory that nobody has written must not be NaN."""
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *args: self.new_full(*args, float("nan")))
    model = build_once(architecture)
    ids, mask = prompts_of()
    truth = generated(model, ids, mask).tolist()
    given = Attention(model, monkeypatch)
    writer = Writer(model, target_of(model, ids, mask), truth, 0, compares=0)
    writer.write()
    assert any(mask is not None for mask, *_ in given)
    for mask, _, held in given:
        assert held.isfinite().all()
        assert mask is None or mask.dtype == torch.bool or (mask == 0).any(dim=-1).all()  # each place sees itself


@torch.no_grad()
def test_what_is_filled_up_stands_past_no_table(count_forwards):
    """Filler has the position of the last place that counts."""
    model = build_once("qwen3")
    ids, mask = prompts_of((0, 3))
    target = target_of(model, ids, mask, new=6)
    target.forward("thinking", {})
    first, second = target.rows
    for row in target.rows:
        row.append(5)
    target.keep(target.rows)
    target.forward("thinking", {first: Draft([5, 6, 7])})
    for token in (5, 6, 7, 8):
        first.append(token)
    second.append(4)
    target.keep(target.rows)
    counter = count_forwards(model)
    target.forward("thinking", {second: Draft([5, 6, 7])})
    assert counter.shapes == [(2, 4)] and counter.ends == [PROMPT + 5]


@torch.no_grad()
def test_positions_of_several_planes(model, monkeypatch):
    """Where image tokens share positions, an index is no position: each plane goes on by the distance from its last."""
    ids, mask = prompts_of((0, 0))
    config = SSRConfig(max_length=PROMPT + NEW)
    positions = torch.arange(PROMPT)[None, None].repeat(3, 2, 1) // torch.tensor([1, 2, 3])[:, None, None]
    cache = DynamicCache(config=model.config)
    kwargs = {"cache": cache, "use_cache": True, "position_ids": positions, "attention_mask": mask}
    target, seen = Target(model, ids, config, SSRMetrics(), kwargs), []
    forward = type(model).forward

    def flat(self, *args, position_ids=None, **kwargs):  # the model has one plane
        seen.append(position_ids)
        return forward(self, *args, position_ids=position_ids[0], **kwargs)

    flat.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(type(model), "forward", flat)
    target.prefill()
    target.forward("thinking", {})
    first, second = target.rows
    first.append(5), second.append(6)
    target.keep(target.rows)
    child = first.fork()
    target.fork([child])
    child.append(8)
    target.forward("thinking", {first: Draft([3, 4, 5, 6], parents=[-1, -1, 0, 2])})
    last = positions[:, 0, -1]
    assert seen[-1].shape == (3, 2, 7)
    distances = torch.tensor([1, 2, 2, 3, 4, 1, 2])  # text, four nodes, the child's two
    assert torch.equal(seen[-1][:, 0], last[:, None] + distances)
    assert torch.equal(seen[-1][:, 1], last[:, None] + torch.ones(7, dtype=torch.long))


@torch.no_grad()
def test_a_parent_outruns_its_child():
    """The window that the child began with stays there, however far its parent has gone, and itself."""
    model = build_once("gemma3")
    ids, mask = prompts_of((0,))
    target = target_of(model, ids, mask, new=400)
    target.forward("thinking", {})
    (parent,) = target.rows
    parent.append(5)
    target.keep([parent])
    child = parent.fork()
    child.append(6)
    target.fork([child])
    rng = random.Random(0)
    for step in range(60):
        moves = parent if step < 20 else child
        draft = Draft([rng.randrange(3, VOCAB_SIZE) for _ in range(5)])
        evidence = target.forward("drafting", {moves: draft})
        for row in target.rows:
            alone = logits_alone(model, row, 0)
            assert (alone - evidence[row].logits[0, 0]).abs().max() < EXACT, (step, row is child)
        for token in (*draft.ids, 9):
            moves.append(token)
        target.keep(target.rows)
    assert child.length - parent.length > 100 and parent.length > PROMPT + 100


def test_a_window_longer_than_the_text_takes_no_more_than_full_attention():
    """Phi-4-mini names a window of 262,144 tokens: a quarter of that is 8 GiB."""
    layer = SlotLayer(window=262_144)
    for count in (1000, 1):
        layer.update(torch.randn(1, 2, count, 4), torch.randn(1, 2, count, 4))
    assert layer.room <= 1.25 * 1001


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *RECURRENT])
def test_which_way_a_model_goes(architecture, rows):
    """As the table of `docs/architecture.md` says."""
    ids, mask = prompts_of(PADDING[:rows])
    target = target_of(build_once(architecture), ids, mask)
    way = "masks" if target.takes_trees else "back" if target.takes_uneven_blocks else "forward"
    assert way == way_of(architecture)
    assert (type(target._layout) is RowsInSlots) == (way == "masks")


def test_what_takes_no_mask_lies_in_rows(model, monkeypatch):
    monkeypatch.setattr(RowsInSlots, "takes_masks", False)
    ids, mask = prompts_of()
    assert type(target_of(model, ids, mask)._layout) is AlignedRows
    alone = target_of(model, ids[:1], mask[:1])
    assert type(alone._layout) is RowsInSlots and not alone.takes_trees
    alone.forward("thinking", {})
    alone.rows[0].append(5)
    alone.keep(alone.rows)
    alone.fork([alone.rows[0].fork()])
    assert type(alone._layout) is AlignedRows and len(alone.cache.layers[0].keys) == 2


def test_a_cache_stays_the_object():
    cache = DynamicCache()
    for layer in range(2):
        cache.update(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), layer)
    held = cache.layers[1].keys
    into_slots(cache)
    assert [type(layer) for layer in cache.layers] == [SlotLayer] * 2 and cache.layers[
        1
    ].keys.data_ptr() == held.data_ptr()
    assert cache.get_seq_length() == 5
    as_plain(cache)
    assert [type(layer) for layer in cache.layers] == [DynamicLayer] * 2 and torch.equal(cache.layers[1].keys, held)


@pytest.mark.parametrize("kind", ["bloom", "falcon"])
def test_a_bias_by_the_slot_would_put_a_child_wrong(kind):
    """ALiBi counts slots: such a model is given rows, or does it right."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_attention_heads": 4, "eos_token_id": None}
    if kind == "bloom":
        model = BloomForCausalLM(BloomConfig(n_layer=2, n_head=4, **sizes))
    else:
        model = FalconForCausalLM(FalconConfig(alibi=True, num_hidden_layers=2, **sizes))
    model = model.eval().double()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0, 0.2)
    assert not tells_texts_apart(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "gpt_oss"])
def test_half_precision_takes_masks(architecture, dtype):
    assert tells_texts_apart(build(architecture, dtype), [8])


@torch.no_grad()
def test_a_fork_that_finds_no_memory_leaves_all_as_it_was(monkeypatch):
    """In any layer of any kind: the text goes on, and the next fork is right."""
    model = build_once("gemma3")
    ids, mask = prompts_of()
    truth = generated(model, ids, mask).tolist()
    arrange, moved, is_forking = SlotLayer.arrange, [], []

    def fail_often(self, region, *args):
        if is_forking and region > self.region:
            moved.append(self)
            if len(moved) % 3 == 2:
                raise torch.OutOfMemoryError("no room")
        return arrange(self, region, *args)

    target = target_of(model, ids, mask)
    monkeypatch.setattr(SlotLayer, "arrange", fail_often)
    fork, failed = target.fork, []

    def fork_again(rows):
        while True:
            is_forking.append(1)
            try:
                return fork(rows)
            except torch.OutOfMemoryError:
                failed.append(list(target.rows))
                assert not set(rows) & set(target.rows)
                target.forward("thinking", {})  # it goes on without the child
                target.undo_forward()
            finally:
                is_forking.clear()

    monkeypatch.setattr(target, "fork", fork_again)
    writer = Writer(model, target, truth, 4)
    writer.write()
    assert failed and [row.ids[0].tolist() for row in writer.texts] == truth


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_a_draft_that_finds_no_memory_goes_with_its_child(architecture, monkeypatch):
    model = build_once(architecture)
    ids, mask = prompts_of((3,))
    target = target_of(model, ids, mask, new=500)
    target.forward("thinking", {})
    (parent,) = target.rows
    parent.append(5)
    target.keep([parent])
    child = parent.fork()
    child.append(6)
    target.fork([child])
    arrange, regions = SlotLayer.arrange, []

    def fail_once(self, region, *args):
        if region > self.region:
            regions.append(region)
            if len(regions) == 2:
                raise torch.OutOfMemoryError("no room")
        return arrange(self, region, *args)

    monkeypatch.setattr(SlotLayer, "arrange", fail_once)
    with pytest.raises(torch.OutOfMemoryError):
        target.forward("drafting", {child: Draft([7] * 120)})
    assert target.undo_forward()
    target.keep([parent])
    for token in (4, 8, 9):
        evidence = target.forward("thinking", {parent: Draft([token])})
        for place, more in enumerate(([], [token])):
            assert (logits_alone(model, parent, 3, *more) - evidence[parent].logits[0, place]).abs().max() < EXACT
        parent.append(token)
        target.keep([parent])
    assert len(regions) == 2  # nor is it asked for again


@torch.no_grad()
@pytest.mark.parametrize("place", range(1, 16, 4))
def test_a_forward_that_is_interrupted_leaves_no_trace(place):
    """Some layers have written, some have moved: the next forward is right."""
    model = build_once("gemma3")
    ids, mask = prompts_of()
    truth = generated(model, ids, mask).tolist()
    target = target_of(model, ids, mask)
    forward, calls = target.forward, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) % 3 == 0 and not target.has_logits:
            handle = model.model.layers[len(calls) % 4].register_forward_pre_hook(raises)
            try:
                with pytest.raises(KeyboardInterrupt):
                    forward(*args)
            finally:
                handle.remove()
            assert target.undo_forward()
        return forward(*args)

    target.forward = interrupted
    writer = Writer(model, target, truth, place, trees=True, compares=0.05)
    writer.write()
    assert len(calls) > 3 and [row.ids[0].tolist() for row in writer.texts] == truth


def raises(*_):
    raise KeyboardInterrupt


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_rows_that_part_and_meet_again(architecture):
    """A step of plain's shape needs rows that agree in index, and in which slots these have."""
    model = build_once(architecture)
    ids, mask = prompts_of((0, 3))
    target = target_of(model, ids, mask, new=400)
    target.forward("thinking", {})
    first, second = target.rows
    rng, parts = random.Random(0), set()
    for row in target.rows:
        row.append(5)
    target.keep(target.rows)
    for lead in (0, 5, 5, 0, 9, 0, 0, 70, 0, 3, 0):
        for count in (1, 2, 4):
            wanted = max(first.length, second.length - lead) + count
            for _ in range(2 * abs(first.length - second.length) + 40):
                due = {row: end - row.length for row, end in ((first, wanted), (second, wanted + lead))}
                if not any(due.values()):
                    break
                drafts = {
                    row: Draft([rng.randrange(3, 99) for _ in range(max(0, n - 1))][:8]) for row, n in due.items()
                }
                evidence = target.forward("thinking", drafts)
                parts.add(first.length == second.length)
                for row, padding in ((first, 0), (second, 3)):
                    alone = logits_alone(model, row, padding)
                    error = (alone - evidence[row].logits[0, 0]).abs().max()
                    assert error < EXACT, (lead, count, first.length, second.length)
                    for token in (*drafts[row].ids, 9)[: max(0, due[row])]:
                        row.append(token)
                target.keep(target.rows)
    assert parts == {True, False}
