"""Rounds: propose, fit to cost, one forward, follow, settle; for any number of lanes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch

from .drafting import Draft, Drafter, Evidence
from .following import follow
from .lanes import Lane
from .rows import Row
from .scheduling import Governor
from .stages import drop_children, stop_costly_children
from .target import Target

FIRST_PHASE = ("drafting", "thinking", "verify", "speculate")  # of those that the lanes are in


class Rounds:
    """
    Moves lanes on together, over one target.

    Args:
        target ([`Target`]): makes the forwards.
        governor ([`Governor`]): says how long drafts may be.
    """

    def __init__(self, target: Target, governor: Governor):
        self._target, self._governor = target, governor

    def play(self, parents: Sequence[Lane]) -> None:
        """
        One round of some texts and their children; each takes a token at least.

        Args:
            parents (`Sequence[Lane]`): those that are not done.
        """
        target, governor = self._target, self._governor
        governor.open_round(len(parents))
        lanes = [lane for parent in parents for lane in parent.lanes]
        needs_forward = not target.has_logits  # the prefill yields the first token, without a draft
        drafts = self._propose(lanes) if needs_forward else dict.fromkeys(lanes, Draft())
        phases = {lane: lane.phase(drafts[lane]) for lane in lanes}
        phase = next(name for name in FIRST_PHASE if name in phases.values())
        lengths = [parent.row.length for parent in parents]
        with target.metrics.timed(phase):
            evidence = self._forward(phase, drafts, parents)
            lanes = [lane for lane in lanes if lane.row in evidence]
            for lane in lanes:
                if needs_forward:
                    lane.count_forward(phases[lane], target.last_seconds)
                with lane.timed():
                    follow(lane, drafts[lane], evidence[lane.row])
            for lane in lanes:
                lane.end_round()
            if needs_forward:
                grown = [parent.row.length - length for parent, length in zip(parents, lengths, strict=True)]
                governor.pay(grown, *target.last_shape)
            stop_costly_children(parents, target, governor)
            self._settle(parents)
            governor.close_round(target.last_shape if needs_forward else None)

    def _propose(self, lanes: Sequence[Lane]) -> dict[Lane, Draft]:
        """What each lane may write next, as long as is worth its cost: first the texts together, then each child."""
        target, governor = self._target, self._governor
        drafts = dict.fromkeys(lanes, Draft())
        if len(lanes) > 1 and not target.takes_uneven_blocks:
            return drafts
        most = min(lane.row.widest for lane in lanes)  # shorter rows are filled up, and nothing may lie past the end
        drafts |= self._drafts_of([lane for lane in lanes if not lane.is_child], most)
        widths = {lane.row: 1 for lane in lanes}
        parents = [lane for lane in lanes if not lane.is_child]
        governor.fit(
            [drafts[lane] for lane in parents],
            lambda length: target.shape_of(
                widths | {lane.row: 1 + min(length, len(drafts[lane].ids)) for lane in parents}
            ),
        )
        children = [lane for lane in lanes if lane.is_child]
        fed = {lane.row: 1 + len(drafts[lane].ids) for lane in parents}
        drafts |= self._drafts_of(children, most)
        for lane in children:
            draft, free = drafts[lane], target.shape_of(fed)
            governor.fit([draft], lambda length: target.shape_of(fed | {lane.row: 1 + length}), free)  # noqa: B023
            fed[lane.row] = 1 + len(draft.ids)
        return drafts

    def _drafts_of(self, lanes: Sequence[Lane], most: float) -> dict[Lane, Draft]:
        """The longest that are possible. Drafters of one kind draft together; trees are for targets that take them."""
        kinds: dict[type[Drafter], list[Lane]] = defaultdict(list)
        for lane in lanes:
            kinds[type(lane.drafter)].append(lane)
        drafts: dict[Lane, Draft] = {}
        for kind, group in kinds.items():
            rooms = [int(min(most, lane.row.room - 1)) for lane in group]
            limits = [lane.limit(room) for lane, room in zip(group, rooms, strict=True)]
            cost = max(lane.drafter.cost(limit) for lane, limit in zip(group, limits, strict=True))
            if not self._governor.allows_drafting(cost):
                limits = [0] * len(group)
            proposed = kind.propose_together([lane.drafter for lane in group], limits)
            for lane, draft, room in zip(group, proposed, rooms, strict=True):
                takes = draft.parents is None or self._target.takes_trees
                drafts[lane] = lane.behind_forced(draft if takes else draft.chain, room)
        return drafts

    def _forward(self, phase: str, drafts: Mapping[Lane, Draft], parents: Sequence[Lane]) -> dict[Row, Evidence]:
        """Over all lanes; without the children, if there is no memory for them."""
        target = self._target
        proposed = {lane.row: draft for lane, draft in drafts.items()}
        try:
            return target.forward(phase, proposed)
        except torch.OutOfMemoryError:
            if not (drop_children(parents) and target.undo_forward()):
                raise
            target.keep([parent.row for parent in parents])
            return target.forward(phase, proposed)

    def _settle(self, parents: Sequence[Lane]) -> None:
        """The cache forgets what was rejected; rows that are done and ended children go, new children come."""
        target, clock = self._target, self._governor.clock
        kept = [parent for parent in parents if not parent.done]
        if not kept:
            return  # what the cache is left with is the target's business
        children = {parent.child.row: parent.child for parent in kept if parent.child is not None}
        new = [row for row in children if row not in target.rows]
        rows = [parent.row for parent in kept] + [row for row in children if row in target.rows]
        device = kept[0].row.ids.device
        changes = new or len(rows) < len(target.rows)
        ends = any(row.origin is not None and row not in rows for row in target.rows)
        if new:
            with clock.uncounted():
                target.try_branches()
        with target.metrics.timed("drafting_exposed") if changes else nullcontext():
            with clock.apart("end", device) if ends else nullcontext():
                target.keep(rows)
            if not new:
                return
            try:
                with clock.apart("fork", device):
                    target.fork(new)
            except torch.OutOfMemoryError:
                for row in new:
                    children[row].end("out_of_memory")
