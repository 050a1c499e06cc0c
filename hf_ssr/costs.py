"""What a round over some rows and tokens costs on this model and machine, in plain steps: measured while running."""

import functools
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, median, median_low
from threading import RLock

import torch

SAMPLES = 9  # of a size, the latest
HALF_LIFE = 128  # rounds
ONCE_SAMPLES = 3  # of what is done once a stage, the latest
MOST_ONCE = 64.0  # plain steps: a fork copies what few steps read; more than this is a pause of the machine
PAID_OFF = 0.02  # plain steps of what was dear once, by each round since
# Plain steps that a forward costs beyond one, if it is over more than one token, and for each of these; whether weights
# take less than 4 bytes. In bfloat16 on a CPU 16 tokens took 1.2 (a model of 1.4 M weights) and 1.6 (32 experts).
GUESSES = {
    ("cpu", False): (0.4, 0.04),
    ("cpu", True): (0.2, 0.03),
    ("accelerator", False): (0.0, 0.01),
    ("accelerator", True): (0.0, 0.01),
}
_costs: "weakref.WeakKeyDictionary[torch.nn.Module, StepCosts]" = weakref.WeakKeyDictionary()


class StepCosts:
    """
    The cost of rounds, each relative to one over a single token: the forward, and all that is done for it, to propose,
    to copy states, to roll back. A forward is not a unit of time: on a CPU one over 16 tokens takes 1.5 to 6 plain
    steps, on a GPU it may take one.

    Each is compared with the plain steps just before it, so that a machine that slows down, or a text that grows, makes
    none of them dearer. Sizes between two that were measured lie on the line between them. Before anything is
    measured, a guess for the device stands in; and what was measured to be dearer than that is half forgotten every
    `HALF_LIFE` rounds: what is held to be dear is not tried, and could never show that it is not.

    What is done once a stage, the fork and the child's end, has a cost too. It is forgotten as fast as the text since
    could have paid for it, so that what it costs to try again stays a small share.

    Args:
        device (`torch.device`): of the model.
        dtype (`torch.dtype`): of its weights.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32):
        self._first, self._each = GUESSES["cpu" if device.type == "cpu" else "accelerator", dtype.itemsize < 4]
        self._plain: dict[int, deque[float]] = {}  # seconds of the latest plain steps of so many texts
        self._samples: dict[tuple[int, int], deque[tuple[int, float]]] = {}  # tokens and cost
        self._once: dict[tuple[str, int], deque[float]] = {}
        self._latest: dict[tuple, int] = {}  # of each size, and of what is done once: which round was the last
        self._count = 0
        self._lock = RLock()  # a model may generate in several threads
        self._tables: dict[int, tuple[list[float], list[float]]] = {}
        self._known: dict[tuple[int, int], float] = {}  # read off the tables

    def add(self, rows: int, tokens: int, seconds: float, texts: int = 1) -> None:
        """A round of so many `texts`, with a forward over `rows` x `tokens`, took so long."""
        with self._lock:
            self._count += 1
            is_new = self._count % SAMPLES == 0
            if rows == texts and tokens == 1:
                self._plain.setdefault(texts, deque(maxlen=SAMPLES)).append(seconds)
            elif texts in self._plain:
                size, cost = (rows, (tokens - 1).bit_length()), seconds / self._unit(texts)  # which may ask for sizes
                samples = self._samples.setdefault(size, deque(maxlen=SAMPLES))
                samples.append((tokens, cost))
                self._latest[size] = self._count
                is_new |= len(samples) < SAMPLES
            if is_new:
                self._tables.clear()
                self._known.clear()

    def add_once(self, what: str, seconds: float, texts: int = 1) -> None:
        """What is done once a stage took so long: `"fork"` or `"end"`."""
        with self._lock:
            if texts in self._plain:
                samples = self._once.setdefault((what, texts), deque(maxlen=ONCE_SAMPLES))
                samples.append(min(seconds / self._unit(texts), MOST_ONCE))
                self._latest[what, texts] = self._count

    def once(self, what: str, texts: int = 1) -> float:
        """Its cost, in plain steps; nothing before it is measured. One slow fork among others does not count."""
        with self._lock:
            samples = self._once.get((what, texts))
            if not samples:
                return 0.0
            return max(0.0, median_low(samples) - PAID_OFF * (self._count - self._latest[what, texts]))

    def _unit(self, texts: int) -> float:
        """Seconds of a plain step of one text."""
        return median(self._plain[texts]) / self(texts, 1)

    def guess(self, rows: int, tokens: float) -> float:
        """The cost as long as nothing is measured."""
        more = rows * tokens - 1
        return 1 + self._first * (more > 0) + self._each * more

    def __call__(self, rows: int, tokens: int) -> float:
        """The cost of a round with a forward over `rows` x `tokens`, in plain steps."""
        if rows == tokens == 1:
            return 1.0
        if (cost := self._known.get((rows, tokens))) is None:
            cost = self._known[rows, tokens] = self._read_off(rows, tokens)
        return cost

    def _read_off(self, rows: int, tokens: int) -> float:
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
                # plain steps of a batch are measured by themselves, unless as two rows of one text
                is_own = rows in self._plain and (rows, 0) not in self._samples and rows > 1
                sizes, costs = ([1.0], [self.guess(rows, 1)]) if is_own else ([], [])
                for size, samples in sorted(item for item in self._samples.items() if item[0][0] == rows):
                    tokens = fmean(tokens for tokens, _ in samples)
                    cost, guess = median(cost for _, cost in samples), self.guess(rows, tokens)
                    if cost > guess:
                        cost = guess + (cost - guess) * 0.5 ** ((self._count - self._latest[size]) / HALF_LIFE)
                    sizes.append(tokens)
                    costs.append(max(cost, 1.0))
                self._tables[rows] = sizes, rising(costs)
            return self._tables[rows]


def rising(costs: Sequence[float]) -> list[float]:
    """
    The nearest costs that nowhere fall: where they do, one was disturbed, and those that fall share their mean. With
    the largest so far instead, a disturbance of a small size would make all larger ones dear.
    """
    runs: list[list[float]] = []
    for cost in costs:
        runs.append([cost])
        while len(runs) > 1 and fmean(runs[-2]) > fmean(runs[-1]):
            fallen = runs.pop()
            runs[-1] += fallen
    return [fmean(run) for run in runs for _ in run]


class UnitCosts(StepCosts):
    """Every forward costs one: to draft whatever saves forwards."""

    def __call__(self, rows: int, tokens: int) -> float:
        return 1.0

    def once(self, what: str, texts: int = 1) -> float:
        return 0.0


class GuessedCosts(StepCosts):
    """The guesses stay: what is drafted, and with it what is drawn or rounded, does not depend on the clock."""

    def __call__(self, rows: int, tokens: int) -> float:
        return self.guess(rows, tokens)

    def once(self, what: str, texts: int = 1) -> float:
        return 0.0


def costs_of(model) -> StepCosts:
    """What was measured on a model so far, as long as it lives."""
    return _costs.setdefault(model, StepCosts(model.device, model.dtype))


class RoundClock:
    """
    Tells what a round takes that belongs to its size, and what is done once a stage. What plain `generate` does for
    each token too (pick it, stream it, ask whether to stop) is neither: else a block would be the dearer, the more of
    its tokens are kept.
    """

    def __init__(self):
        self.begin()

    def begin(self) -> None:
        """A round begins."""
        self._began = time.perf_counter()
        self._as_plain = 0.0
        self.once: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        """Of the round so far, for its size."""
        return time.perf_counter() - self._began - self._as_plain - sum(self.once.values())

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """The block is done once a model, and says nothing of rounds to come."""
        begin = time.perf_counter()
        yield
        self._as_plain += time.perf_counter() - begin

    @contextmanager
    def apart(self, what: str, device: torch.device) -> Iterator[None]:
        """The block is done once a stage. Waits for the device: else the copies were in the next forward's time."""
        begin = time.perf_counter()
        yield
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        self.once[what] = self.once.get(what, 0.0) + time.perf_counter() - begin

    @staticmethod
    def as_plain(method):
        """For a method of whoever has a `clock`: plain `generate` does the same for each token."""

        @functools.wraps(method)
        def timed(self, *args, **kwargs):
            begin = time.perf_counter()
            try:
                return method(self, *args, **kwargs)
            finally:
                self.clock._as_plain += time.perf_counter() - begin

        return timed
