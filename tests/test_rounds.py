"""Rounds over lanes: the contract of a drafter, trees, evidence, and drafts that share the width of a step."""

import random
from typing import ClassVar

import pytest
import torch
from conftest import build_once, plain_run, run
from test_speed import governor_with
from tiny_models import build

import hf_ssr.costs
import hf_ssr.self_check
from hf_ssr import SSRConfig
from hf_ssr.costs import GuessedCosts, StepCosts
from hf_ssr.draft_sources import DRAFTERS
from hf_ssr.drafting import Draft, Drafter, Evidence
from hf_ssr.following import exact
from hf_ssr.scheduling import Governor


def test_a_tree_is_followed_to_the_token_that_was_chosen():
    draft = Draft([5, 6, 7, 8, 9], parents=[-1, -1, 1, 2, 1])
    chosen = {0: 6, 2: 9, 5: 4}  # behind the text, behind 6, behind 9
    places = []

    def pick(place: int) -> int:
        places.append(place)
        return chosen[place]

    assert list(exact(draft, pick)) == [(6, 1), (9, 4), (4, None)]
    assert places == [0, 2, 5]


def test_what_is_cut_of_a_draft_can_still_be_verified():
    draft = Draft([1, 2, 3], probs=["p", "q", "r"])
    draft.cut(2)
    assert (draft.ids, draft.then, draft.probs) == ([1, 2], 3, ["p", "q", "r"])
    tree = Draft([1, 2, 3], parents=[-1, 0, 0])
    tree.cut(2)
    assert (tree.ids, tree.parents, tree.then) == ([1, 2], [-1, 0], None)


def test_a_tree_behind_forced_tokens():
    tree = Draft([5, 6, 7], parents=[-1, -1, 1]).behind([1, 2])
    assert (tree.ids, tree.parents, tree.forced) == ([1, 2, 5, 6, 7], [-1, 0, 1, 1, 3], 2)
    assert [tree.after(1, 5), tree.after(1, 6), tree.after(3, 7), tree.after(-1, 5)] == [2, 3, 4, None]
    assert Draft([5], parents=[-1]).behind([]).parents == [-1]


def test_where_no_trees_are_taken():
    """The path over the first token behind each; a chain is itself."""
    assert Draft([5, 6, 7, 8], parents=[-1, 0, 0, 1]).chain.ids == [5, 6, 8]
    assert Draft([5, 6, 7], parents=[-1, -1, 0]).chain == Draft([5, 7])
    chain = Draft([5, 6])
    assert chain.chain is chain


def test_the_first_fork_does_not_pay_for_the_trial(monkeypatch):
    """A model is tried once, before the first fork; no fork, and no round, was as dear as that."""
    model, seconds, spent = build("qwen3"), [], []
    clock = [0.0]

    def tries(*args):
        clock[0] += 100.0
        spent.append(1)
        return trial(*args)

    def ticking():
        clock[0] += 0.001
        return clock[0]

    trial = hf_ssr.self_check.try_masks
    monkeypatch.setattr(hf_ssr.self_check, "try_masks", tries)
    monkeypatch.setattr(hf_ssr.costs.time, "perf_counter", ticking)
    add, add_once = StepCosts.add, StepCosts.add_once
    monkeypatch.setattr(StepCosts, "add", lambda self, r, t, s, *a: seconds.append(s) or add(self, r, t, s, *a))
    monkeypatch.setattr(StepCosts, "add_once", lambda self, w, s, *a: seconds.append(s) or add_once(self, w, s, *a))
    plain = plain_run(model, {"max_new_tokens": 40, "do_sample": False})
    config = SSRConfig(
        thinking_start=[],
        thinking_end=[plain.marker],
        draft_budgets=[4],
        return_dict_in_generate=True,
        **plain.settings,
    )
    output = run(model, plain.ids, {}, generation_config=config)
    assert torch.equal(output.sequences, plain.sequences) and output.metrics.stages
    assert spent and seconds and max(seconds) < 1


def test_rows_share_a_width(model, monkeypatch):
    """The width that promises most tokens of all rows for its cost; a row whose draft is shorter is not waited for."""
    governor: Governor = governor_with(model, monkeypatch, draft_budgets=[4])
    costs = governor.costs
    assert isinstance(costs, GuessedCosts)
    chance = random.Random(0)
    for _ in range(50):
        chances = [chance.choice([0.1, 0.5, 0.8, 0.97]) for _ in range(3)]
        lengths = [chance.choice([0, 2, 7, 16]) for _ in range(3)]
        drafts = [Draft([3] * n, chance=p) for n, p in zip(lengths, chances, strict=True)]

        def worth(width: int, chances=chances, lengths=lengths) -> float:
            pairs = zip(chances, lengths, strict=True)
            return sum(p**i for p, n in pairs for i in range(min(n, width) + 1)) / costs(3, 1 + width)

        governor.fit(drafts, lambda width: (3, 1 + width))
        width = max(len(draft.ids) for draft in drafts)
        assert [len(draft.ids) for draft in drafts] == [min(n, width) for n in lengths]
        assert max(map(worth, range(max(lengths) + 1))) <= worth(width) * 1.011


class Tree(Drafter):
    """A drafter of its own kind: it knows the text, hides it in a tree of wrong tokens, and looks at hidden states."""

    layers = (1,)
    truth: ClassVar[list[int]] = []
    seen: ClassVar[list] = []
    asked: ClassVar[list[int]] = []

    def __init__(self, config, tail=(), own="answer", record=None, written=None):
        super().__init__(8, 10**6, record)
        self.written = [] if written is None else written
        self.place = 0 if own == "thought" else None  # of a child nothing is known

    def add(self, *args, **kwargs) -> None:
        """It needs none."""

    add_draft = add

    @classmethod
    def propose_together(cls, drafters, limits):
        cls.asked.append(len(drafters))
        return super().propose_together(drafters, limits)

    def propose(self, limit: int) -> Draft:
        if limit < 4:
            return Draft()
        first, second = self.truth[self.place : self.place + 2]
        wrong = [token for token in range(20, 26) if token not in (first, second)]
        return Draft([wrong[0], first, wrong[1], second], "own", kind="tree", parents=[-1, -1, 0, 1])

    def observe(self, token: int) -> None:
        self.place += 1

    def show(self, evidence: Evidence, places) -> None:
        if evidence.hidden:  # not those of the prompt
            assert evidence.hidden[1].shape[:2] == evidence.logits.shape[:2]
            self.seen.extend(evidence.hidden[1][0, place] for place in places)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_a_drafter_of_ones_own(architecture, monkeypatch):
    """One file and one entry: trees, hidden states of what was kept, a source of its own in the metrics."""
    model = build_once(architecture)
    plain = plain_run(model, {"max_new_tokens": 40, "do_sample": False})
    monkeypatch.setitem(DRAFTERS, "suffix", Tree)
    monkeypatch.setattr(Tree, "truth", plain.new)
    monkeypatch.setattr(Tree, "seen", [])
    monkeypatch.setattr(Tree, "asked", [])
    settings = {**plain.settings, "thinking_start": [], "thinking_end": [159], "draft_budgets": []}
    config = SSRConfig(max_overhead="off", return_dict_in_generate=True, **settings)
    output = run(model, plain.ids, {}, generation_config=config)
    assert torch.equal(output.sequences, plain.sequences)
    metrics = output.metrics
    assert metrics.thinking_accepted_tokens >= 2 * (metrics.forwards["thinking"] - 3) > 20
    assert ["own", 2] in metrics.spans and set(Tree.asked) == {1}
    with torch.no_grad():
        whole = model(plain.sequences, output_hidden_states=True).hidden_states[1][0]
    shown = torch.stack(Tree.seen)
    begin = plain.ids.shape[1]
    assert len(shown) >= len(whole) - begin - 1
    assert torch.allclose(shown[: len(whole) - begin - 1], whole[begin:-1], atol=1e-9)
