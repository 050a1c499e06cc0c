"""
*class*: write a Python class whose fields are sorted by name.

The thought is a selection sort: each place goes through all fields and keeps the first name not yet placed, one
comparison a step. Half of the prompts ask for docstrings, so that the answer is longer than the thought or shorter.
The answer is run, not compared.
"""

import ast
import inspect
import random
import re

from .sample import Sample

_NAMES = """
age batch city color count date depth flag group height image index job key label level limit mode model note owner page
path phone port price queue rate role score shape size speed state step street tag team time title unit user version
weight width year zone
"""
_CLASSES = "Account Animal Book Camera Car Device Event File Game House Item Lamp Parcel Robot Server Task"
_WORDS = "black blue brown gold gray green pink red white yellow"
NAMES, CLASSES, WORDS = (tuple(text.split()) for text in (_NAMES, _CLASSES, _WORDS))
MIN_FIELDS, MAX_FIELDS = 2, 10
PIECES = (
    *NAMES,
    *CLASSES,
    *(f'"{word}"' for word in WORDS),
    *(
        "Write the Python class ",
        ". Sort its fields by name.",
        ". Sort its fields by name and document them.",
        ": int = ",
        ": str = ",
        ": bool = ",
        "True",
        "False",
    ),
    *(
        " = ",
        ": ",
        "Place ",
        ", past ",
        "start",
        " < ",
        " > ",
        " done, still ",
        "none",
        ", ",
        ". So ",
    ),
    *(" then ", "Order: ", "end", "class ", ":\n", "    def ", "__init__", "(self", "):\n", "        ", "self._"),
    *("get_", "set_", "value"),
    *("return ", "to_dict", "__repr__", '": ', 'f"', "={", "!r}", ')"', "\n\n"),
    *('"""', "Sorted by name.", "Return the ", "Set the ", "int", "str", "bool", ", by default ", "."),
)


def make(rng: random.Random) -> Sample:
    """A class of 2 to 10 fields, fewer if documented; `data` is its name, its sorted fields, and if documented."""
    documented, count = rng.random() < 0.5, rng.randint(MIN_FIELDS, MAX_FIELDS)
    if documented:
        count = min(count, rng.randint(MIN_FIELDS, MAX_FIELDS))
    names = rng.sample(NAMES, count)
    fields = {name: _type_and_default(rng) for name in names}
    title = rng.choice(CLASSES)
    wish = "Sort its fields by name and document them." if documented else "Sort its fields by name."
    lines = [f"{i} {name}: {kind} = {default}" for i, (name, (kind, default)) in enumerate(fields.items())]
    prompt = "\n".join([f"Write the Python class {title}. {wish}", *lines])
    ordered = {name: fields[name] for name in sorted(names)}
    return Sample("class", prompt, _thought(names), _answer(title, ordered, documented), (title, ordered, documented))


_FIRST = rf"Write the Python class ({'|'.join(CLASSES)})\. Sort its fields by name( and document them)?\."
_FIELD = rf"({'|'.join(NAMES)}): (int = \d|str = \"({'|'.join(WORDS)})\"|bool = (True|False))"


def is_one(prompt: str) -> bool:
    """Whether a prompt is worded as `make` words it."""
    first, *lines = prompt.split("\n")
    fields = [found for i, line in enumerate(lines) if (found := re.fullmatch(rf"{i} {_FIELD}", line))]
    is_right = re.fullmatch(_FIRST, first) and len(fields) == len(lines) and MIN_FIELDS <= len(lines) <= MAX_FIELDS
    return bool(is_right) and len({field[1] for field in fields}) == len(fields)


def check(sample: Sample, answer: str) -> bool:
    """Whether the class runs, and its order, types, defaults, methods, docstrings and `__repr__` are right."""
    title, fields, documented = sample.data
    try:
        made = _run(answer)[title]
        return _behaves(made, title, fields) and _docs(made, fields) == _wanted_docs(fields, documented)
    except Exception:  # whatever the model's code does wrong, the answer is wrong
        return False


def _behaves(made: type, title: str, fields: dict[str, tuple[str, str]]) -> bool:
    values = {name: ast.literal_eval(default) for name, (_, default) in fields.items()}
    declared = [(p.name, p.annotation.__name__, repr(p.default)) for p in inspect.signature(made).parameters.values()]
    if declared != [(name, fields[name][0], repr(value)) for name, value in values.items()]:
        return False
    thing = made()
    right = _shows(thing, title, values)
    for name in fields:  # one field at a time, so that a setter of another field shows
        values[name] = f"new {name}"
        getattr(thing, f"set_{name}")(values[name])
        right = right and _shows(thing, title, values)
    return right and _shows(made(*fields), title, {name: name for name in fields})


def _shows(thing, title: str, values: dict) -> bool:
    return (
        [getattr(thing, f"get_{name}")() for name in values] == list(values.values())
        and list(thing.to_dict().items()) == list(values.items())
        and repr(thing) == f"{title}({', '.join(f'{name}={value!r}' for name, value in values.items())})"
    )


def _docs(made: type, fields: dict) -> list[str | None]:
    methods = [getattr(made, f"{verb}_{name}") for name in fields for verb in ("get", "set")]
    return [made.__doc__, *(method.__doc__ for method in methods)]


def _wanted_docs(fields: dict[str, tuple[str, str]], documented: bool) -> list[str | None]:
    if not documented:
        return [None] * (1 + 2 * len(fields))
    docs: list[str | None] = ["Sorted by name."]
    for name, (kind, default) in fields.items():
        docs += [f"Return the {name}: {kind}.", f"Set the {name}: {kind}, by default {default}."]
    return docs


# No import, no loop, no call, and attributes of `self` alone: such code can neither hang nor reach out.
_OF_CLASSES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.arguments, ast.arg, ast.Name, ast.Load, ast.Store)
_OF_BODIES = (ast.Expr, ast.Constant, ast.Assign, ast.Attribute, ast.Return, ast.Dict, ast.JoinedStr)
_ALLOWED = (*_OF_CLASSES, *_OF_BODIES, ast.FormattedValue)


def _run(source: str) -> dict:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        of_self = not isinstance(node, ast.Attribute) or (isinstance(node.value, ast.Name) and node.value.id == "self")
        if not isinstance(node, _ALLOWED) or not of_self:
            raise ValueError(f"{type(node).__name__} is not allowed in an answer")
    builtins = {"__build_class__": __build_class__, "int": int, "str": str, "bool": bool}
    namespace = {"__builtins__": builtins, "__name__": "answer"}
    exec(compile(tree, "answer", "exec"), namespace)
    return namespace


def _type_and_default(rng: random.Random) -> tuple[str, str]:
    kind = rng.choice(("int", "str", "bool"))
    default = {"int": str(rng.randint(0, 9)), "str": f'"{rng.choice(WORDS)}"', "bool": str(rng.random() < 0.5)}[kind]
    return kind, default


def _thought(names: list[str]) -> str:
    lines, last, order = [], "start", ["start"]
    for place in range(len(names)):
        steps, best = [], "none"
        for i, name in enumerate(names):
            relation = "done, still" if name in order else "<" if best == "none" or name < best else ">"
            steps.append(f"{i} {name} {relation} {best}")
            best = name if relation == "<" else best
        lines.append(f"Place {place}, past {last}: {', '.join(steps)}. So {last} then {best}")
        last = best
        order.append(best)
    return "\n".join([*lines, f"Order: {' then '.join(order)} then end"])


def _answer(title: str, fields: dict[str, tuple[str, str]], documented: bool) -> str:
    docs = iter(_wanted_docs(fields, documented))

    def doc(indent: str) -> str:
        text = next(docs)
        return "" if text is None else f'\n{indent}"""{text}"""'

    parameters = "".join(f", {name}: {kind} = {default}" for name, (kind, default) in fields.items())
    parts = [f"class {title}:{doc('    ')}\n    def __init__(self{parameters}):"]
    parts[0] += "".join(f"\n        self._{name} = {name}" for name in fields)
    for name in fields:
        parts.append(f"    def get_{name}(self):{doc(' ' * 8)}\n        return self._{name}")
        parts.append(f"    def set_{name}(self, value):{doc(' ' * 8)}\n        self._{name} = value")
    pairs = ", ".join(f'"{name}": self._{name}' for name in fields)
    parts.append(f"    def to_dict(self):\n        return {{{pairs}}}")
    pairs = ", ".join(f"{name}={{self._{name}!r}}" for name in fields)
    parts.append(f'    def __repr__(self):\n        return f"{title}({pairs})"')
    return "\n\n".join(parts)
