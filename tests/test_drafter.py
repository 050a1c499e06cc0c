"""What the suffix drafter proposes: along a draft, past a mismatch, and where the text's suffix occurred."""

import random

import pytest
import torch

from hf_ssr import SuffixDrafter


def drafter(
    draft=(), sources=("draft", "thought", "prompt", "answer"), num_draft_tokens=4, tail=(), min_match_length=2
):
    made = SuffixDrafter(sources, min_match_length, num_draft_tokens, max_length=1000, tail=tail)
    made.add_draft(list(draft))
    return made


def write(made, *tokens):
    for token in tokens:
        made.observe(token)
    return made


def test_follows_a_draft_from_its_first_token():
    made = drafter(range(10, 20))
    draft = made.propose(100)
    assert (draft.ids, draft.source, draft.is_prefix) == (list(range(10, 20)), "draft", True)
    assert made.propose(3).ids == [10, 11, 12]
    assert made.propose(0).ids == []
    assert write(made, 10, 11, 12).propose(2).ids == [13, 14]


def test_after_a_substitution():
    draft = write(drafter(range(10, 20)), 10, 11, 99).propose(4)
    assert (draft.ids, draft.is_prefix) == ([13, 14, 15, 16], False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ((10, 11, 99, 12), [13, 14, 15, 16]),  # one token inserted
        ((10, 11, 99, 98, 97, 12), [13, 14, 15, 16]),  # three inserted
        ((10, 11, 13, 14), [15, 16, 17, 18]),  # one deleted
        ((10, 14, 15), [16, 17, 18, 19]),  # three deleted
        ((10, 99, 98, 13), [14, 15, 16, 17]),  # two substituted
    ],
)
def test_after_an_insertion_or_a_deletion(text, expected):
    assert write(drafter(range(10, 20)), *text).propose(4).ids == expected


def test_the_nearer_of_equal_places():
    made = drafter([1, 2, 3, 7, 8, 4, 5, 6, 7, 8, 9])
    assert write(made, 1, 2, 3, 7, 8, 4, 5, 90, 91, 7, 8).propose(4).ids == [9]
    assert write(drafter([1, 2, 3, 7, 8, 4, 5, 6, 7, 8, 9]), 1, 90, 91, 7, 8).propose(4).ids == [4, 5, 6, 7]


@pytest.mark.parametrize("draft", [[5, 6, 10, 11, 12], [10, 11, 12]])
@pytest.mark.parametrize("text", [[5, 6, 10], [10]])
def test_a_tail_that_only_one_of_them_has(draft, text):
    """The draft may have the `\\n\\n` behind the close or lack it, and so may the text."""
    made = drafter(draft, tail=(5, 6))
    write(made, *text)
    assert made.propose(4).ids == [11, 12]


def test_suffix_match_over_all_sources():
    made = drafter()
    made.add("prompt", [1, 2, 3, 4, 5])
    made.add("thought", [9, 2, 3, 7, 8])
    assert write(made, 2).propose(4).ids == []  # a match of one is too short
    draft = write(made, 3).propose(4)
    assert (draft.ids, draft.source) == ([4, 5], "prompt")  # equally long: the earlier source
    made = drafter()
    made.add("prompt", [1, 2, 3, 4, 5])
    made.add("thought", [9, 2, 3, 7, 8])
    draft = write(made, 9, 2, 3).propose(4)
    assert (draft.ids, draft.source) == ([7, 8], "thought")  # longer
    draft = write(drafter(), 1, 2, 3, 1, 2).propose(4)
    assert (draft.ids, draft.source) == ([3, 1, 2], "answer")


def test_the_latest_draft_first():
    made = drafter([1, 2, 3, 4])
    made.add_draft([1, 2, 5, 6])
    assert made.propose(4).ids == [1, 2, 5, 6]
    made = drafter([7, 1, 2, 3, 4])
    made.add_draft([8, 1, 2, 5, 6])
    assert write(made, 90, 91, 92, 1, 2).propose(2).ids == [5, 6]


def test_only_the_sources_asked_for():
    made = drafter([1, 2, 3], sources=("answer",))
    made.add("prompt", [1, 2, 3])
    assert write(made, 1, 2).propose(4).ids == []
    assert write(drafter(sources=()), 1, 2, 1, 2).propose(4).ids == []


def test_drafts_that_never_fit_are_left_alone():
    """What is kept of each kind is counted: the governor makes drafts that never fit ever shorter."""
    rng = random.Random(0)
    made = drafter(num_draft_tokens=16)
    made.add("prompt", [rng.randrange(4) for _ in range(3000)])
    drafted = [0, 0]
    for n in range(600):
        draft = made.propose(16)
        fed = [i for i in range(len(draft.ids)) if draft.chance ** (i + 1) > 0.5]
        drafted[n >= 300] += len(fed)
        token = rng.randrange(4)
        made.record.note(draft, int(draft.ids[:1] == [token]))
        made.observe(token)
    assert drafted[1] < 300 / 10


def test_contract_of_a_candidate_generator():
    made = drafter(range(10, 30))
    made.add("prompt", [5, 6])
    made.length = 2
    ids, probabilities = made.get_candidates(torch.tensor([[5, 6]]))
    assert ids.tolist() == [[5, 6, 10, 11, 12, 13]] and probabilities is None
    ids, _ = made.get_candidates(torch.tensor([[5, 6, 10, 11, 99]]))
    assert ids.tolist() == [[5, 6, 10, 11, 99, 13, 14, 15, 16]]
    made.max_length = 8
    ids, _ = made.get_candidates(torch.tensor([[5, 6, 10, 11, 99, 13]]))
    assert ids.tolist() == [[5, 6, 10, 11, 99, 13, 14]]


def test_probabilities_go_with_tokens_that_nothing_has_looked_at():
    """Up to the first difference; past it a token counts as not drawn, also where the draft is followed on."""
    made = SuffixDrafter(["draft"], 2, 2, 100)
    made.add_draft([1, 2, 3, 4, 5, 6, 7, 8], list("abcdefgh"))
    draft = made.propose(2)
    assert (draft.ids, draft.then, draft.probs) == ([1, 2], 3, ["a", "b", "c"])
    for token in (1, 2, 3):
        made.observe(token)
    assert made.propose(2).probs == ["d", "e", "f"]
    made.observe(9)
    draft = made.propose(2)
    assert (draft.ids, draft.then, draft.probs) == ([5, 6], None, [])
    made.observe(5)
    assert made.propose(2).probs == []


def test_probabilities_end_with_the_draft():
    made = SuffixDrafter(["draft"], 2, 4, 100)
    made.add_draft([1, 2, 3], list("abc"))
    draft = made.propose(3)
    assert (draft.ids, draft.then, draft.probs) == ([1, 2, 3], None, ["a", "b", "c"])


def test_probabilities_behind_a_tail_that_the_text_lacks():
    """The token that shows it has been looked at."""
    made = SuffixDrafter(["draft"], 2, 4, 100, tail=[50])
    made.add_draft([50, 1, 2, 3], [None, "a", "b", "c"])
    made.observe(1)
    assert (made.propose(2).ids, made.propose(2).probs) == ([2, 3], [])
