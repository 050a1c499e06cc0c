"""When to fork: after which numbers of thinking tokens a stage begins."""

from .config import SSRConfig

FIRST_AUTO_BUDGET = 64


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
        self._doubling = self._interval is None and budgets == "auto"
        self._budgets = frozenset(budgets if isinstance(budgets, (list, tuple)) else ())
        if "draft" not in config.setting("sources") or (config.prediction_ids and not config.forks_on_request):
            self._interval, self._doubling, self._budgets = None, False, frozenset()

    @property
    def never(self) -> bool:
        """Whether no thought is ever forked."""
        return not (self._interval or self._doubling or self._budgets)

    def due(self, thinking_tokens: int) -> bool:
        """Whether a stage begins after so many thinking tokens."""
        if self._interval is not None:
            return thinking_tokens > 0 and thinking_tokens % self._interval == 0
        if self._doubling:
            doublings, rest = divmod(thinking_tokens, FIRST_AUTO_BUDGET)
            return rest == 0 and doublings.bit_count() == 1
        return thinking_tokens in self._budgets
