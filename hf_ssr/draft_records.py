"""How often drafts are kept, by how they were found. Numbers only; no tensors."""

FORGETTING = 0.95  # of what a kind was worth, at each of its drafts


class AcceptanceRecord:
    """
    How often drafts of each kind were kept. A kind that is new is supposed to be as good as its match is long; what was
    long ago counts less.
    """

    def __init__(self):
        self._counts: dict[str, list[float]] = {}

    def chance(self, kind: str) -> float:
        """How often a token of such a draft is kept, if those before it are."""
        kept, lost = self._counts.get(kind, (0.0, 0.0))
        supposed = _supposed(kind)
        return (kept + supposed) / (kept + lost + supposed + 1)

    def note(self, draft, kept: int, forced: int = 0) -> None:
        """
        So many tokens of a draft were kept. It has `ids` and a `kind`; the first `forced` of them come in any case, and
        say nothing of it.
        """
        drafted, kept = len(draft.ids) - forced, max(0, kept - forced)
        if drafted > 0:
            counts = self._counts.setdefault(draft.kind, [0.0, 0.0])
            counts[0] = FORGETTING * counts[0] + kept
            counts[1] = FORGETTING * counts[1] + (kept < drafted)


def _supposed(kind: str) -> float:
    """Tokens kept for one that is lost, as long as nothing is known of a kind: `name`, or `name length`."""
    name, _, length = kind.partition(" ")
    if name == "prefix":
        return 8.0
    return (2.0 if name == "aligned" else 0.0) + (float(length) if length.isdecimal() else 1.0)
