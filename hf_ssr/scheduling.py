"""When to draft and how much: where a stage begins, how long a draft is, and the governor that keeps it worth while."""

from collections.abc import Callable, Sequence

from .config import SSRConfig
from .costs import GuessedCosts, RoundClock, StepCosts, UnitCosts, costs_of
from .drafting import Draft

FIRST_AUTO_BUDGET = 32
GROWTH = 1.3  # of the thought from one stage to the next
LEAST_GROWTH = 16  # tokens
SETTLED_GROWTH = 2.0  # where the last two drafts agree
LEAST_STAGE_COST = 2.0  # plain steps that a stage must be able to spend to begin, beside its fork and its end
CHILDREN = 0.5  # their share of `max_overhead`
LEAST_COST = 0.05  # plain steps: smaller differences are not told apart
WORTH_MORE = 1.01  # times as much, for a longer draft


class ForkSchedule:
    """
    The budgets of one thought, in order.

    Args:
        config ([`SSRConfig`]): `draft_budgets` or `draft_interval`; with `prediction_ids` only budgets that were asked
            for count, as there is a draft already.
    """

    def __init__(self, config: SSRConfig):
        budgets = config.setting("draft_budgets")
        self._interval = config.draft_interval
        self.is_auto = self._interval is None and budgets == "auto"
        self._budgets = sorted(set(budgets)) if isinstance(budgets, (list, tuple)) else []
        if "draft" not in config.setting("sources") or (config.prediction_ids and not config.forks_on_request):
            self._interval, self.is_auto, self._budgets = None, False, []

    @property
    def never(self) -> bool:
        """Whether no thought is ever forked."""
        return not (self._interval or self.is_auto or self._budgets)

    def next_budget(self, thinking_tokens: int, drafts: Sequence[Sequence[int]], last: int | None) -> int | None:
        """
        The next number of thinking tokens, this one included, after which a stage begins.

        Args:
            thinking_tokens (`int`): so far.
            drafts (`Sequence[Sequence[int]]`): of the stages so far.
            last (`int`, *optional*): thinking tokens before the last stage.
        """
        if self._interval is not None:
            return max(1, -(-thinking_tokens // self._interval)) * self._interval
        if self.is_auto:
            if last is None:
                return max(FIRST_AUTO_BUDGET, thinking_tokens)
            is_settled = len(drafts) > 1 and drafts[-1] == drafts[-2]
            growth = SETTLED_GROWTH if is_settled else GROWTH
            return max(last + LEAST_GROWTH, round(last * growth), thinking_tokens)
        return next((budget for budget in self._budgets if budget >= thinking_tokens), None)


class Governor:
    """
    Keeps drafting worth while: a draft is as long as promises most tokens for its cost, and what drafting has cost in
    vain stays below `max_overhead` of a plain run so far. Of that, children may use a half: the rest is for verifying
    what they have drafted. Who asks for budgets, or has a prediction, is not held back.

    Costs are in plain steps. One that was saved pays for one that is risked.

    Args:
        config ([`SSRConfig`]): `max_overhead`, and the rule.
        model (`PreTrainedModel`): whose rounds are measured.
    """

    def __init__(self, config: SSRConfig, model):
        self.max_overhead = config.setting("max_overhead")
        self.is_on = self.max_overhead != "off"
        self.costs: StepCosts = costs_of(model) if self.is_on else UnitCosts(model.device)
        self._model, self._drafts_change_draws = model, config.rule in ("speculative", "block")
        self._measured = costs_of(model)
        self.clock, self._texts = RoundClock(), 1  # of the round
        self._is_bounded = self.is_on and not (config.forks_on_request or config.prediction_ids)
        self._plain = 0.0  # plain steps of a plain run so far
        self._balance = 0.0  # plain steps saved, less those that drafting has cost

    def fit(
        self,
        drafts: Sequence[Draft],
        shape: Callable[[int], tuple[int, int]],
        free: tuple[int, int] | None = None,
    ) -> None:
        """
        Cuts drafts of several rows to the width that promises most tokens for its cost; to nothing if that is not more
        than a plain step promises. What is forced is kept in any case.

        Args:
            drafts (`Sequence[Draft]`): the longest that are possible.
            shape (`Callable[[int], tuple[int, int]]`): rows and tokens of a forward over so many tokens of each.
            free (`tuple[int, int]`, *optional*): rows and tokens of the forward that is made in any case.
        """
        first = max((draft.forced for draft in drafts), default=0)
        longest = max((len(draft.ids) for draft in drafts), default=0)
        if not self.is_on or longest == first:
            return
        share = 1.0 if free is None else CHILDREN
        paid = self.costs(*free) if free is not None else 0.0
        least = self.costs(*shape(first))
        best, width, expected = 0.0, first, 0.0
        reached = [1.0] * len(drafts)  # how likely all before is kept, of each
        for length in range(first, longest + 1):
            # past its end a draft yields no more
            open_ = [i for i, draft in enumerate(drafts) if length <= len(draft.ids)]
            expected += sum(reached[i] for i in open_)
            for i in open_:
                reached[i] *= drafts[i].chance
            cost = self.costs(*shape(length))
            if length > first and not self._allows(cost - least, share):
                break
            cost = max(cost - paid, LEAST_COST)
            if expected > best * cost * WORTH_MORE:
                best, width = expected / cost, length
            elif expected + self._rest(drafts, reached, length) <= best * cost * WORTH_MORE:
                break  # all the rest would not be worth it either, if it cost nothing
        for draft in drafts:
            draft.cut(width)

    @staticmethod
    def _rest(drafts: Sequence[Draft], reached: Sequence[float], length: int) -> float:
        """Tokens that drafts could still yield, if they were without end."""
        rest = 0.0
        for draft, chance in zip(drafts, reached, strict=True):
            if length < len(draft.ids):
                rest += chance / (1 - draft.chance) if draft.chance < 1 else len(draft.ids)
        return rest

    def allows_drafting(self, cost: float) -> bool:
        """Whether a draft may be made that takes so many plain steps by itself."""
        return cost == 0 or not self.is_on or self._allows(cost, 1.0)

    def begin(self, rows: int, width: int, is_inexact: bool = False) -> None:
        """
        The prefill was made: it belongs to the cost of a plain run.

        Args:
            rows (`int`), width (`int`): of it.
            is_inexact (`bool`): whether what a forward rounds depends on its size and may decide between two tokens.
                Then, and where drafts change what is drawn, nothing may depend on the clock: costs are guessed.
        """
        if self.is_on and (is_inexact or self._drafts_change_draws):
            self.costs = GuessedCosts(self._model.device, self._model.dtype)
        self._plain += self.costs.guess(rows, width)

    def pay(self, tokens: list[int], rows: int, width: int) -> None:
        """A forward over `rows` x `width` was made, and each text grew by so many `tokens`."""
        plain = self.costs(len(tokens), 1)
        grown = sum(tokens) / len(tokens)
        self._plain += grown
        self._balance += grown - self.costs(rows, width) / plain

    def open_round(self, texts: int) -> None:
        """A round of so many texts begins."""
        self._texts = texts
        self.clock.begin()

    def close_round(self, shape: tuple[int, int] | None) -> None:
        """
        What the round took is measured, and what it was thought to cost when it was paid is put right.

        Args:
            shape (`tuple[int, int]`, *optional*): rows and tokens of its forward, if it was paid.
        """
        texts, plain = self._texts, self.costs(self._texts, 1)
        if shape is not None:
            paid = self.costs(*shape)
            self._measured.add(*shape, self.clock.seconds, texts)
            self._balance -= (self.costs(*shape) - paid) / plain
        for what, seconds in self.clock.once.items():
            self._measured.add_once(what, seconds, texts)
            self._balance -= self.costs.once(what, texts) / plain

    def allows_stage(self) -> bool:
        """Whether a stage may begin."""
        once = self.costs.once("fork", self._texts) + self.costs.once("end", self._texts)
        return self._allows(LEAST_STAGE_COST + once / self.costs(self._texts, 1), CHILDREN)

    def allows_child(self, texts: int, shape: tuple[int, int]) -> bool:
        """Whether children of so many texts may take part in the next forward, over rows and tokens of `shape`."""
        cost = self.costs(*shape) + self.costs.once("end", texts)
        return self._allows(cost / self.costs(texts, 1) - 1, CHILDREN)

    def _allows(self, cost: float, share: float) -> bool:
        return not self._is_bounded or cost <= self._balance + share * self.max_overhead * self._plain
