"""
*path*: find the way from one city to another over one-way links.

The thought tries the links of each city in order and turns back where there is none left; then it goes the way back
from the goal to see which links led there, and adds up the hours. Half of the prompts ask for tickets, so that the
answer is longer than the thought or shorter.
"""

import random
import re
from itertools import pairwise

from .sample import Sample

_CITIES = """
Accra Athens Berlin Bogota Cairo Dakar Delhi Dublin Geneva Hanoi Havana Kyoto Lagos Lima Lisbon London Madrid Manila
Milan Moscow Munich Naples Oslo Paris Porto Prague Quito Riga Rome Seoul Sofia Tokyo Tunis Turin Vienna Warsaw
"""
_MEANS = "bike boat bus car plane train tram"
CITIES, MEANS = tuple(_CITIES.split()), tuple(_MEANS.split())
MIN_LEGS, MAX_LEGS, MAX_DEAD_ENDS, MAX_LINKS = 4, 7, 6, 3
PIECES = (
    *CITIES,
    *(f" by {means}" for means in MEANS),
    *(f" {i}: " for i in range(1, MAX_LINKS + 2)),
    *(f" {i}" for i in range(1, MAX_LINKS + 1)),
    *(
        "Find the way from ",
        ", the goal is ",
        ".",
        ". List the tickets.",
        " in ",
        " h",
        "no link",
        ", back to ",
        "Found ",
        " via ",
        " to ",
    ),
    *("Leg ", ", ", " is ", "the ", "start", "The ", "way ", "from ", ":\n\n", ": ", "Go ", "from ", ". ", "You "),
    *("Ticket ", "Tickets", " from ", " leaves ", " after ", " and reaches ", *MEANS, "\n\n"),
    *("have ", "now ", "travelled ", "In ", "total ", " legs", " take "),
)


def make(rng: random.Random) -> Sample:
    """
    A way of 4 to 7 legs with up to 6 cities off it; `data` is the start, the goal, the links (a city's list of
    city, means and hours), and whether there are tickets. Each city is reached by one link only, so there is one way.
    """
    legs = min(rng.randint(MIN_LEGS, MAX_LEGS), rng.randint(MIN_LEGS, MAX_LEGS))
    dead_ends = rng.randint(0, MAX_DEAD_ENDS)
    way = rng.sample(CITIES, legs + 1 + dead_ends)
    way, others = way[: legs + 1], way[legs + 1 :]
    reached = {city: [onward] for city, onward in pairwise(way)}
    for city in others:
        origin = rng.choice([origin for origin, onward in reached.items() if len(onward) < MAX_LINKS])
        reached[origin].append(city)
        reached[city] = []
    for onward in reached.values():
        rng.shuffle(onward)
    links = {a: [(b, rng.choice(MEANS), rng.randint(1, 9)) for b in onward] for a, onward in reached.items()}
    lines = []
    for a, legs_on in links.items():
        lines += [f"{a} {i}: {b} by {means} in {hours} h" for i, (b, means, hours) in enumerate(legs_on, 1)]
        lines.append(f"{a} {len(legs_on) + 1}: no link")
    rng.shuffle(lines)
    start, goal, ticketed = way[0], way[-1], rng.random() < 0.5
    wish = " List the tickets." if ticketed else ""
    prompt = "\n".join([f"Find the way from {start}, the goal is {goal}.{wish}", *lines])
    answer = _answer(_legs(links, way), ticketed)
    return Sample("path", prompt, _thought(links, way), answer, (start, goal, links, ticketed))


_CITY = f"({'|'.join(CITIES)})"
_FIRST = rf"Find the way from {_CITY}, the goal is {_CITY}\.( List the tickets\.)?"
_LINK = rf"{_CITY} \d: ({_CITY} by ({'|'.join(MEANS)}) in \d h|no link)"


def is_one(prompt: str) -> bool:
    """Whether a prompt is worded as `make` words it; whether there is a way is not looked at."""
    first, *lines = prompt.split("\n")
    return bool(re.fullmatch(_FIRST, first) and lines) and all(re.fullmatch(_LINK, line) for line in lines)


def check(sample: Sample, answer: str) -> bool:
    """Whether the legs lead to the goal over links that exist, and their means, hours, sums and tickets are right."""
    start, goal, links, ticketed = sample.data
    here, legs = start, []
    for found in re.finditer(r"Leg \d: Go from (\w+) to (\w+) by (\w+) in (\d) h\.", answer):
        link = (found[2], found[3], int(found[4]))
        if found[1] != here or link not in links.get(here, ()):
            return False
        legs.append((here, *link))
        here = link[0]
    return here == goal and answer == _answer(legs, ticketed)


def _legs(links: dict, way: list[str]) -> list[tuple[str, str, str, int]]:
    """Each leg of the way: from, to, means and hours."""
    return [(a, *next(link for link in links[a] if link[0] == b)) for a, b in pairwise(way)]


def _thought(links: dict, way: list[str]) -> str:
    lines, goal = [], way[-1]
    origin = {link[0]: (a, i) for a, onward in links.items() for i, link in enumerate(onward, 1)}
    city, number = way[0], 1
    while city != goal:
        if number <= len(links[city]):
            onward = links[city][number - 1][0]
            lines.append(f"{city} {number}: {onward}")
            city, number = onward, 1
        else:
            back, tried = origin[city]
            lines.append(f"{city} {number}: no link, back to {back} {tried}")
            city, number = back, tried + 1
    lines.append(f"Found {goal}")
    lines += [f"{b} via {a}" for a, b in reversed(list(pairwise(way)))]
    lines.append(f"{way[0]} is the start")
    total = 0
    for i, (a, b, means, hours) in enumerate(_legs(links, way), 1):
        lines.append(f"Leg {i}, {a} to {b} by {means} in {hours} h, {total:02}+{hours}={total + hours:02}")
        total += hours
    return "\n".join(lines)


def _answer(legs: list[tuple[str, str, str, int]], ticketed: bool) -> str:
    lines, tickets, total = [f"The way from {legs[0][0]}, the goal is {legs[-1][1]}:\n"], [], 0
    for i, (a, b, means, hours) in enumerate(legs, 1):
        before, total = total, total + hours
        lines.append(f"Leg {i}: Go from {a} to {b} by {means} in {hours} h. You have now travelled {total:02} h.")
        times = f"leaves {a} after {before:02} h and reaches {b} after {total:02} h"
        tickets.append(f"Ticket {i}: from {a} to {b} by {means} {times}.")
    lines += ["", "Tickets:", *tickets, ""] if ticketed else []
    return "\n".join([*lines, f"In total the {len(legs)} legs take {total:02} h."])
