"""What a forward over some rows and tokens costs on this model and machine, in plain steps: measured while running."""

import weakref
from collections import deque
from statistics import fmean, median
from threading import Lock

import torch

SAMPLES = 9  # of a size, the latest
HALF_LIFE = 128  # forwards
_costs: "weakref.WeakKeyDictionary[torch.nn.Module, StepCosts]" = weakref.WeakKeyDictionary()


class StepCosts:
    """
    The cost of forwards, each relative to one over a single token. A forward is not a unit of time: on a CPU one over
    16 tokens takes 1.5 to 6 plain steps, on a GPU it may take one.

    Each is compared with the plain steps just before it, so that a machine that slows down, or a text that grows, makes
    none of them dearer. Sizes between two that were measured lie on the line between them. Before anything is
    measured, a guess for the device stands in; and what was measured to be dearer than that is half forgotten every
    `HALF_LIFE` forwards: what is held to be dear is not tried, and could never show that it is not.

    Args:
        device (`torch.device`): of the model.
    """

    def __init__(self, device: torch.device):
        self._first, self._each = (0.4, 0.04) if device.type == "cpu" else (0.0, 0.01)
        self._plain: deque[float] = deque(maxlen=SAMPLES)  # seconds of the latest plain steps
        self._samples: dict[tuple[int, int], deque[tuple[int, float]]] = {}  # tokens and cost
        self._latest: dict[tuple[int, int], int] = {}  # of each size, which forward was the last
        self._count = 0
        self._lock = Lock()  # a model may generate in several threads
        self._tables: dict[int, tuple[list[float], list[float]]] = {}

    def add(self, rows: int, tokens: int, seconds: float) -> None:
        """A forward over `rows` x `tokens` took so long."""
        with self._lock:
            self._count += 1
            if rows == tokens == 1:
                self._plain.append(seconds)
            elif self._plain:
                size = rows, (tokens - 1).bit_length()
                samples = self._samples.setdefault(size, deque(maxlen=SAMPLES))
                samples.append((tokens, seconds / median(self._plain)))
                self._latest[size] = self._count
                if len(samples) < SAMPLES:
                    self._tables.clear()
            if self._count % SAMPLES == 0:
                self._tables.clear()

    def guess(self, rows: int, tokens: int) -> float:
        """The cost as long as nothing is measured."""
        more = rows * tokens - 1
        return 1 + self._first * (more > 0) + self._each * more

    def __call__(self, rows: int, tokens: int) -> float:
        """The cost of a forward over `rows` x `tokens`, in plain steps."""
        if rows == tokens == 1:
            return 1.0
        sizes, costs = self._table(rows)
        if not sizes:
            return self.guess(rows, tokens)
        above = next((i for i, size in enumerate(sizes) if size >= tokens), None)
        if above is None or above == 0:  # beyond what was measured: the guess, as far off as it was there
            end = -1 if above is None else 0
            return max(1.0, self.guess(rows, tokens) * costs[end] / self.guess(rows, sizes[end]))
        left, right = sizes[above - 1], sizes[above]
        share = (tokens - left) / (right - left)
        return costs[above - 1] + share * (costs[above] - costs[above - 1])

    def _table(self, rows: int) -> tuple[list[float], list[float]]:
        """Sizes and their costs, both rising."""
        with self._lock:
            if rows not in self._tables:
                sizes, costs = [], []
                for size, samples in sorted(item for item in self._samples.items() if item[0][0] == rows):
                    tokens = fmean(tokens for tokens, _ in samples)
                    cost, guess = median(cost for _, cost in samples), self.guess(rows, tokens)
                    if cost > guess:
                        cost = guess + (cost - guess) * 0.5 ** ((self._count - self._latest[size]) / HALF_LIFE)
                    sizes.append(tokens)
                    costs.append(max(cost, costs[-1] if costs else 1.0))
                self._tables[rows] = sizes, costs
            return self._tables[rows]


class UnitCosts(StepCosts):
    """Every forward costs one: to draft whatever saves forwards."""

    def __call__(self, rows: int, tokens: int) -> float:
        return 1.0


class GuessedCosts(StepCosts):
    """The guesses stay: what is drafted, and with it what is drawn, does not depend on the clock."""

    def __call__(self, rows: int, tokens: int) -> float:
        return self.guess(rows, tokens)


def costs_of(model) -> StepCosts:
    """What was measured on a model so far, as long as it lives."""
    return _costs.setdefault(model, StepCosts(model.device))
