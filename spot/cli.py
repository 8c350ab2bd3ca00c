"""The command line: parses options from a verb's function signature and reports bad input in one sentence."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import getdoc

from spot.commands import VERBS, verb_function
from spot.errors import InputError


def main(arguments: list[str] | None = None) -> None:
    """Run one verb. Bad input prints one sentence on stderr and exits with code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # Waiting threads sleep instead of spinning; must be set before torch is imported. Spinning is up to 10 % faster on
    # an idle machine, but 8 times slower when another program uses one of two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return
    if arguments[0] == "--tyro-print-completion":  # bash, zsh or tcsh: prints the completion of all verbs
        from tyro.extras import subcommand_cli_from_dict

        subcommand_cli_from_dict({verb: verb_function(verb) for verb in VERBS}, prog="spot", args=arguments)
    if arguments[0] == "--version":
        from spot import __version__

        print(f"spot {__version__}")
        return
    with one_sentence("spot"):
        run_verb(arguments[0], arguments[1:])


@contextmanager
def one_sentence(program: str) -> Iterator[None]:
    """Report bad input, a full disk or Ctrl-C in one sentence on stderr. Only bugs show a traceback."""
    try:
        yield
    except BrokenPipeError:  # the reader of the pipe, such as head, has exited
        sys.stderr.close()
    except (InputError, OSError) as error:
        sentence = str(error).encode(errors="surrogateescape").decode(errors="replace")  # file names may not be UTF-8
        print(f"{program}: {sentence}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print(f"{program}: {str(stop) or 'stopped; finished work is kept'}", file=sys.stderr)
        sys.exit(130)


def run_verb(verb: str, arguments: list[str]) -> None:
    """Parse the arguments by the signature of the verb's function, and call it."""
    function = verb_function(verb)
    import tyro  # imported late: it takes a third of a second

    from spot.report import console

    console.stderr = "-" in arguments  # tables and messages go to stderr if data goes to stdout
    function.__doc__ = re.sub(r"\n {8,}", " ", getdoc(function) or "")  # tyro keeps the line breaks in an option's text
    markers = (tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff)
    tyro.cli(function, prog=f"spot {verb}", args=arguments, config=markers)


def overview() -> str:
    """The output of `spot --help`."""
    width = max(map(len, VERBS))
    lines = ["spot: Vision Transformers whose tokens can be placed anywhere in an image", ""]
    lines += [f"  spot {verb:<{width}}  {summary}" for verb, summary in VERBS.items()]
    lines += ["", "spot COMMAND --help shows the options of a command.", "example: spot demo"]
    return "\n".join(lines)
