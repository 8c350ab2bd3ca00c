"""The verbs of the command line.

Each verb is a function in the module of its name (the training verbs share one). Through tyro, the
signature defines the options and the docstring the help. The other packages contain the implementation.
Modules are imported only when their verb is called, which keeps `spot --help` fast. To add a verb, write
the function and list it in VERBS.
"""

from collections.abc import Callable
from importlib import import_module

from spot.errors import unknown

VERBS: dict[str, str] = {
    "demo": "show the method in a minute, on built-in data",
    "predict": "classify images, and draw the windows the model used",
    "evaluate": "measure the accuracy of placements, budgets and baselines",
    "search": "optimise token positions by gradient",
    "play": "place tokens on a picture by hand, in the browser",
    "saliency": "write saliency maps of images",
    "retrofit": "fine-tune a pretrained ViT to work with few tokens",
    "learn": "train a network that places tokens, or finds small objects",
    "calibrate": "calibrate early exit, without labels",
    "pretrain": "train a masked autoencoder (MAE) on windows at any position",
    "finetune": "fine-tune a model on your labelled images",
    "embed": "write the features of images to one file",
    "export": "write a model as one ONNX or torch.export file, and verify it",
    "models": "list the models that ship with spot, with their accuracies",
    "bench": "time models, baselines and runtimes, and compare with their multiply-adds",
}


def verb_function(verb: str) -> Callable[..., None]:
    """Import and return the function of a verb."""
    if verb not in VERBS:
        raise unknown("command", verb, VERBS, hint="see spot --help")
    module = "train" if verb in ("retrofit", "pretrain", "finetune") else verb
    function: Callable[..., None] = getattr(import_module(f"spot.commands.{module}"), verb)
    return function
