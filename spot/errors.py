"""Errors for bad input. One sentence states what was expected, what was given and what to do.

InputError is a ValueError, which library users can catch. The command line prints its sentence
on stderr and exits with code 2. Any other exception is a bug.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """An argument, file or option is invalid. The message is one line and states what is valid."""

    def __init__(self, sentence: str = "") -> None:
        super().__init__(re.sub(r"\s*\n\s*", " ", str(sentence)))


def check_kind(what: str, value: object, *kinds: type, advice: str = "") -> None:
    """Raise InputError unless the value has one of these types. A bool does not count as an int."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise InputError(f"{what} must be {wanted}, got {type(value).__name__}{'; ' + advice if advice else ''}")


def unknown(what: str, name: object, known: Iterable[str], *, hint: str = "") -> InputError:
    """An InputError for an unknown name, suggesting the most similar known names."""
    names = sorted(known)
    near = get_close_matches(str(name), names, n=3, cutoff=0.6)
    if near:
        advice = f"did you mean {' or '.join(repr(match) for match in near)}?"
    elif len(names) <= 20:
        advice = f"choose one of {', '.join(names)}"
    else:
        advice = f"none of the {len(names)} known names is similar"
    return InputError(f"there is no {what} {name!r}; {advice}{'; ' + hint if hint else ''}")
