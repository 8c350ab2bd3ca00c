"""The verbs of the command line.

Each is one module holding a function of the verb's name: its signature is the options, its docstring
the help (through tyro), and what it calls stands in the rooms below. Modules load only when their verb
is called, so `spot --help` is immediate. To add a verb, write the function and list it in VERBS.
"""

from collections.abc import Callable
from importlib import import_module

from spot.errors import unknown

VERBS: dict[str, str] = {
    "demo": "show the whole method in a minute, on built-in data or on a photo",
    "predict": "say what is in an image, and show the windows the model saw",
    "evaluate": "measure accuracy and kNN of placements, budgets and baselines",
    "search": "move tokens to where a model sees an image better, or worse",
    "play": "place tokens on a picture by hand, on a page in the browser",
    "saliency": "map what stands out in images",
    "retrofit": "teach a pretrained ViT to read off-grid tokens",
    "learn": "train where a model's tokens should go, without labels",
    "calibrate": "choose when a model may stop looking, without labels",
    "pretrain": "train a masked autoencoder on off-grid windows",
    "finetune": "fine-tune an encoder to classify",
    "delta": "keep a retrofit as what it adds to a timm checkpoint",
    "card": "write a model card for the hub, with what was measured",
    "embed": "write the features of a folder of images to one file",
    "export": "write a model as one ONNX or torch.export file, and verify it",
    "models": "list the models that come with spot, what each needs and how good it is",
    "data": "describe the built-in data set and show its classes",
    "bench": "time models and baselines in turns, beside their multiply-adds",
    "study": "measure the paper's tables and figures, beside the paper's numbers",
    "completion": "print what makes a shell complete verbs, options, models and priors",
}


def verb_function(verb: str) -> Callable[..., None]:
    """The function of a verb, from its module."""
    if verb not in VERBS:
        raise unknown("command", verb, VERBS, hint="see spot --help")
    function: Callable[..., None] = getattr(import_module(f"spot.commands.{verb}"), verb)
    return function
