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
        name, _, length = kind.partition(" ")
        supposed = 8.0 if name == "prefix" else 2.0 + int(length) if name == "aligned" else float(length)
        return (kept + supposed) / (kept + lost + supposed + 1)

    def note(self, draft, kept: int) -> None:
        """So many tokens of a draft were kept. It has `ids` and a `kind`."""
        if draft.ids:
            counts = self._counts.setdefault(draft.kind, [0.0, 0.0])
            counts[0] = FORGETTING * counts[0] + kept
            counts[1] = FORGETTING * counts[1] + (kept < len(draft.ids))
