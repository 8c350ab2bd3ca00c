"""Bad input is answered with one sentence: what was needed, what came, what to do.

InputError is a ValueError, so library users catch what they expect; the command line
turns it into that sentence on stderr and exit code 2. Anything else is a bug.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """What the caller passed cannot be used; the message says what would be, in one line."""

    def __init__(self, sentence: str = "") -> None:
        super().__init__(re.sub(r"\s*\n\s*", " ", str(sentence)))


def check_kind(what: str, value: object, *kinds: type, advice: str = "") -> None:
    """Refuse a value of another type; True and False are no numbers."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise InputError(f"{what} must be {wanted}, got {type(value).__name__}{'; ' + advice if advice else ''}")


def unknown(what: str, name: object, known: Iterable[str], *, hint: str = "") -> InputError:
    """An InputError for a name that is not among the known ones, suggesting the nearest."""
    names = sorted(known)
    near = get_close_matches(str(name), names, n=3, cutoff=0.6)
    if near:
        advice = f"did you mean {' or '.join(repr(match) for match in near)}?"
    elif len(names) <= 20:
        advice = f"choose one of {', '.join(names)}"
    else:
        advice = f"{len(names)} are known, none of them near"
    return InputError(f"there is no {what} {name!r}; {advice}{'; ' + hint if hint else ''}")
