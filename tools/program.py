"""How a program of this folder begins and ends: folders on the command line, one sentence when it fails."""

import sys
from collections.abc import Callable
from pathlib import Path

from spot.errors import InputError


def program(name: str, about: str | None, main: Callable[..., object], *, needed: int, runs: str = "") -> None:
    """Call main with the `needed` folders of the command line and the one for runs, if any, which may be left out."""
    words, most = sys.argv[1:], needed + bool(runs)
    if not needed <= len(words) <= most or words[:1] in (["-h"], ["--help"]):
        raise SystemExit(about)
    try:
        main(*map(Path, [*words, runs][:most]))
    except (InputError, OSError) as error:
        raise SystemExit(f"{name}: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(f"{name}: stopped; what was finished is kept, and the same command goes on") from None
