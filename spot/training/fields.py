"""Text as the value of a typed field: "1e-4" for a float, "(25, 49)" for a tuple of ints, "none" where None may be."""

import ast
import types
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal, Union, get_args, get_origin

from spot.errors import InputError


def pairs(words: Iterable[str], needed: str) -> dict[str, str]:
    """NAME=VALUE words by name."""
    values = {}
    for word in words:
        name, equals, values[name] = word.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"{needed}, got {word!r}")
    return values


def literal(text: str) -> Any:
    """Text as the Python value it writes; a bare word stays as it is."""
    with suppress(ValueError, SyntaxError):
        return ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
    return text


def read(value: Any, hint: Any, name: str) -> Any:
    """Text as a Python value of the type, or a sentence about what would be."""
    value = literal(value) if isinstance(value, str) and hint is not str else value
    fitted = fit(value, hint)
    if fitted is REFUSED:
        raise InputError(f"recipe field {name} must be {spell(hint)}, got {value!r}")
    return fitted


REFUSED = object()


def fit(value: Any, hint: Any) -> Any:
    """The value as the type has it (4 as 4.0, a list as a tuple), or REFUSED."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Literal:
        return value if value in inner else REFUSED
    if kind in (Union, types.UnionType):
        return next((fitted for each in inner if (fitted := fit(value, each)) is not REFUSED), REFUSED)
    if kind is tuple:
        if not isinstance(value, (tuple, list)):
            return REFUSED
        wanted = [inner[0]] * len(value) if inner[-1] is Ellipsis else list(inner)
        parts = [fit(part, each) for part, each in zip(value, wanted, strict=False)]
        return REFUSED if len(value) != len(wanted) or any(part is REFUSED for part in parts) else tuple(parts)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value if type(value) is hint or (hint is type(None) and value is None) else REFUSED


def spell(hint: Any) -> str:
    """A type as a person writes its values."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    return str(getattr(hint, "__name__", hint) if not get_args(hint) else hint).replace("typing.", "")
