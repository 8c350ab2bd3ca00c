"""The command line: parses a verb's options after its function's signature, and ends bad input in one sentence."""

import os
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
    """Run one verb; bad input ends in one sentence on stderr and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # Before torch is imported: threads that wait for each other sleep. Spinning is up to a tenth faster on an idle
    # machine, and eight times as slow where another program has one of two cores.
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
    """End bad input, a full disk or Ctrl-C in one sentence on stderr; a traceback is for bugs."""
    try:
        yield
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        sys.stderr.close()
    except (InputError, OSError) as error:
        sentence = str(error).encode(errors="surrogateescape").decode(errors="replace")  # file names may be any bytes
        print(f"{program}: {sentence}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print(f"{program}: {str(stop) or 'stopped; what was finished is kept'}", file=sys.stderr)
        sys.exit(130)


def run(verb: str, arguments: list[str]) -> None:
    """Call the verb's function with arguments parsed after its signature."""
    function = verb_function(verb)
    import tyro  # here, because it costs a third of a second

    from spot.options import refuse_unknown_prior
    from spot.report import console

    @wraps(function)
    def begin(*args: Any, **options: Any) -> None:
        given = signature(function).bind(*args, **options).arguments
        for each in (given.get("prior"), *(getattr(value, "prior", None) for value in given.values())):
            refuse_unknown_prior(each)  # at once: the imports of a verb take seconds
        function(*args, **options)

    console.stderr = "-" in arguments  # where data goes to standard output, what is for people does not
    del begin.__wrapped__  # type: ignore[attr-defined]  # tyro would read its annotations
    begin.__signature__ = signature(function)  # type: ignore[attr-defined]
    begin.__annotations__ = {name: plain(kind) for name, kind in function.__annotations__.items()}
    told = description(getdoc(function) or "")
    tyro.cli(begin, prog=f"spot {verb}", description=told, args=arguments, config=(tyro.conf.DisallowNone,))


def plain(annotation: Any) -> Any:
    """An option's annotation, for a help that does not say "(default: None)"; several in a dataclass are changed."""
    from tyro.conf import arg

    shared: Any = getattr(annotation, "__origin__", None)
    if isinstance(shared, type) and is_dataclass(shared):
        for kind in (each for each in shared.__mro__ if "__annotations__" in vars(each)):
            kind.__annotations__.update({name: plain(each) for name, each in kind.__annotations__.items()})
    elif not any(getattr(each, "help_behavior_hint", None) for each in getattr(annotation, "__metadata__", ())):
        return Annotated[annotation, arg(help_behavior_hint=default_in_help)]
    return annotation


def default_in_help(label: str) -> str:
    """What stands behind an option's text: nothing where the default is None or empty, as the text then says."""
    return f"(default: {label})" if label not in ("None", "") else ""


def description(docstring: str) -> str:
    """What stands above the options: the docstring without its "Args:", which tyro puts beside them."""
    parts = docstring.split("\n\n")
    return "\n\n".join(part for part in parts if not part.startswith("Args:"))


def overview() -> str:
    """What `spot --help` prints."""
    width = max(map(len, VERBS))
    lines = ["spot: Vision Transformers whose tokens can be placed anywhere in an image", ""]
    lines += [f"  spot {verb:<{width}}  {summary}" for verb, summary in VERBS.items()]
    lines += ["", "spot VERB --help shows a verb's options.", "example: spot demo"]
    return "\n".join(lines)
