"""Streams, faults, interrupts: the output so far is plain's, a stream ends once at most, model and cache live on."""

import gc
import itertools
import weakref

import pytest
import torch
from conftest import build_once, plain_run, run
from tiny_models import VOCAB_SIZE, prompt_ids
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.streamers import BaseStreamer

import hf_ssr
from hf_ssr import SSRConfig
from hf_ssr.cache_slots import SlotLayer
from hf_ssr.self_check import tells_texts_apart, why_not_in_blocks
from hf_ssr.target_slots import RowsInSlots


class Recorder(BaseStreamer):
    """Keeps what it is given; fails at the `fail_at`-th new token."""

    def __init__(self, fail_at: int | None = None, error: type[BaseException] = RuntimeError):
        self.values, self.ends, self.fail_at, self.error = [], 0, fail_at, error

    @property
    def tokens(self) -> list[int]:
        return [t for v in self.values[1:] for t in v.tolist()]

    def put(self, value):
        self.values.append(value)
        if self.fail_at is not None and len(self.values) - 1 == self.fail_at:
            raise self.error("no more")

    def end(self):
        self.ends += 1


class Iterated(Recorder):
    """Its reader waits in another thread, as that of a `TextIteratorStreamer`."""

    def __iter__(self):
        return iter(self.tokens)


class Previewer(Recorder):
    def __init__(self):
        super().__init__()
        self.drafts = []

    def put_draft(self, value, **kwargs):
        self.drafts.append(value.tolist())


@pytest.fixture(params=["qwen3", "gemma3", "qwen3_5", "lfm2"])
def plain_and_model(request):
    model = build_once(request.param)
    if request.param in ("qwen3_5", "lfm2"):
        assert why_not_in_blocks(model) is None  # once a model; its forwards are none of the tests'
    return plain_run(model, {"max_new_tokens": 60, "do_sample": False}), model


def config_of(plain, **kwargs) -> SSRConfig:
    defaults = {"draft_budgets": [4, 9], "prediction_ids": plain.answer, "num_draft_tokens": 7}
    return SSRConfig(thinking_start=[], thinking_end=[plain.marker], **{**defaults, **plain.settings, **kwargs})


def rows_of(cache) -> set[int]:
    tensors = [getattr(layer, "keys", None) for layer in cache.layers]
    for layer in cache.layers:
        tensors += [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    return {tensor.shape[0] for tensor in tensors if tensor is not None}


def test_tokens_come_one_by_one_in_plain_shapes(plain_and_model):
    plain, model = plain_and_model
    ours, theirs = Recorder(), Recorder()
    run(model, plain.ids, {}, generation_config=config_of(plain), streamer=ours)
    run(model, plain.ids, plain.settings, streamer=theirs)
    assert [v.tolist() for v in ours.values] == [v.tolist() for v in theirs.values]
    assert [v.shape for v in ours.values] == [v.shape for v in theirs.values]
    assert {v.dtype for v in ours.values} == {torch.int64}
    assert ours.ends == theirs.ends == 1


def test_drafts_are_shown_only_to_those_who_ask(plain_and_model):
    plain, model = plain_and_model
    streamer = Previewer()
    config = config_of(plain, return_dict_in_generate=True)
    output = run(model, plain.ids, {}, generation_config=config, streamer=streamer)
    assert streamer.tokens == plain.new
    stages, drafts = output.metrics.stages, streamer.drafts
    begins = [i for i, draft in enumerate(drafts) if i == 0 or len(draft) <= len(drafts[i - 1])]
    shown = [drafts[end - 1] for end in [*begins[1:], len(drafts)]]
    assert [len(draft) for draft in shown] == [stage.draft_tokens for stage in stages if stage.draft_tokens]
    for begin, end, whole in zip(begins, [*begins[1:], len(drafts)], shown, strict=True):
        assert all(draft == whole[: len(draft)] for draft in drafts[begin:end])


def test_a_child_ends_at_its_end_of_text(plain_and_model, count_forwards):
    """Its row goes, the parent thinks on alone, and the draft stays, that token included."""
    plain, model = plain_and_model
    streamer = Previewer()
    markers = {"draft_budgets": [2], "prediction_ids": None, "forced_close": [plain.marker, 5]}
    run(model, plain.ids, {}, generation_config=config_of(plain, **markers), streamer=streamer)
    drafted = streamer.drafts[-1]
    place = next(i for i, token in enumerate(drafted) if token not in plain.new[: plain.close + 1])
    counter = count_forwards(model)
    config = config_of(plain, return_dict_in_generate=True, **markers)
    output = run(model, plain.ids, {}, generation_config=config, eos_token_id=drafted[place])
    assert torch.equal(output.sequences, run(model, plain.ids, plain.settings, eos_token_id=drafted[place]))
    stage = output.metrics.stages[0]
    assert (stage.ended_by, stage.draft_tokens) == ("eos", place + 1)
    # the fork's own logits give the first token of the close
    assert 0 < output.metrics.forwards["drafting"] == stage.forwards <= 2 - 1 + place + 1
    drafting = {tuple(map(int, shape.split("x"))): n for shape, (n, _) in output.metrics.shapes["drafting"].items()}
    assert all(counter.shapes.count(shape) >= count for shape, count in drafting.items())
    assert all(rows == 2 or tokens > 1 for rows, tokens in drafting)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_streamer_that_raises(plain_and_model, error):
    """At every token: in the thought, beside a child, in a block."""
    plain, model = plain_and_model
    for fail_at in (1, 3, 5, 12, plain.close + 1, plain.close + 2, plain.close + 10, 59):
        streamer = Recorder(fail_at, error)
        cache = DynamicCache(config=model.config)
        with pytest.raises(error, match="no more"):
            run(model, plain.ids, {}, generation_config=config_of(plain), streamer=streamer, cache=cache)
        assert streamer.ends == (error is KeyboardInterrupt)
        assert streamer.tokens == plain.new[:fail_at]
        # the cache is as plain leaves it, and the user can go on with it
        assert cache.get_seq_length() == plain.ids.shape[1] + fail_at - 1
        assert rows_of(cache) == {1}
        assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
        text = plain.sequences[:, : plain.ids.shape[1] + fail_at]
        rest = {**plain.settings, "max_new_tokens": 60 - fail_at}
        if fail_at < 60:
            assert torch.equal(run(model, text, rest, cache=cache), plain.sequences)
    assert torch.equal(run(model, plain.ids, {}, generation_config=config_of(plain)), plain.sequences)


def test_a_reader_that_goes_leaves_no_cache(plain_and_model):
    """A service stops a text by an error in `put`; what it held is free once the error is dealt with."""
    plain, model = plain_and_model
    caches = weakref.WeakSet()
    handle = model.register_forward_pre_hook(lambda _, args, kwargs: caches.add(kwargs["cache"]), with_kwargs=True)
    for fail_at in (3, 8, plain.close + 4):
        try:
            run(model, plain.ids, {}, generation_config=config_of(plain), streamer=Recorder(fail_at))
        except RuntimeError:
            assert caches
        gc.collect()
        assert not caches
    handle.remove()


@pytest.mark.parametrize("where", range(1, 25, 2))
def test_interrupted_between_two_forwards(plain_and_model, where):
    plain, model = plain_and_model
    calls = []

    def interrupt(*_):
        calls.append(1)
        if len(calls) == where:
            raise KeyboardInterrupt

    streamer, cache = Recorder(), DynamicCache(config=model.config)
    handle = model.register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            config = config_of(plain, num_draft_tokens=2)
            run(model, plain.ids, {}, generation_config=config, streamer=streamer, cache=cache)
    finally:
        handle.remove()
    assert streamer.ends == 1
    assert streamer.tokens == plain.new[: len(streamer.tokens)]
    if where > 1:
        assert cache.get_seq_length() == plain.ids.shape[1] + len(streamer.tokens) - 1
        assert rows_of(cache) == {1}
    assert torch.equal(run(model, plain.ids, {}, generation_config=config_of(plain)), plain.sequences)


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True}])
def test_a_grammar_that_begins_behind_the_thought(plain_and_model, sampling):
    """Every token of the answer passes it, also in a block that drafts what it forbids."""
    _, model = plain_and_model
    plain = plain_run(model, {"max_new_tokens": 60, **sampling})
    seen = []

    def allowed(batch_id, ids):
        seen.append(len(ids))
        behind = (ids[plain.ids.shape[1] :] == plain.marker).nonzero()
        if len(behind) == 0:
            return range(VOCAB_SIZE)
        step = len(ids) - plain.ids.shape[1] - int(behind[0])
        return [token for token in range(3, VOCAB_SIZE) if token % 3 == step % 3]

    expected = run(model, plain.ids, plain.settings, prefix_allowed_tokens_fn=allowed)
    theirs, seen[:] = list(seen), []
    answer = expected[0, plain.ids.shape[1] + plain.close + 1 :].tolist()
    assert all(token % 3 == step % 3 for step, token in enumerate(answer, 1))
    for draft in (plain.answer, answer, answer[:5] + plain.answer):
        seen.clear()
        config = config_of(plain, prediction_ids=draft)
        output = run(model, plain.ids, {}, generation_config=config, prefix_allowed_tokens_fn=allowed)
        assert torch.equal(output, expected)
        assert seen == theirs  # once a token, in order, never on a rejected position


class FailAt(LogitsProcessor):
    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self.length:
            raise ArithmeticError("no score")
        return scores


def test_a_processor_or_criterion_that_raises(plain_and_model):
    """The error comes through, and nothing calls the text complete; the next call is right. In thought and answer."""
    plain, model = plain_and_model

    class Failing(StopAt):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] >= self.length:
                raise ArithmeticError("no criterion")
            return super().__call__(input_ids, scores) & False

    lengths = [plain.ids.shape[1] + n for n in (1, 7, plain.close + 5)]
    # with drafts, and in plain steps of the answer
    configs = [config_of(plain), config_of(plain, prediction_ids=None, draft_budgets=[], sources=[])]
    for length, config in itertools.product(lengths, configs):
        for kwargs in (
            {"logits_processor": LogitsProcessorList([FailAt(length)])},
            {"stopping_criteria": StoppingCriteriaList([Failing(length)])},
        ):
            streamer, cache = Recorder(), DynamicCache(config=model.config)
            with pytest.raises(ArithmeticError):
                run(model, plain.ids, {}, generation_config=config, streamer=streamer, cache=cache, **kwargs)
            assert streamer.ends == 0
            assert streamer.tokens == plain.new[: len(streamer.tokens)]
            assert rows_of(cache) == {1}
            assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    assert torch.equal(run(model, plain.ids, {}, generation_config=config_of(plain)), plain.sequences)


@pytest.mark.parametrize("branches", [True, False])
def test_out_of_memory_while_forking(plain_and_model, branches, monkeypatch):
    """Goes on without that draft, and says so; whether a child is a branch, or a row of its own."""
    plain, model = plain_and_model
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    is_attention = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    if branches:
        if not is_attention:
            pytest.skip("a child beside a state is a row")
        assert tells_texts_apart(model, {layer.sliding_window for layer in cache.layers if layer.is_sliding})
        arrange, regions = SlotLayer.arrange, []

        def fail_second(self, region, *args):
            if region and not self.region:
                regions.append(region)
                if len(regions) == 2:
                    raise torch.OutOfMemoryError("no room")
            return arrange(self, region, *args)

        monkeypatch.setattr(SlotLayer, "arrange", fail_second)
    else:
        assert why_not_in_blocks(model, {8}) is None
        fail_at_second_row(cache.layers[0], monkeypatch)
        monkeypatch.setattr(RowsInSlots, "takes_masks", False)
    config = config_of(plain, draft_budgets=[4, 9], return_dict_in_generate=True)
    output = run(model, plain.ids, {}, generation_config=config)
    assert torch.equal(output.sequences, plain.sequences)
    assert [(s.draft_budget, s.ended_by) for s in output.metrics.stages] == [(4, "out_of_memory"), (9, "close")]
    assert rows_of(output.cache) == {1}


def fail_at_second_row(layer, monkeypatch):
    layer_type = SlotLayer if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) else type(layer)
    reorder, calls = layer_type.reorder_cache, []

    def fail_once(self, rows):
        calls.append(1)
        if len(calls) == 2:  # the second layer: the first has two rows by then
            raise torch.OutOfMemoryError("no room")
        return reorder(self, rows)

    monkeypatch.setattr(layer_type, "reorder_cache", fail_once)


@pytest.mark.parametrize("rows", [1, 3])
def test_out_of_memory_beside_a_child(model, rows):
    """In the middle of a step with a child: the parents think on alone, and the drafts so far are used."""
    plain = plain_run(model, {"max_new_tokens": 60, "do_sample": False})
    assert why_not_in_blocks(model) is None and tells_texts_apart(model)  # before the layers count
    steps = []

    def fail_once(module, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        steps.append(len(hidden) > rows or (hidden.shape[1] > 1 and len(steps) > 1))
        if steps[-1] and sum(steps) == 4:
            raise torch.OutOfMemoryError("no room")

    handle = model.model.layers[1].register_forward_pre_hook(fail_once, with_kwargs=True)
    try:
        config = config_of(
            plain, draft_budgets=[2], prediction_ids=None, speculate_thinking=False, return_dict_in_generate=True
        )
        output = run(model, plain.ids.repeat(rows, 1), {}, generation_config=config)
    finally:
        handle.remove()
    assert torch.equal(output.sequences, plain.sequences.repeat(rows, 1))
    (stage,) = {(s.ended_by, s.draft_tokens) for s in output.metrics.stages}
    assert stage[0] == "out_of_memory" and stage[1] >= 3
    assert len(output.metrics.stages) == rows
    assert rows > 1 or rows_of(output.cache) == {1}


@pytest.mark.parametrize("kind, ends", [(Recorder, 0), (Iterated, 1)])
@pytest.mark.parametrize("route", ["mode", "callable"])
def test_refused_settings(model, route, kind, ends):
    """A reader that iterates must not wait for ever for a call that was refused; no other is told that all is well."""
    plain = plain_run(model, {"max_new_tokens": 60, "do_sample": False})
    streamer = kind()
    call = {"custom_generate": hf_ssr.generate} if route == "callable" else {}
    with pytest.raises(ValueError, match="prediction_ids"):
        config = config_of(plain, prediction_ids=[VOCAB_SIZE + 5])
        run(model, plain.ids, {}, generation_config=config, streamer=streamer, **call)
    assert streamer.ends == ends


@pytest.mark.parametrize("kind, ends", [(Recorder, 0), (Iterated, 1)])
@pytest.mark.parametrize("settings", [{"draft_budgets": [-1]}, {"draft_budgets": [2], "draft_interval": 3}])
def test_keywords_refused_by_a_callable(model, settings, kind, ends):
    streamer = kind()
    with pytest.raises(ValueError, match="draft_budgets"):
        run(model, prompt_ids(), {"max_new_tokens": 5}, custom_generate=hf_ssr.generate, streamer=streamer, **settings)
    assert streamer.ends == ends


def test_a_streamer_may_change_what_it_is_given(model):
    class Zeroing(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.values) > 1:
                value.zero_()

    plain = plain_run(model, {"max_new_tokens": 60, "do_sample": False})
    output = run(model, plain.ids, {}, generation_config=config_of(plain), streamer=Zeroing())
    assert torch.equal(output, plain.sequences)


def test_another_strategy_ends_the_stream_once(model):
    """Through a callable, which hands the call on; streams of beams are refused as transformers refuses them."""
    plain = plain_run(model, {"max_new_tokens": 40, "do_sample": False})
    call = {"custom_generate": hf_ssr.generate, "thinking_start": [], "thinking_end": [plain.marker]}
    streamer = Recorder()
    output = run(model, plain.ids, {**plain.settings, "prompt_lookup_num_tokens": 3}, streamer=streamer, **call)
    assert torch.equal(output, plain.sequences)
    assert [t for v in streamer.values[1:] for t in v.flatten().tolist()] == plain.new
    assert streamer.ends == 1
    for streamer, ends in ((Recorder(), 0), (Iterated(), 1)):
        with pytest.raises(ValueError, match="`streamer` cannot be used with beam search"):
            run(model, plain.ids, {**plain.settings, "num_beams": 2}, streamer=streamer, **call)
        assert streamer.ends == ends


class CountCalls(LogitsProcessor):
    """Stateful: what it does depends on how often it was called."""

    def __init__(self):
        self.calls, self.lengths = 0, []

    def __call__(self, input_ids, scores):
        self.calls += 1
        self.lengths.append(input_ids.shape[1])
        scores = scores.clone()
        scores[:, self.calls % VOCAB_SIZE] = -torch.inf
        return scores


class StopAt(StoppingCriteria):
    def __init__(self, length: int):
        self.length, self.lengths = length, []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


def test_a_processor_with_state_is_called_once_per_token_in_order(plain_and_model):
    plain, model = plain_and_model
    theirs, ours = CountCalls(), CountCalls()
    plain = plain_run(model, {"max_new_tokens": 60, "do_sample": True}, logits_processor=LogitsProcessorList([theirs]))
    output = run(
        model,
        plain.ids,
        {},
        generation_config=config_of(plain, draft_budgets=[2, 8], return_dict_in_generate=True),
        logits_processor=LogitsProcessorList([ours]),
    )
    assert torch.equal(output.sequences, plain.sequences)
    assert output.metrics.accepted_tokens > 0 and output.metrics.stages
    assert ours.lengths == theirs.lengths and ours.calls == theirs.calls


class Meddler(LogitsProcessor):
    """What a child must not call: it draws, counts in many places, and fails on any text but the output."""

    def __init__(self, kind: str, expected: list[int]):
        self.kind, self.expected, self.counts = kind, expected, [0]
        self.bump = [lambda: self.counts.__setitem__(0, self.counts[0] + 1)]

    def __call__(self, input_ids, scores):
        if self.kind == "draws":
            return scores + torch.randn_like(scores) * 0.1
        if self.kind == "fails":
            assert input_ids[0].tolist() == self.expected[: input_ids.shape[1]]
            return scores
        self.bump[0]()
        return scores - torch.nn.functional.one_hot(torch.tensor(self.counts[0] % VOCAB_SIZE), VOCAB_SIZE) * 99


class SlottedMeddler(LogitsProcessor):
    __slots__ = ()

    def __call__(self, input_ids, scores):
        return scores + torch.randn_like(scores) * 0.1


@pytest.mark.parametrize("kind", ["draws", "counts", "fails", "slots"])
def test_a_child_calls_no_processor_of_the_users(plain_and_model, kind):
    plain, model = plain_and_model

    def processors() -> LogitsProcessorList:
        made = SlottedMeddler() if kind == "slots" else Meddler(kind, plain.sequences[0].tolist())
        return LogitsProcessorList([made])

    expected = run(model, plain.ids, plain.settings, logits_processor=processors())
    config = config_of(plain, prediction_ids=None, return_dict_in_generate=True)
    output = run(model, plain.ids, {}, generation_config=config, logits_processor=processors())
    assert torch.equal(output.sequences, expected)
    assert output.metrics.stages


@pytest.mark.parametrize("offset", range(0, 18, 2))
def test_a_criterion_cuts_where_plain_cuts(plain_and_model, offset):
    plain, model = plain_and_model
    length = plain.ids.shape[1] + plain.close + offset
    theirs, ours = StopAt(length), StopAt(length)
    expected = run(model, plain.ids, plain.settings, stopping_criteria=StoppingCriteriaList([theirs]))
    config = config_of(plain)
    output = run(model, plain.ids, {}, generation_config=config, stopping_criteria=StoppingCriteriaList([ours]))
    assert torch.equal(output, expected)
    assert ours.lengths == theirs.lengths


def test_every_token_as_end_of_text(plain_and_model):
    plain, model = plain_and_model
    for token in sorted(set(plain.new)):
        expected = run(model, plain.ids, plain.settings, eos_token_id=token)
        streamer = Recorder()
        output = run(model, plain.ids, {}, generation_config=config_of(plain), eos_token_id=token, streamer=streamer)
        assert torch.equal(output, expected)
        assert streamer.tokens == expected[0, plain.ids.shape[1] :].tolist()


def test_every_length(plain_and_model, count_forwards):
    """Blocks never run past `max_length` either."""
    plain, model = plain_and_model
    run(
        model, plain.ids, {}, generation_config=config_of(plain, max_new_tokens=2)
    )  # a recurrent model checks itself once
    for length in range(1, 40):
        counter = count_forwards(model)
        output = run(model, plain.ids, {}, generation_config=config_of(plain, max_new_tokens=length))
        assert output.shape[1] == plain.ids.shape[1] + length
        assert torch.equal(output, plain.sequences[:, : output.shape[1]])
        # the last token is never fed, nor is anything in its place
        assert max(counter.ends) < plain.ids.shape[1] + length


def test_a_users_cache_over_two_turns(plain_and_model, count_forwards):
    plain, model = plain_and_model
    cache = DynamicCache(config=model.config)
    output = run(model, plain.ids, {}, generation_config=config_of(plain, return_dict_in_generate=True), cache=cache)
    assert output.cache is cache and cache.get_seq_length() == plain.sequences.shape[1] - 1
    turn = torch.cat([plain.sequences, plain.ids[:, :7]], dim=1)
    expected = run(model, turn, plain.settings)
    new = expected[0, turn.shape[1] :].tolist()
    close = max(place for place, token in enumerate(new) if place < 45 and token not in new[:place])
    assert close > 10
    config = SSRConfig(
        thinking_start=[],
        thinking_end=[new[close]],
        draft_budgets=[3],
        return_dict_in_generate=True,
        **plain.settings,
    )
    counter = count_forwards(model)
    output = run(model, turn, {}, generation_config=config, cache=cache)
    assert counter.shapes[0] == (1, turn.shape[1] - (plain.sequences.shape[1] - 1))
    assert torch.equal(output.sequences, expected)
    assert output.cache is cache and cache.get_seq_length() == expected.shape[1] - 1
    own = run(model, turn, {}, generation_config=config)  # as good as a cache of its own: a fork copies nothing
    assert output.metrics.extra_places == own.metrics.extra_places
    assert output.metrics.stages and (
        output.metrics.extra_places < turn.shape[1] or type(model).__name__ != "Qwen3ForCausalLM"
    )


def test_a_users_cache_that_holds_more_than_the_text(plain_and_model):
    """Text that only the cache has: rows are not shared then, places of the cache are not places of the text."""
    plain, model = plain_and_model
    if any("LinearAttention" in type(layer).__name__ for layer in DynamicCache(config=model.config).layers):
        pytest.skip("plain generate does not take up such a cache with new tokens alone")
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for cache in caches:
        run(model, plain.ids, {"max_new_tokens": 1, "do_sample": False}, cache=cache)
    rest = plain.sequences[:, plain.ids.shape[1] :][:, :5]
    mask = torch.ones((1, plain.ids.shape[1] + 5), dtype=torch.long)
    torch.manual_seed(0)
    expected = model.generate(rest, cache=caches[0], attention_mask=mask, **{**plain.settings, "max_new_tokens": 40})
    config = SSRConfig(
        thinking_start=[],
        thinking_end=[expected[0, -10].item()],
        draft_budgets=[3],
        **{**plain.settings, "max_new_tokens": 40},
    )
    torch.manual_seed(0)
    output = model.generate(rest, cache=caches[1], attention_mask=mask, generation_config=config)
    assert torch.equal(output, expected)


def test_the_global_generator_is_left_as_plain_leaves_it(plain_and_model):
    """The child draws from a generator of its own."""
    _, model = plain_and_model
    plain = plain_run(model, {"max_new_tokens": 60, "do_sample": True})
    after_plain = torch.rand(1)
    config = config_of(plain, draft_temperature=0.8, prediction_ids=None, return_dict_in_generate=True)
    output = run(model, plain.ids, {}, generation_config=config)
    assert torch.equal(torch.rand(1), after_plain)
    assert torch.equal(output.sequences, plain.sequences)
    assert sum(stage.draft_tokens for stage in output.metrics.stages) > 0


@pytest.mark.parametrize("kind", ["out of memory", "interrupt in a layer", "interrupt in the streamer"])
def test_whatever_happens_beside_a_child(plain_and_model, kind):
    """At every place: without memory it goes on, an interrupt comes through as what it is, the next call is right."""
    plain, model = plain_and_model
    config = config_of(plain, draft_budgets=None, draft_interval=7, prediction_ids=None, max_overhead="off")
    counts = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda *_: counts.append(1))
    run(model, plain.ids, {}, generation_config=config)
    handle.remove()
    for place in range(3, len(counts), 1 if kind == "out of memory" else 3):
        calls = []

        def fail(module, args, place=place, calls=calls):
            calls.append(1)
            if len(calls) == place:
                raise torch.OutOfMemoryError if kind == "out of memory" else KeyboardInterrupt

        handle = model.model.layers[0].register_forward_pre_hook(fail) if "streamer" not in kind else None
        streamer = Recorder(place, KeyboardInterrupt) if handle is None else None
        try:
            output = run(model, plain.ids, {}, generation_config=config, streamer=streamer)
            assert torch.equal(output, plain.sequences), place
        except (KeyboardInterrupt, torch.OutOfMemoryError):  # in a forward without a child, where plain fails too
            pass
        finally:
            if handle is not None:
                handle.remove()
    assert torch.equal(run(model, plain.ids, {}, generation_config=config), plain.sequences)
