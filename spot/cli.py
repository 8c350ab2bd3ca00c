"""The command line: parses a verb's options after its function's signature, and ends bad input in one sentence."""

import os
import re
import sys
from functools import wraps
from inspect import getdoc, signature
from typing import Any

from spot.commands import VERBS, verb_function
from spot.errors import InputError
from spot.models.reach import refuse_offline


def main(arguments: list[str] | None = None) -> None:
    """Run one verb; bad input ends in one sentence on stderr and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # Before torch is imported: threads that wait for each other sleep. Spinning is up to a tenth faster on an idle
    # machine, and eight times as slow where another program has one of two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return
    if arguments[0] == "--version":
        from spot import __version__

        print(f"spot {__version__}")
        return
    try:
        run(arguments[0], arguments[1:])
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        sys.stderr.close()
    except (InputError, OSError) as error:
        sentence = as_options(str(error), options_of(arguments[0]))
        print(f"spot: {sentence.encode(errors='surrogateescape').decode(errors='replace')}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print(f"spot: {str(stop) or 'stopped; what was finished is kept'}", file=sys.stderr)
        sys.exit(130)


def run(verb: str, arguments: list[str]) -> None:
    """Call the verb's function with arguments parsed after its signature."""
    function = verb_function(verb)
    import tyro  # here, because it costs a third of a second

    from spot.report import console

    @wraps(function)
    def begin(*args: Any, **options: Any) -> None:
        given = signature(function).bind(*args, **options).arguments
        weights = [given.get("weights"), *(getattr(each, "weights", None) for each in given.values())]  # training's
        fresh = [getattr(each, "fresh", None) is not None for each in given.values()]
        if isinstance(given.get("model"), str) and not any([*weights, *fresh]) and given.get("runtime") != "onnx":
            refuse_offline(given["model"])  # at once: the imports of a verb take seconds
        function(*args, **options)

    console.stderr = "-" in arguments  # where data goes to standard output, what is for people does not
    tyro.cli(begin, prog=f"spot {verb}", description=description(getdoc(function) or ""), args=arguments)


def options_of(verb: str) -> set[str]:
    """The names that a verb's arguments have in Python."""
    if verb not in VERBS:
        return set()
    names: set[str] = set()
    for name, parameter in signature(verb_function(verb)).parameters.items():
        fields: Any = getattr(getattr(parameter.annotation, "__origin__", None), "__dataclass_fields__", {})
        names |= {name, *fields}  # an option, or several in one
    return names


def as_options(sentence: str, names: set[str]) -> str:
    """A sentence for Python, such as "pass weights=FILE", as the command line says it: --weights FILE."""
    if "skip_unreadable" in names:
        sentence = sentence.replace("unreadable='skip'", "--skip-unreadable")

    def option(match: re.Match[str]) -> str:
        word, name, value = match.groups()
        return f"{word} --{name.replace('_', '-')} {value}" if name in names else match[0]

    return re.sub(r"\b(pass|got|another) ([a-z_]+)=(\S[^,;)\s]*)", option, sentence)


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
