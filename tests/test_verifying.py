"""The rules keep the target's law: enumerated for a toy, measured over the whole path; biased mutants are noticed."""

import collections
import itertools
import math
import os
from functools import lru_cache

import pytest
import torch
from conftest import build_once, chi_square_limit, plain_run, run
from tiny_models import build, prompt_ids

from hf_ssr import SSRConfig, ThinkingBudgetLogitsProcessor, following
from hf_ssr.choosing import DraftSampling
from hf_ssr.verifying import DraftProbs, accepts, block_acceptance, gumbel_choice, residual

TOKENS, LENGTH = 3, 2  # of the toy: its vocabulary, and how long its drafts are
UNIFORMS = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000


def toy(seed: int, sharpness: float = 1.0):
    """A distribution behind each prefix, drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    prefixes = [p for n in range(LENGTH + 1) for p in itertools.product(range(TOKENS), repeat=n)]
    logits = torch.randn(len(prefixes), TOKENS, generator=generator, dtype=torch.float64) * sharpness
    return dict(zip(prefixes, logits.softmax(-1), strict=True))


def sparse(probs: torch.Tensor) -> DraftProbs:
    support = probs.nonzero()[:, 0]
    return DraftProbs(support.int(), probs[support])


def continued(target, prefix, chance, law) -> None:
    """Adds the chance of a prefix to every whole text that the target makes of it."""
    if len(prefix) > LENGTH:
        law[prefix] += chance
        return
    for token in range(TOKENS):
        continued(target, (*prefix, token), chance * float(target[prefix][token]), law)


def drafts_of(drafter):
    for draft in itertools.product(range(TOKENS), repeat=LENGTH):
        chance = math.prod(float(drafter[draft[:i]][token]) for i, token in enumerate(draft))
        if chance:
            yield draft, chance, [sparse(drafter[draft[:i]]) for i in range(LENGTH)]


def law_of_token_rule(target, drafter, accepts=accepts, residual=residual):
    law = collections.Counter()
    for draft, chance, qs in drafts_of(drafter):
        for kept, (token, q) in enumerate(zip(draft, qs, strict=True)):
            probs = target[draft[:kept]]
            share = sum(accepts(probs, token, q, u) for u in UNIFORMS) / len(UNIFORMS)
            for other, p in enumerate(residual(probs, q).tolist()):
                continued(target, (*draft[:kept], other), chance * (1 - share) * p, law)
            chance *= share
        continued(target, draft, chance, law)
    return law


def law_of_block_rule(target, drafter, residual=residual, weighted=True, first_failure=False):
    law = collections.Counter()
    for draft, chance, qs in drafts_of(drafter):
        probs = torch.stack([target[draft[:i]] for i in range(LENGTH + 1)])
        passing, weight = block_acceptance(probs, draft, qs)
        for kept in range(LENGTH + 1):
            if first_failure:
                share = float(passing[: kept + 1].prod() * (1 - passing[kept + 1] if kept < LENGTH else 1))
            else:
                share = float(passing[kept] * (1 - passing[kept + 1 :]).prod())
            if kept == LENGTH:
                continued(target, draft, chance * share, law)
                continue
            rest = residual(weight[kept] * probs[kept] if weighted else probs[kept], qs[kept])
            for other, p in enumerate(rest.tolist()):
                continued(target, (*draft[:kept], other), chance * share * p, law)
    return law


def distance(target, law) -> float:
    """Total variation to the target's own law of whole texts."""
    expected = collections.Counter()
    continued(target, (), 1.0, expected)
    assert sum(expected.values()) == pytest.approx(1) and sum(law.values()) == pytest.approx(1)
    return sum(abs(expected[text] - law[text]) for text in {*expected, *law}) / 2


def one_hot(drafter):
    return {prefix: torch.nn.functional.one_hot(p.argmax(), TOKENS).double() for prefix, p in drafter.items()}


def without_the_last(drafter):
    """Some tokens cannot be drafted, as under a top-k."""
    cut = {prefix: p * torch.tensor([1.0, 1.0, 0.0], dtype=p.dtype) for prefix, p in drafter.items()}
    return {prefix: p / p.sum() for prefix, p in cut.items()}


DRAFTERS = {"drawn": lambda d: d, "one-hot": one_hot, "cut": without_the_last}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("seed", range(3))
def test_the_law_of_a_toy(seed, kind):
    target, drafter = toy(seed), DRAFTERS[kind](toy(seed + 100))
    assert max(float((target[p] - drafter[p]).abs().sum()) for p in target) > 0.4  # or the test would mean little
    assert distance(target, law_of_token_rule(target, drafter)) < 1e-3  # of the grid of uniforms
    assert distance(target, law_of_block_rule(target, drafter)) < 1e-12
    same = {prefix: p.clone() for prefix, p in target.items()}
    assert distance(target, law_of_token_rule(target, same)) < 1e-3
    assert distance(target, law_of_block_rule(target, same)) < 1e-12


def test_a_biased_rule_is_noticed():
    target, drafter = toy(0), toy(100)
    biased = {
        "the residual is p": law_of_token_rule(target, drafter, residual=lambda p, q: p),
        "accepted with p": law_of_token_rule(target, drafter, accepts=lambda p, x, q, u: bool(u < p[x])),
        "always accepted": law_of_token_rule(target, drafter, accepts=lambda p, x, q, u: True),
        "block: the residual is p": law_of_block_rule(target, drafter, residual=lambda p, q: p / p.sum()),
        "block: the weight is forgotten": law_of_block_rule(target, drafter, weighted=False),
        "block: up to the first failure": law_of_block_rule(target, drafter, first_failure=True),
    }
    for name, law in biased.items():
        assert distance(target, law) > (0.003 if name.startswith("block") else 0.01), name  # right: 1e-12, 1e-3


def test_the_block_rule_keeps_more():
    for seed in range(5):
        target, drafter = toy(seed), toy(seed + 100)
        kept = {"token": 0.0, "block": 0.0}
        for draft, chance, qs in drafts_of(drafter):
            probs = torch.stack([target[draft[:i]] for i in range(LENGTH + 1)])
            passing, _ = block_acceptance(probs, draft, qs)
            kept["block"] += chance * sum(
                n * float(passing[n] * (1 - passing[n + 1 :]).prod()) for n in range(LENGTH + 1)
            )
            share = 1.0
            for i, (token, q) in enumerate(zip(draft, qs, strict=True)):
                share *= min(1.0, float(probs[i, token] / q.of(token)))
                kept["token"] += chance * share
        assert kept["block"] > kept["token"]


def test_equal_distributions_are_always_accepted():
    """Up to rounding the residual is empty; then the target's own distribution takes its place."""
    probs = torch.tensor([0.2, 0.3, 0.5])
    assert torch.allclose(residual(probs, sparse(probs)), probs)
    assert all(accepts(probs, token, sparse(probs), torch.tensor(0.999999)) for token in range(3))
    passing, _ = block_acceptance(torch.stack([probs] * 3), [0, 1], [sparse(probs)] * 2)
    assert torch.allclose(passing, torch.ones(3))


def test_gumbel_noise_draws_from_the_distribution():
    scores = torch.tensor([[0.0, 1.0, -torch.inf, 2.0]])
    drawn = collections.Counter(gumbel_choice(scores, seed, (1, 5)) for seed in range(0, 4000 * 7919, 7919))
    expected = (scores.softmax(-1)[0] * 4000).tolist()
    assert drawn[2] == 0
    statistic = sum((drawn[token] - expected[token]) ** 2 / expected[token] for token in (0, 1, 3))
    assert statistic < chi_square_limit(2)
    assert len({gumbel_choice(torch.zeros(1, 1000), 3, (part, i)) for part in (0, 1) for i in range(50)}) > 90


# the whole path: think, fork, draft, verify


SAMPLES = int(os.environ.get("HF_SSR_SAMPLES", "2000"))
BUDGET, ANSWER_TOKENS = 8, 3
SAMPLING = {
    "top_k": {"temperature": 0.06, "top_k": 3},
    "mixed": {
        "temperature": 0.7,
        "top_k": 6,
        "top_p": 0.95,
        "typical_p": 0.99,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "bad_words_ids": [[7]],
    },
}
MARKERS = {"thinking_start": [], "thinking_end": [159], "forced_close": [158, 159, 157], "thinking_budget": BUDGET}


@lru_cache
def sharper():
    """
    A tiny model without attention: what it answers depends on the forced close alone, not on a thought that differs
    from sample to sample, so that a bias stands out.
    """
    model = build("qwen3", dtype=torch.float32)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    return model


def answers(model, samples: int, config=None, seed: int = 5, **settings) -> list[tuple[int, ...]]:
    """The answers of many samples in one batch, with SSR if there is a config."""
    ids = prompt_ids(8)
    settings |= {"do_sample": True, "num_return_sequences": samples, "max_new_tokens": BUDGET + 3 + ANSWER_TOKENS}
    processors = []
    if config is None:
        processors = [ThinkingBudgetLogitsProcessor(SSRConfig(**MARKERS), prompt_length=8)]
        output = run(model, ids, settings, seed, logits_processor=processors)
    else:
        config.update(**settings)
        output = run(model, ids, {}, seed, generation_config=config)
    return [tuple(row[-ANSWER_TOKENS:]) for row in output.tolist()]


def chi_square(ours, theirs) -> tuple[float, float]:
    """Of two samples: the statistic, and what it exceeds once in a million if both follow one law."""
    ours, theirs = collections.Counter(ours), collections.Counter(theirs)
    a, b = ours.total(), theirs.total()
    pooled = collections.Counter()
    for text in {*ours, *theirs}:
        is_rare = (ours[text] + theirs[text]) * min(a, b) / (a + b) < 5
        pooled["rare" if is_rare else text, "ours"] += ours[text]
        pooled["rare" if is_rare else text, "theirs"] += theirs[text]
    cells = {text for text, _ in pooled}
    statistic = 0.0
    for text in cells:
        for side, share in (("ours", a / (a + b)), ("theirs", b / (a + b))):
            expected = (pooled[text, "ours"] + pooled[text, "theirs"]) * share
            statistic += (pooled[text, side] - expected) ** 2 / expected
    degrees = len(cells) - 1
    assert degrees >= 5
    return statistic, chi_square_limit(degrees)


CASES = {
    "exact": {},
    "exact, sampled draft": {"draft_temperature": 1.0},
    "speculative": {"verify": "speculative"},
    "speculative, warm draft": {"verify": "speculative", "draft_temperature": 2.0},
    "speculative, greedy draft": {"verify": "speculative", "draft_temperature": 0.0},
    "block": {"verify": "block"},
    "block, warm draft": {"verify": "block", "draft_temperature": 2.0},
    "block, short blocks": {"verify": "block", "draft_temperature": 1.5, "num_draft_tokens": 1},
    "coupled": {"verify": "coupled"},
}


@lru_cache
def plain_answers(sampling: str, samples: int = SAMPLES) -> list[tuple[int, ...]]:
    return answers(sharper(), samples, seed=6, **SAMPLING[sampling])


QUICK = [("top_k", "speculative, warm draft"), ("mixed", "block, warm draft")]


@pytest.mark.parametrize(
    ("sampling", "case"),
    [
        pytest.param(sampling, case, marks=[] if (sampling, case) in QUICK else pytest.mark.slow)
        for sampling in SAMPLING
        for case in CASES
    ],
)
def test_the_law_of_the_whole_path(sampling, case):
    config = SSRConfig(**MARKERS, draft_budgets=[1], **CASES[case])
    statistic, limit = chi_square(answers(sharper(), SAMPLES, config, **SAMPLING[sampling]), plain_answers(sampling))
    assert statistic < limit


@pytest.mark.slow
def test_biased_paths_are_noticed(monkeypatch):
    """The same test over mutants of the rules, with samples enough for any seed."""

    def is_noticed(**case) -> bool:
        config = SSRConfig(**MARKERS, draft_budgets=[1], **case)
        ours = answers(sharper(), 2 * SAMPLES, config, **SAMPLING["top_k"])
        statistic, limit = chi_square(ours, plain_answers("top_k", 2 * SAMPLES))
        return statistic > limit

    pick = DraftSampling.pick

    def of_another_temperature(self, scores, index):
        token, _ = pick(self, scores, index)
        return token, sparse((scores / 4)[0].softmax(-1))

    mutants = [
        ({"verify": "speculative", "draft_temperature": 5.0}, following, "residual", lambda p, q: p),
        (
            {"verify": "speculative", "draft_temperature": 2.0},
            following,
            "accepts",
            lambda p, x, q, u: bool(u < p[x]),
        ),
        ({"verify": "speculative", "draft_temperature": 5.0}, following, "accepts", lambda p, x, q, u: True),
        ({"verify": "block", "draft_temperature": 5.0}, following, "residual", lambda p, q: p / p.sum()),
        ({"verify": "speculative"}, DraftSampling, "pick", of_another_temperature),
        ({"verify": "block"}, DraftSampling, "pick", of_another_temperature),
    ]
    for case, owner, name, mutant in mutants:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, mutant)
            assert is_noticed(**case), (case, name)


def test_a_fixed_draft_is_no_sample(monkeypatch):
    """Drafts differ from run to run: with one and the same draft each time, p/q acceptance would be biased."""
    pick, drafts = DraftSampling.pick, collections.defaultdict(list)

    def recorded(self, scores, index):
        token, probs = pick(self, scores, index)
        drafts[seed].append(token)
        return token, probs

    monkeypatch.setattr(DraftSampling, "pick", recorded)
    settings = {"do_sample": True, "draft_temperature": 2.0, "max_new_tokens": 20}
    for rule, fewest, most in (("speculative", 6, 8), ("block", 6, 8), ("exact", 1, 1)):
        drafts.clear()
        for seed in range(8):
            config = SSRConfig(**MARKERS, draft_budgets=[0], verify=rule, **settings)
            run(sharper(), prompt_ids(8), {}, seed, generation_config=config)
        assert fewest <= len({tuple(draft[:3]) for draft in drafts.values()}) <= most


def test_memory_of_the_probabilities_is_reported():
    settings = {"do_sample": True, "top_k": 5, "max_new_tokens": 20, "return_dict_in_generate": True}
    for rule, size in (("exact", 0), ("block", 8 * 5)):
        config = SSRConfig(**MARKERS, draft_budgets=[1], verify=rule, **settings)
        config.thinking_end = [[159]]
        metrics = run(sharper(), prompt_ids(8), {}, generation_config=config).metrics
        assert metrics.draft_probs_bytes == size * metrics.draft_tokens


@pytest.mark.parametrize("rule", ["speculative", "block", "coupled"])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen3_5", "lfm2"])
def test_cold_sampling_is_greedy(architecture, rule, tokenizer):
    """Every way to end a text in the middle of a block, where all rules have but one choice."""
    model = build_once(architecture)
    plain = plain_run(model, {"max_new_tokens": 60, "do_sample": False})
    cold = {"do_sample": True, "temperature": 1e-4, "verify": rule, "num_draft_tokens": 5}
    markers = {"thinking_start": [], "thinking_end": [plain.marker], "forced_close": [plain.marker]}
    for end in range(plain.close + 2, 60, 6):
        stop = tokenizer.decode(plain.new[end - 1 : end + 1])
        for cut in ({"max_new_tokens": end}, {"eos_token_id": plain.new[end]}, {"stop_strings": [stop]}):
            call = {"eos_token_id": cut.get("eos_token_id")}
            if "stop_strings" in cut:
                call["tokenizer"] = tokenizer
            expected = run(model, plain.ids, {**plain.settings, **cut, **call})
            settings = {k: v for k, v in {**plain.settings, **cold, **cut}.items() if k != "eos_token_id"}
            config = SSRConfig(**markers, draft_budgets=[plain.close - 3], **settings)
            assert torch.equal(run(model, plain.ids, call, generation_config=config), expected)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen3_5"])
def test_coupled_depends_on_the_seed_alone(architecture):
    model = build_once(architecture)
    ids = prompt_ids()
    sampling = {"do_sample": True, "temperature": 0.9, "top_k": 30, "max_new_tokens": 60, "verify": "coupled"}
    markers = {"thinking_start": [], "thinking_end": [159], "thinking_budget": 14, "forced_close": [5, 159, 6]}

    def text(seed: int, **settings):
        return run(model, ids, {}, seed, generation_config=SSRConfig(**markers, **sampling, **settings))

    expected = text(1, sources=[], draft_budgets=[])
    assert not torch.equal(text(2, sources=[], draft_budgets=[]), expected)
    for settings in (
        {"draft_budgets": [2]},
        {"draft_budgets": [3, 9], "num_draft_tokens": 3},
        {"draft_interval": 5, "draft_temperature": 0.0},
        {"draft_budgets": [4], "draft_temperature": 2.0, "draft_seed": 5},
        {"prediction_ids": expected[0, 40:].tolist()},
        {"max_draft_length": 2, "min_match_length": 1},
    ):
        assert torch.equal(text(1, **settings), expected), settings
    if architecture != "qwen3_5":
        rows = {"inputs": ids.repeat(3, 1), "attention_mask": torch.ones(3, ids.shape[1], dtype=torch.long)}
        torch.manual_seed(1)
        config = SSRConfig(**markers, **sampling, draft_budgets=[3])
        batch = model.generate(**rows, generation_config=config, pad_token_id=0, eos_token_id=None)
        assert torch.equal(batch[:1], expected)  # the first row has the first seed
        assert len({tuple(row) for row in batch.tolist()}) == 3


def test_coupled_drafts_agree_where_the_distributions_do():
    """What this model answers does not depend on the thought, so a child with the parent's noise writes the answer."""
    for seed in range(4):
        config = SSRConfig(**MARKERS, draft_budgets=[0], verify="coupled", do_sample=True, temperature=1.5)
        config.update(max_new_tokens=BUDGET + 9, return_dict_in_generate=True)
        metrics = run(sharper(), prompt_ids(8), {}, seed, generation_config=config).metrics
        assert metrics.stages[0].draft_tokens >= 5 and metrics.recovered_tokens == 0
        assert metrics.prefix_accepted >= 5


@pytest.mark.parametrize("rule", ["exact", "speculative", "block", "coupled"])
def test_a_forced_close_of_several_tokens(rule):
    """The rest of the close is forced inside a block too, and no rule loses count of the text."""
    close = [158, 159, 157, 156, 155]
    for seed in range(4):
        markers = {**MARKERS, "forced_close": close}
        config = SSRConfig(**markers, draft_budgets=[0], verify=rule, do_sample=True, draft_temperature=2.0)
        config.update(max_new_tokens=40, return_dict_in_generate=True)
        output = run(sharper(), prompt_ids(8), {}, seed, generation_config=config)
        new = output.sequences[0, 8:].tolist()
        if 159 not in new[:BUDGET]:
            assert new[BUDGET : BUDGET + len(close)] == close
            assert output.metrics.stages[0].draft_tokens > 0 and output.metrics.thinking_tokens == BUDGET + 2


def test_the_scores_of_emitted_tokens(model):
    """One for each token, in order: from them each token has a probability above 0."""
    plain = plain_run(model, {"max_new_tokens": 40, "do_sample": False})
    for rule in ("speculative", "block", "coupled"):
        config = SSRConfig(
            thinking_start=[],
            thinking_end=[plain.marker],
            thinking_budget=12,
            draft_budgets=[2],
            verify=rule,
            do_sample=True,
            top_k=4,
            max_new_tokens=40,
            output_scores=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        output = run(model, plain.ids, {}, generation_config=config)
        new = output.sequences[0, plain.ids.shape[1] :].tolist()
        assert len(output.scores) == len(output.logits) == len(new)
        with torch.no_grad():
            logits = model(output.sequences).logits[0, plain.ids.shape[1] - 1 : -1].float()
        for place, token in enumerate(new):
            assert output.scores[place][0, token] > -torch.inf
            torch.testing.assert_close(output.logits[place][0], logits[place], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_probabilities_that_take_too_much_memory(monkeypatch):
    """Beyond the bound tokens are verified as if they had not been drawn; the law stays."""
    monkeypatch.setattr("hf_ssr.choosing.MOST_PROBS_BYTES", 24)  # one token of three
    config = SSRConfig(**MARKERS, draft_budgets=[1], verify="speculative", draft_temperature=2.0)
    ours = answers(sharper(), SAMPLES, config, **SAMPLING["top_k"])
    statistic, limit = chi_square(ours, plain_answers("top_k"))
    assert statistic < limit
