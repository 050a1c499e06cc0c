"""Rounds: propose, fit to cost, one forward, follow, settle; for any number of lanes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial

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
        drafts = dict.fromkeys(lanes, Draft())
        if len(lanes) > 1 and not self._target.takes_uneven_blocks:
            return drafts
        most = min(lane.row.widest for lane in lanes)  # shorter rows are filled up, and nothing may lie past the end
        parents, children = ([lane for lane in lanes if lane.is_child is which] for which in (False, True))
        drafts |= self._drafts_of(parents, most)
        self._fit_texts(parents, children, drafts)
        drafts |= self._drafts_of(children, most)
        self._fit_children(parents, children, drafts)
        return drafts

    def _fit_texts(self, parents: Sequence[Lane], children: Sequence[Lane], drafts: Mapping[Lane, Draft]) -> None:
        """To one width for all; each child takes a place at least, in a row of the cache with its parent or alone."""
        places = dict.fromkeys(map(self._target.line_of, self._target.rows), 0)
        for lane in children:
            places[self._target.line_of(lane.row)] += 1
        own = [(places[self._target.line_of(lane.row)], len(drafts[lane].ids)) for lane in parents]
        least = max(places.values())

        def shape(width: int) -> tuple[int, int]:
            return len(places), max(least, max(count + 1 + min(width, length) for count, length in own))

        self._governor.fit([drafts[lane] for lane in parents], shape)

    def _fit_children(self, parents: Sequence[Lane], children: Sequence[Lane], drafts: Mapping[Lane, Draft]) -> None:
        """Each by what it adds to the forward that is made without it."""
        places = {self._target.line_of(lane.row): 1 + len(drafts[lane].ids) for lane in parents}
        widest = max(places.values())
        for lane in children:
            line, free = self._target.line_of(lane.row), (len(places), widest)
            own = places.setdefault(line, 0) + 1
            self._governor.fit([drafts[lane]], partial(_widened, len(places), widest, own), free)
            places[line] = own + len(drafts[lane].ids)
            widest = max(widest, places[line])

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
        fed = set(target.rows)
        new = [row for row in children if row not in fed]
        rows = [parent.row for parent in kept] + [row for row in children if row in fed]
        device = kept[0].row.ids.device
        changes = new or len(rows) < len(target.rows)
        ends = any(row.origin is not None for row in fed.difference(rows))
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


def _widened(rows: int, widest: int, own: int, width: int) -> tuple[int, int]:
    """Rows and tokens of a forward in which one row gets so many more."""
    return rows, max(widest, own + width)
