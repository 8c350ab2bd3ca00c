"""The command line: a dict from verb to function.

Each verb is one module in spot/commands holding a function of the verb's name; its signature
is the options and its docstring the help (through tyro). Modules load only when their verb is
called, so `spot --help` is immediate. To add a verb, write the function and list it in VERBS.
"""

import sys
from importlib import import_module
from inspect import getdoc

from spot.errors import InputError, unknown

VERBS: dict[str, str] = {
    "demo": "show the whole method in a minute, on built-in data or on a photo",
    "predict": "say what is in an image, and show the windows the model saw",
    "evaluate": "measure accuracy and kNN of placements, budgets and baselines",
    "search": "move tokens to where a model sees an image better, or worse",
    "saliency": "map what stands out in images",
    "retrofit": "teach a pretrained ViT to read off-grid tokens",
    "pretrain": "train a masked autoencoder on off-grid windows",
    "finetune": "fine-tune an encoder to classify",
    "delta": "keep a retrofit as what it adds to a timm checkpoint",
    "data": "describe the built-in data set and show its classes",
    "bench": "time models and baselines in turns, beside their multiply-adds",
    "study": "measure the paper's tables and figures, beside the paper's numbers",
}

EXAMPLE = "example: spot demo"


def main(arguments: list[str] | None = None) -> None:
    """Run one verb; bad input ends in one sentence on stderr and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
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
        print(f"spot: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("spot: stopped; what was finished is kept", file=sys.stderr)
        sys.exit(130)


def run(verb: str, arguments: list[str]) -> None:
    """Call the verb's function with arguments parsed after its signature."""
    if verb not in VERBS:
        raise unknown("command", verb, VERBS, hint="see spot --help")
    import tyro  # here, because it costs a third of a second

    module = import_module(f"spot.commands.{verb.replace('-', '_')}")
    function = getattr(module, verb.replace("-", "_"))
    tyro.cli(function, prog=f"spot {verb}", description=description(getdoc(function) or ""), args=arguments)


def description(docstring: str) -> str:
    """What stands above the options: the docstring without its "Args:", which tyro puts beside them."""
    parts = docstring.split("\n\n")
    return "\n\n".join(part for part in parts if not part.startswith("Args:"))


def overview() -> str:
    """What `spot --help` prints."""
    width = max((len(verb) for verb in VERBS), default=0)
    lines = ["spot: Vision Transformers whose tokens can be placed anywhere in an image", ""]
    lines += [f"  spot {verb:<{width}}  {summary}" for verb, summary in VERBS.items()]
    lines += ["", "spot VERB --help shows a verb's options.", EXAMPLE]
    return "\n".join(lines)
