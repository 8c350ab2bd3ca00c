"""The command line: parses options from a verb's function signature and reports bad input in one sentence."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import wraps
from inspect import getdoc, signature
from typing import Annotated, Any

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
        run(arguments[0], arguments[1:])


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
        print(f"{program}: {str(stop) or 'stopped; what was finished is kept'}", file=sys.stderr)
        sys.exit(130)


def run(verb: str, arguments: list[str]) -> None:
    """Parse the arguments by the signature of the verb's function, and call it."""
    function = verb_function(verb)
    import tyro  # imported late: it takes a third of a second

    from spot.options import refuse_unknown_prior
    from spot.report import console

    @wraps(function)
    def begin(*args: Any, **options: Any) -> None:
        given = signature(function).bind(*args, **options).arguments
        for each in (given.get("prior"), *(getattr(value, "prior", None) for value in given.values())):
            refuse_unknown_prior(each)  # before the verb's imports, which take seconds
        function(*args, **options)

    console.stderr = "-" in arguments  # tables and messages go to stderr if data goes to stdout
    del begin.__wrapped__  # type: ignore[attr-defined]  # else tyro reads the annotations of the wrapped function
    begin.__signature__ = signature(function)  # type: ignore[attr-defined]
    begin.__annotations__ = {name: plain(kind) for name, kind in function.__annotations__.items()}
    docstring = getdoc(function) or ""
    begin.__doc__, text = option_texts(docstring), description(docstring)
    tyro.cli(begin, prog=f"spot {verb}", description=text, args=arguments, config=(tyro.conf.DisallowNone,))


def plain(annotation: Any) -> Any:
    """Annotate an option so that its help omits "(default: None)". The fields of a dataclass are changed in place."""
    from tyro.conf import arg

    shared: Any = getattr(annotation, "__origin__", None)
    if isinstance(shared, type) and is_dataclass(shared):
        for kind in (each for each in shared.__mro__ if "__annotations__" in vars(each)):
            kind.__annotations__.update({name: plain(each) for name, each in kind.__annotations__.items()})
    elif not any(getattr(each, "help_behavior_hint", None) for each in getattr(annotation, "__metadata__", ())):
        return Annotated[annotation, arg(help_behavior_hint=default_in_help)]
    return annotation


def default_in_help(label: str) -> str:
    """The default shown after an option's help text; empty if it is None or "", which the help text explains."""
    return f"(default: {label})" if label not in ("None", "") else ""


def description(docstring: str) -> str:
    """The help text above the options: the docstring without "Args:", which tyro shows beside each option."""
    parts = docstring.split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in parts if not part.startswith("Args:"))


def option_texts(docstring: str) -> str:
    """The docstring with each option's text on one line and without its last period, as tyro prints it as it is."""
    return re.sub(r"(?m)^( {4}\w+: .*)\.$", r"\1", re.sub(r"\n {8,}", " ", docstring))


def overview() -> str:
    """The output of `spot --help`."""
    width = max(map(len, VERBS))
    lines = ["spot: Vision Transformers whose tokens can be placed anywhere in an image", ""]
    lines += [f"  spot {verb:<{width}}  {summary}" for verb, summary in VERBS.items()]
    lines += ["", "spot COMMAND --help shows the options of a command.", "example: spot demo"]
    return "\n".join(lines)
