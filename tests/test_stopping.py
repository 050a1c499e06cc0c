"""`StopThinking`: "answer now", on every path, and what follows is what a thinking budget would have given."""

import threading

import pytest
import torch
from conftest import plain_run, run
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import hf_ssr.preparing
from hf_ssr import SSRConfig, StopThinking, ThinkingBudgetLogitsProcessor

CLOSE = [120, 121]  # and the marker between them
NEW = 60


class StopAfter(BaseStreamer):
    """Sets the handle when it is given so many new tokens."""

    def __init__(self, stop: StopThinking, count: int):
        self.stop, self.count, self.seen = stop, count, -1  # the prompt comes first

    def put(self, value: torch.LongTensor) -> None:
        self.seen += 1
        if self.seen == self.count:
            self.stop.set()

    def end(self) -> None:
        pass


@pytest.fixture(params=[{"do_sample": False}, {"do_sample": True, "temperature": 0.8}], ids=["greedy", "sampled"])
def plain(request, model):
    return plain_run(model, {"max_new_tokens": NEW, **request.param})


def config_of(plain, **settings) -> SSRConfig:
    marker = next(token for token in range(130, 150) if token not in plain.new)
    close = [CLOSE[0], marker, CLOSE[1]]
    markers = {"thinking_start": [], "thinking_end": [marker], "forced_close": close}
    own = {**markers, "draft_budgets": [4, 12], "return_dict_in_generate": True}
    return SSRConfig(**{**own, **plain.settings, **settings})


def budgeted(model, plain, count: int) -> torch.Tensor:
    """Plain `generate` under a thinking budget."""
    config = config_of(plain, thinking_budget=count)
    budget = ThinkingBudgetLogitsProcessor(config, prompt_length=plain.ids.shape[1], max_new_tokens=NEW)
    return run(model, plain.ids, plain.settings, logits_processor=[budget])


@pytest.mark.parametrize("count", [0, 1, 5, 17, 40])
def test_the_thought_closes_at_the_next_token(model, plain, count):
    stop = StopThinking()
    if count == 0:
        stop.set()
    config = config_of(plain)
    output = run(
        model, plain.ids, {}, generation_config=config, stopping_criteria=[stop], streamer=StopAfter(stop, count)
    )
    assert output.metrics.plain_reason is None
    assert output.metrics.thinking_tokens == count + 2 and output.metrics.thinking_budget == count  # up to the marker
    assert torch.equal(output.sequences, budgeted(model, plain, count))
    if count >= 17:
        assert output.metrics.draft_tokens > 0  # the draft was there already
    stop.clear()
    again = run(model, plain.ids, {}, generation_config=config, stopping_criteria=[stop])
    assert torch.equal(again.sequences, plain.sequences)  # not set, it changes nothing


def test_the_last_moment(model, plain):
    """Behind what leaves room for an answer it does nothing; before that, one token of the answer comes."""
    for count, stops in ((NEW - 4, True), (NEW - 3, False)):
        stop = StopThinking()
        streamer = StopAfter(stop, count)
        output = run(
            model, plain.ids, {}, generation_config=config_of(plain), stopping_criteria=[stop], streamer=streamer
        )
        expected = budgeted(model, plain, count) if stops else plain.sequences
        assert torch.equal(output.sequences, expected)


def test_from_another_thread(model, plain):
    stop = StopThinking()
    timer = threading.Timer(0.05, stop.set)
    timer.start()
    config = config_of(plain, max_new_tokens=2000)
    output = run(model, plain.ids, {}, generation_config=config, stopping_criteria=[stop])
    timer.join()
    count = output.metrics.thinking_budget
    new = output.sequences[0, plain.ids.shape[1] :].tolist()
    assert count < 1990 and new[count : count + 3] == config.forced_close


def test_where_ssr_does_not_apply(model, plain, monkeypatch):
    monkeypatch.setattr(hf_ssr.preparing, "why_plain", lambda *_: "this is a test")
    stop = StopThinking()
    with pytest.warns(UserWarning, match="this is a test"):
        output = run(
            model,
            plain.ids,
            {},
            generation_config=config_of(plain),
            stopping_criteria=[stop],
            streamer=StopAfter(stop, 11),
        )
    assert torch.equal(output.sequences, budgeted(model, plain, 11))


def test_all_rows_of_a_batch(model):
    plain = plain_run(model, {"max_new_tokens": NEW, "do_sample": False})
    config = config_of(plain)
    ids = torch.cat([plain.ids, plain.ids.roll(1, dims=1)])

    class SetAtLength(StoppingCriteria):
        """A handle of someone else's, known by its name; set when a row has so many tokens."""

        stops_thinking, is_set = True, False

        def __call__(self, input_ids, scores, **kwargs):
            self.is_set = self.is_set or input_ids.shape[1] >= ids.shape[1] + 9
            return torch.zeros(len(input_ids), dtype=torch.bool)

    output = run(model, ids, {}, generation_config=config, stopping_criteria=[SetAtLength()])
    assert output.metrics.plain_reason is None
    for row, metrics in zip(output.sequences[:, ids.shape[1] :].tolist(), output.metrics.per_row, strict=True):
        count = metrics.thinking_budget
        assert count in (8, 9) and row[count : count + 3] == config.forced_close
