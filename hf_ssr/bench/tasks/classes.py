"""
*class*: write a Python class whose fields are sorted by name.

The thought is a selection sort: each place goes through all fields and keeps the first name not yet placed, one
comparison a step. The answer is run, not compared.
"""

import ast
import inspect
import random

from .sample import Sample

_NAMES = """
age batch city color count date depth flag group height image index job key label level limit mode model note owner page
path phone port price queue rate role score shape size speed state step street tag team time title unit user version
weight width year zone
"""
_CLASSES = "Account Animal Book Camera Car Device Event File Game House Item Lamp Parcel Robot Server Task"
_WORDS = "black blue brown gold gray green pink red white yellow"
NAMES, CLASSES, WORDS = (tuple(text.split()) for text in (_NAMES, _CLASSES, _WORDS))
MAX_FIELDS = 8
PIECES = (
    *NAMES,
    *CLASSES,
    *(f'"{word}"' for word in WORDS),
    *("Write the Python class ", ". Sort its fields by name.", ": int = ", ": str = ", ": bool = ", "True", "False"),
    *(
        " = ",
        ": ",
        "Place ",
        " of ",
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
)


def make(rng: random.Random) -> Sample:
    """A class of 3 to 8 fields, smaller ones more often; `data` is its name and its fields in sorted order."""
    count = min(rng.randint(3, MAX_FIELDS), rng.randint(3, MAX_FIELDS))
    names = rng.sample(NAMES, count)
    fields = {name: _type_and_default(rng) for name in names}
    title = rng.choice(CLASSES)
    lines = [f"{i} {name}: {kind} = {default}" for i, (name, (kind, default)) in enumerate(fields.items(), 1)]
    prompt = "\n".join([f"Write the Python class {title}. Sort its fields by name.", *lines])
    ordered = {name: fields[name] for name in sorted(names)}
    return Sample("class", prompt, _thought(names), _answer(title, ordered), (title, ordered))


def check(sample: Sample, answer: str) -> bool:
    """Whether the class runs, and its order, types, defaults, getters, setters, `to_dict` and `__repr__` are right."""
    title, fields = sample.data
    try:
        return _behaves(_run(answer)[title], title, fields)
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


# No import, no loop, no call, and attributes of `self` alone: such code can neither hang nor reach out.
_ALLOWED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.arguments, ast.arg, ast.Name, ast.Load, ast.Store)
_ALLOWED += (ast.Constant, ast.Assign, ast.Attribute, ast.Return, ast.Dict, ast.JoinedStr, ast.FormattedValue)


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
    for place in range(1, len(names) + 1):
        steps, best = [], "none"
        for i, name in enumerate(names, 1):
            relation = "done, still" if name in order else "<" if best == "none" or name < best else ">"
            steps.append(f"{i} {name} {relation} {best}")
            best = name if relation == "<" else best
        lines.append(f"Place {place} of {len(names)}, past {last}: {', '.join(steps)}. So {last} then {best}")
        last = best
        order.append(best)
    return "\n".join([*lines, f"Order: {' then '.join(order)} then end"])


def _answer(title: str, fields: dict[str, tuple[str, str]]) -> str:
    parameters = "".join(f", {name}: {kind} = {default}" for name, (kind, default) in fields.items())
    parts = [f"class {title}:\n    def __init__(self{parameters}):"]
    parts[0] += "".join(f"\n        self._{name} = {name}" for name in fields)
    for name in fields:
        parts.append(f"    def get_{name}(self):\n        return self._{name}")
        parts.append(f"    def set_{name}(self, value):\n        self._{name} = value")
    pairs = ", ".join(f'"{name}": self._{name}' for name in fields)
    parts.append(f"    def to_dict(self):\n        return {{{pairs}}}")
    pairs = ", ".join(f"{name}={{self._{name}!r}}" for name in fields)
    parts.append(f'    def __repr__(self):\n        return f"{title}({pairs})"')
    return "\n\n".join(parts)
