"""How a program of tools/ or paper/ begins and ends."""

from collections.abc import Callable, Sequence

import tyro

from spot.cli import one_sentence


def program(
    name: str, main: Callable[..., object], about: str | None = None, arguments: Sequence[str] | None = None
) -> None:
    """Run `python -m NAME`. Its arguments are main's: those without a default by their place, the others by their name.

    Bad input ends in one sentence on stderr and exit code 2. about: instead of main's docstring.
    """
    with one_sentence(name):
        config = (tyro.conf.PositionalRequiredArgs,)
        tyro.cli(main, prog=f"python -m {name}", description=about, args=arguments, config=config)
