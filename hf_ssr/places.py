"""The places of a step: what each row is given, and what each place is in its text."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .drafting import Draft


@dataclass
class Fed:
    """
    What a step gives a text.

    Args:
        begin (`int`): index of the first token. What is before it lies in its slots.
        pending (`int`): tokens of the text.
        draft ([`Draft`]): behind them.
    """

    begin: int
    pending: int
    draft: Draft

    @property
    def count(self) -> int:
        """Places."""
        return self.pending + len(self.draft.ids)


@dataclass
class Places:
    """
    The places of a step. A row has those of its text, then of its child if it has one, then filler.

    Args:
        indices (`torch.LongTensor` of shape `(rows, places)`): in the text; of a node of a tree, by its depth. Filler
            repeats the last of its text.
        slots (`torch.LongTensor` of shape `(rows, places)`): the index that the slot of each stands for. That is the
            place's own, but each node of a tree has a slot, one behind the other, and so has filler.
        is_child (`torch.BoolTensor` of shape `(rows, places)`, *optional*): which are of a child. `None` = none.
        begins, ends (`list[int]`): of each row, of `slots` in its text.
        child_begins, child_ends (`list[int]`): of each row, of `slots` in its child; equal where there is none.
        trees (`list[tuple]`): row, first place, first of `slots`, whether it is a child's, and which of its nodes each
            node sees, a `torch.BoolTensor` of shape `(nodes, nodes)`.
    """

    indices: torch.Tensor
    slots: torch.Tensor
    is_child: torch.Tensor | None
    begins: list[int]
    ends: list[int]
    child_begins: list[int]
    child_ends: list[int]
    trees: list[tuple[int, int, int, bool, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, lines: Sequence[Sequence[Fed]], width: int, device: torch.device) -> "Places":
        """Of each row, what its text is given, and its child if there is one."""
        indices, slots, flags, trees = [], [], [], []
        for row, (text, *children) in enumerate(lines):
            own_indices: list[int] = []
            own_slots: list[int] = []
            for is_child, fed in ((False, text), *((True, child) for child in children)):
                first = fed.begin + fed.pending
                if fed.draft.parents is not None and fed.draft.ids:
                    ancestors = _ancestors(fed.draft.parents)
                    depths = ancestors.sum(dim=1).tolist()
                    trees.append((row, len(own_slots) + fed.pending, first, is_child, ancestors.to(device)))
                    own_indices += [*range(fed.begin, first), *(first + depth - 1 for depth in depths)]
                else:
                    own_indices += range(fed.begin, fed.begin + fed.count)
                own_slots += range(fed.begin, fed.begin + fed.count)
            filler = width - len(own_slots)
            of_children = sum(child.count for child in children)
            flags.append([False] * text.count + [True] * of_children + [False] * filler)
            end = text.begin + text.count
            indices.append(own_indices + [own_indices[text.count - 1]] * filler)
            slots.append(own_slots + list(range(end, end + filler)))
        has_children = any(len(line) > 1 for line in lines)
        children = [line[1] if len(line) > 1 else _NO_CHILD for line in lines]
        known = [indices, slots, flags] if has_children else [indices, slots]
        of_places = torch.tensor(known, device=device)  # one transfer
        return cls(
            of_places[0],
            of_places[1],
            of_places[2].bool() if has_children else None,
            [line[0].begin for line in lines],
            [line[0].begin + width - child.count for line, child in zip(lines, children, strict=True)],
            [child.begin for child in children],
            [child.begin + child.count for child in children],
            trees,
        )


_NO_CHILD = Fed(0, 0, Draft())


def _ancestors(parents: Sequence[int]) -> torch.Tensor:
    """Which nodes of a tree each node comes after, itself among them; of shape `(nodes, nodes)`."""
    seen = torch.eye(len(parents), dtype=torch.bool, device="cpu")
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen
