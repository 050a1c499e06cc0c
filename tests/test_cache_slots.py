"""
A cache of slots: rows go on by differently many tokens, children and trees are branches, and the tokens are those of
plain `generate`, as are the keys and values that are left.
"""

import random

import pytest
import torch
from conftest import build_once
from tiny_models import ARCHITECTURES, VOCAB_SIZE
from transformers import DynamicCache

from hf_ssr import SSRConfig
from hf_ssr.drafting import Draft
from hf_ssr.metrics import SSRMetrics
from hf_ssr.rows import Row
from hf_ssr.target import Target
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
        logits = target.forward("thinking", {})
        for row in self.texts:
            row.append(int(logits[row][0, -1].argmax()))
        target.keep(target.rows)
        while running := [row for row in self.texts if row.room > 0]:
            children = [self.children[row] for row in running if row in self.children]
            if target.rows != [*running, *children]:
                target.keep([*running, *children])
            if self.does["children"]:
                self.fork(running)
            drafts = {row: self.draft_of(row) for row in target.rows}
            drafts = {row: draft for row, draft in drafts.items() if draft.ids or chance.random() < 0.5}
            logits = target.forward("drafting", drafts)
            for row in target.rows:
                draft = drafts.get(row, Draft())
                if row in self.texts:
                    self.follow(row, draft, logits[row], lambda scores, _: int(scores.argmax()))
                else:
                    self.follow(row, draft, logits[row], self.pick_any(draft))
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
    for seed in range(2):
        target = target_of(model, ids, mask)
        assert type(target._layout) is RowsInSlots and target.takes_uneven_blocks and target.takes_trees
        writer = Writer(model, target, truth, seed, trees=trees)
        writer.write()
        assert [row.ids[0].tolist() for row in writer.texts] == truth
        assert any(len(set(lengths[:3])) > 1 for lengths in writer.lengths)  # they did part
