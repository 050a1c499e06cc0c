"""`hf-ssr bench --replay`: without a model it counts what SSR counts with it."""

import json
import random

import pytest
import torch
from conftest import plain_run
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import hf_ssr.decoding
import hf_ssr.scheduling
from hf_ssr import SSRConfig, split_thinking
from hf_ssr.bench.replay import recorded, replay
from hf_ssr.bench.rewriting import POLICIES, Recording, rewrite
from hf_ssr.bench.tasks import HELD_OUT, TASKS, draw
from hf_ssr.command.cli import main
from hf_ssr.costs import GuessedCosts
from hf_ssr.running.comparing import prompt_ids
from hf_ssr.running.reasoner import load_reasoner, reasoner_folder

ALL = ("thought", "prompt", "answer")


@pytest.fixture(scope="module")
def reasoner():
    return load_reasoner()


def generate(reasoner, prompt: str, **settings):
    model, tokenizer = reasoner
    ids = prompt_ids(tokenizer, prompt)
    common = {"max_new_tokens": 1500, "do_sample": False, "return_dict_in_generate": True}
    config = SSRConfig.from_tokenizer(tokenizer, **common, **settings)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    parts = split_thinking(output.sequences, config, ids.shape[1])
    texts = [tokenizer.decode(part, skip_special_tokens=True) for part in parts]
    return output, {"prompt": prompt, "thought": texts[0], "answer": texts[1]}


def written(path, *entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def counted(metrics) -> dict:
    """Tokens, forwards, drafted and accepted of thought and answer; the prompt's forward is the thought's."""
    thought = metrics.forwards["thinking"] + metrics.forwards["prefill"]
    return {
        "thought": (
            metrics.thinking_tokens,
            thought,
            metrics.thinking_drafted_tokens,
            metrics.thinking_accepted_tokens,
        ),
        "answer": (metrics.answer_tokens, metrics.answer_forwards, metrics.drafted_tokens, metrics.accepted_tokens),
    }


def shown(parts) -> dict:
    return {part: (c.tokens, c.forwards, c.drafted, c.accepted) for part, c in parts.items()}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("policy", ["off", "governed"])
def test_the_counts_are_those_of_ssr(task, policy, reasoner, tmp_path, monkeypatch):
    """Every forward, every draft token, of every set of sources."""
    monkeypatch.setattr(hf_ssr.scheduling, "costs_of", lambda model: GuessedCosts(model.device))
    overhead = {"max_overhead": "off"} if policy == "off" else {}
    prompt = draw(task, HELD_OUT + 5).prompt
    for sources in (ALL, ("prompt",), ("thought",), ("answer",)):
        output, entry = generate(reasoner, prompt, sources=list(sources), **overhead)
        (recording,) = recorded(written(tmp_path / "texts.jsonl", entry), reasoner[1])
        assert recording.prompt + recording.new == output.sequences[0].tolist()
        found = rewrite(recording, sources, policy, 16)
        assert shown(found) == counted(output.metrics), sources
        assert sum(counts.forwards for counts in found.values()) == output.metrics.target_forwards
        assert sum(counts.forwards for counts in found.values()) <= len(recording.new)
    plain = reasoner[0].generate(prompt_ids(reasoner[1], prompt), max_new_tokens=1500, do_sample=False)
    assert torch.equal(plain, output.sequences)


@pytest.mark.parametrize("task", TASKS)
def test_the_draft_counts_as_in_ssr(task, reasoner, tmp_path, monkeypatch):
    """One draft, of a fork at 40 tokens. As text it lacks its end of text, which may cost a forward."""
    collect, texts = hf_ssr.decoding.collect, []
    monkeypatch.setattr(
        hf_ssr.decoding, "collect", lambda target, states: texts.extend(states) or collect(target, states)
    )
    settings = {"sources": ["draft"], "draft_budgets": [40], "max_overhead": "off"}
    output, entry = generate(reasoner, draw(task, HELD_OUT + 5).prompt, **settings)
    ((draft, *_),) = texts[0].sources.drafts
    tail = texts[0].thinking.tail
    text = reasoner[1].decode(draft.tokens[len(tail) :], skip_special_tokens=True)
    (recording,) = recorded(written(tmp_path / "texts.jsonl", {**entry, "drafts": [text]}), reasoner[1])
    ended = draft.tokens[-1] == reasoner[1].eos_token_id
    assert recording.drafts == [draft.tokens[: len(draft.tokens) - ended]]
    found = rewrite(recording, ("draft",), "off", 16)["answer"]
    assert found.tokens == output.metrics.answer_tokens and found.accepted > 0
    assert 0 <= found.forwards - output.metrics.answer_forwards <= ended
    recording.drafts[0] += [reasoner[1].eos_token_id] * ended
    assert shown(rewrite(recording, ("draft",), "off", 16))["answer"] == counted(output.metrics)["answer"]


def test_a_thought_that_opens_on_the_way(model):
    """A model that writes the opening marker itself: three parts, each with a drafter of its own."""
    plain = plain_run(model, {"max_new_tokens": 72, "do_sample": False, "repetition_penalty": 1.02})
    first_seen = [i for i, token in enumerate(plain.new) if token not in plain.new[:i]]
    opens = next(i for i in first_seen if i >= 4) + 1
    end = max(i for i in first_seen if i < 56)  # well before `max_length`, which cuts drafts too
    assert opens < plain.close < end - 8
    settings = {
        **plain.settings,
        "thinking_start": [plain.new[opens - 1]],
        "thinking_end": [plain.marker],
        "sources": list(ALL),
        "max_overhead": "off",
        "eos_token_id": plain.new[end],
        "pad_token_id": 0,
    }
    config = SSRConfig(**settings, return_dict_in_generate=True)
    output = model.generate(plain.ids, attention_mask=torch.ones_like(plain.ids), generation_config=config)
    new = plain.new[: end + 1]
    assert output.sequences[0, plain.ids.shape[1] :].tolist() == new
    recording = Recording("t", "0", plain.ids[0].tolist(), new, opens, plain.close + 1)
    found = rewrite(recording, ALL, "off", 16)
    metrics = output.metrics
    assert found["thought"].tokens == metrics.thinking_tokens == plain.close + 1 - opens
    assert found["thought"].forwards == metrics.forwards["thinking"]
    assert found["answer"].forwards == metrics.answer_forwards + metrics.forwards["prefill"]
    assert (found["answer"].drafted, found["answer"].accepted) == (metrics.drafted_tokens, metrics.accepted_tokens)
    assert found["answer"].accepted and found["thought"].drafted == metrics.thinking_drafted_tokens > 0


def test_perfect_length_wastes_nothing(reasoner, tmp_path):
    entries = [generate(reasoner, draw(task, HELD_OUT + 6).prompt)[1] for task in TASKS]
    for recording in recorded(written(tmp_path / "texts.jsonl", *entries), reasoner[1]):
        real, perfect = (rewrite(recording, ALL, policy, 16) for policy in ("off", "perfect length"))
        best = rewrite(recording, ALL, "perfect source", 16)
        for part in ("thought", "answer"):
            assert perfect[part].forwards == real[part].forwards
            assert perfect[part].drafted == perfect[part].accepted == real[part].accepted < real[part].drafted
            assert perfect[part].cost < real[part].cost
            assert best[part].drafted == best[part].accepted and best[part].forwards <= real[part].forwards
            assert best[part].tokens == real[part].tokens


# the last token, 5, stood at two places: behind the first the text goes on as it does here
TWO_PLACES = Recording("t", "0", [9, 5, 1, 2, 3, 4, 8, 5, 6, 7], [5, 1, 2, 3, 4, 0])


@pytest.mark.parametrize(("most", "forwards", "accepted"), [(16, 2, 4), (2, 3, 3), (1, 4, 2)])
def test_perfect_source_by_hand(most, forwards, accepted):
    """Of four tokens; of two and one (and one that no place has, in the same step); of one and one."""
    found = rewrite(TWO_PLACES, ("prompt",), "perfect source", most)["answer"]
    assert (found.tokens, found.forwards, found.accepted, found.drafted) == (6, forwards, accepted, accepted)


def test_a_step_ends_with_the_thought():
    """The prompt holds the close and what follows it here, but a step that goes beyond the close is cut there."""
    recording = Recording("t", "0", [5, 99, 6, 7], [1, 5, 99, 6, 7], 0, 3)
    # 99 is kept, and nothing beyond it; the answer's drafter has not seen the close, so that it drafts from 6 on
    assert shown(rewrite(recording, ("prompt",), "off", 16)) == {"thought": (3, 3, 3, 1), "answer": (2, 2, 1, 1)}
    # to the end of the prompt
    best = shown(rewrite(recording, ("prompt",), "perfect source", 16))
    assert best == {"thought": (3, 3, 1, 1), "answer": (2, 1, 2, 2)}


def test_perfect_source_knows_each_source():
    """Two tokens of the answer stand in one source each, behind the token before them; not in the future."""
    recording = Recording(
        "t", "0", [1, 50], [20, 21, 22, 3, 30, 10, 11, 20, 40, 30, 31], 0, 4, (), [[30, 31], [20, 40]]
    )
    draft = rewrite(recording, ("draft", *ALL), "perfect source", 16)["answer"]
    without = rewrite(recording, ALL, "perfect source", 16)["answer"]
    assert without.accepted == 0 and without.forwards == 7
    assert draft.accepted == 3  # 30 as the draft's first token, then 40, then 31
    repeated = Recording("t", "0", [1, 50], [7, 8, 9, 7, 8, 9, 4])
    assert rewrite(repeated, ALL, "perfect source", 16)["answer"].accepted == 2
    assert rewrite(repeated, ("prompt",), "perfect source", 16)["answer"].accepted == 0


@pytest.mark.parametrize("seed", range(30))
def test_perfect_source_is_a_bound(seed):
    """Over texts of few tokens, with spans that come again, some with a token replaced."""
    rng = random.Random(seed)
    text = [rng.randrange(12) for _ in range(30)]
    while len(text) < 200:
        begin, span = rng.randrange(len(text)), rng.randrange(3, 25)
        text += [t if rng.random() < 0.9 else rng.randrange(12) for t in text[begin : begin + span]]
    draft = [t if rng.random() < 0.9 else rng.randrange(12) for t in text[100:]]
    recording = Recording("t", "0", text[:40], text[40:], rng.choice([0, 3]), 60, (), [draft])
    for most in (1, 4, 16):
        for sources in (ALL, ("draft", *ALL)):
            real, best = (rewrite(recording, sources, policy, most) for policy in ("off", "perfect source"))
            total = [sum(c.forwards for c in parts.values()) for parts in (best, real)]
            assert total[0] <= total[1] < len(recording.new)
            for parts in (best, real):
                assert sum(c.tokens for c in parts.values()) == len(recording.new)


def test_markers_and_white_space(reasoner, tmp_path):
    """What stands at the border is there once, however the text was cut."""
    texts = [("think", "answer"), ("think\n", "answer"), ("think", "\n\nanswer"), ("think\n", "\n\nanswer")]
    entries = [{"prompt": "go", "thought": thought, "answer": answer} for thought, answer in texts]
    found = recorded(written(tmp_path / "texts.jsonl", *entries), reasoner[1])
    assert len({tuple(recording.new) for recording in found}) == 1
    assert reasoner[1].decode(found[0].new) == "think\n</think>\n\nanswer<|im_end|>"
    assert reasoner[1].decode(found[0].new[: found[0].closes]) == "think\n</think>" and found[0].opens == 0
    assert reasoner[1].decode(found[0].tail) == "\n\n"


def test_a_model_that_opens_its_thought(tokenizer, tmp_path):
    """The marker is part of the text; without a thought there is none."""
    entries = [{"prompt": "go", "thought": "abc", "answer": "de"}, {"prompt": "go", "thought": "", "answer": "de"}]
    thinks, answers = recorded(written(tmp_path / "texts.jsonl", *entries), tokenizer)
    assert tokenizer.decode(thinks.new).startswith("<think>abc") and thinks.opens == 1
    assert tokenizer.decode(thinks.new[: thinks.closes]).endswith("</think>")
    assert tokenizer.decode(answers.new) == "de<eos>" and answers.opens is answers.closes is None
    assert shown(rewrite(answers, ALL, "off", 16))["thought"] == (0, 0, 0, 0)


def test_a_tokenizer_without_markers(tmp_path):
    vocabulary = {token: i for i, token in enumerate(["<eos>", *"abcdef "])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    entry = {"prompt": "ab", "thought": "abc", "answer": "abcdef"}
    (recording,) = recorded(written(tmp_path / "texts.jsonl", entry), tokenizer)
    assert (recording.opens, recording.closes, len(recording.new)) == (0, 3, 10)
    found = rewrite(recording, ALL, "off", 16)
    assert (found["thought"].tokens, found["answer"].tokens) == (3, 7)


def test_the_summary(reasoner, tmp_path, capsys):
    """All sources and policies; those with drafts of the texts that have some; totals are sums."""
    folder = reasoner_folder()
    texts = [
        {"prompt": draw("path", HELD_OUT + n).prompt, "thought": "a b c d", "answer": "a b c d e"} for n in range(3)
    ]
    texts[1] |= {"drafts": ["a b c d e", "f"], "task": "path", "name": "x"}
    texts[2] |= {"task": "path"}
    path = written(tmp_path / "mine.jsonl", *texts)
    assert main(["bench", "--replay", str(path), "--tokenizer", str(folder), "--json", "--num-draft-tokens", "4"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["num_draft_tokens"] == 4 and list(report["tasks"]) == ["mine", "path"]
    for part in ("thought", "answer"):
        mine, path_task = report["tasks"]["mine"][part], report["tasks"]["path"][part]
        assert list(mine) == ["prompt", "thought", "answer", "all"]
        assert list(path_task) == [*mine, "draft", "all, draft"]
        assert list(mine["all"]) == list(POLICIES) and list(mine["prompt"]) == ["off", "governed"]
        assert path_task["all"]["off"]["texts"] == 2 and path_task["draft"]["off"]["texts"] == 1
        for policies in path_task.values():
            for counts in policies.values():
                assert counts["accepted"] < counts["tokens"] <= counts["accepted"] + counts["forwards"]
                rate = counts["accepted"] / counts["drafted"] if counts["drafted"] else None
                assert counts["acceptance_rate"] == rate
                assert counts["tokens_per_forward"] == counts["tokens"] / counts["forwards"]
    assert report["tasks"]["path"]["answer"]["draft"]["off"]["accepted"] > 0
    assert "perfect source" in captured.err and "…" not in captured.err
    recordings = recorded(path, AutoTokenizer.from_pretrained(folder))
    both = replay(recordings[1:], 4)["path"]["answer"]["all"]["off"]
    alone = [rewrite(recording, ALL, "off", 4)["answer"] for recording in recordings[1:]]
    assert both.forwards == sum(counts.forwards for counts in alone)
    assert both.cost == pytest.approx(sum(counts.cost for counts in alone))
    assert main(["bench", "--replay", str(path), "--limit", "1", "--json"]) == 0
    limited = json.loads(capsys.readouterr().out)["tasks"]
    assert limited["path"]["answer"]["all"]["off"]["texts"] == 1


def test_cost_is_that_of_forwards_after_the_prompt():
    """One forward over a token, and one over 1 + 4: `GuessedCosts` of a CPU; the prompt's costs nothing here."""
    costs = GuessedCosts(torch.device("cpu"))
    found = rewrite(TWO_PLACES, ("prompt",), "perfect source", 16)["answer"]
    assert found.cost == pytest.approx(costs(1, 5))
    alone = rewrite(Recording("t", "0", [1, 2], [3, 4, 5]), ALL, "off", 16)["answer"]
    assert (alone.forwards, alone.cost) == (3, 2.0)


GOOD = {"prompt": "a", "thought": "b", "answer": "c"}


@pytest.mark.parametrize(
    ("line", "arguments", "message"),
    [
        ("", [], "is empty: give JSON lines"),
        ("{", [], "line 1 is not JSON"),
        ("[1]", [], "line 1 must be an object, but is a list"),
        (json.dumps({"prompt": "a", "answer": "c"}), [], "line 1 must have `thought`, a string, but has None"),
        (json.dumps({**GOOD, "answer": 3}), [], "`answer`, a string, but has 3"),
        (json.dumps({**GOOD, "task": 3}), [], "`task` must be a string"),
        (json.dumps({**GOOD, "drafts": "c"}), [], "`drafts` must be a list of strings"),
        (json.dumps({**GOOD, "thought": "", "answer": ""}), [], "both empty"),
        (json.dumps(GOOD) + "\n{", [], "line 2 is not JSON"),
        (json.dumps(GOOD), ["--limit", "0"], "--limit: must be an integer of at least 1, but is 0"),
        (
            json.dumps(GOOD),
            ["--num-draft-tokens", "0"],
            "--num-draft-tokens: must be an integer of at least 1",
        ),
        (json.dumps(GOOD), ["--tokenizer", "/nowhere/at/all"], "/nowhere/at/all"),
        (None, [], "there is no file"),
    ],
)
def test_refused(line, arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hf_ssr.bench.replay.rewrite", lambda *_: pytest.fail("work has begun"))
    path = tmp_path / "texts.jsonl"
    if line is not None:
        path.write_text(line)
    with pytest.raises(SystemExit) as error:
        main(["bench", "--replay", str(path), *arguments])
    assert error.value.code == 2 and message in " ".join(capsys.readouterr().err.split())
