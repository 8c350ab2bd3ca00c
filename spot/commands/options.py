"""Options that several verbs have, in one wording. A verb says `weights: options.Weights = None`."""

from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, arg

from spot.evaluation.options import Baseline as Baseline
from spot.evaluation.options import Saliency as Saliency
from spot.training.options import Options

MODEL = "vit-ti"  # what predict, search and demo --image use unless told otherwise: a retrofitted ViT-Ti/16
NAME = (
    "as spot models lists them: a built-in model or alias, a folder or file that spot saved, a hub id, or a timm name"
)

Model = Annotated[str, arg(help=f"the model, {NAME}")]
ModelArgument = Annotated[Positional[str], arg(metavar="MODEL", help=f"the model, {NAME}")]
ModelArguments = Annotated[Positional[tuple[str, ...]], arg(metavar="MODEL ...", help=f"models, {NAME}")]
Photos = Annotated[
    Positional[tuple[str, ...]], arg(metavar="IMAGE ...", help="image files, folders of images, or quoted patterns")
]
Weights = Annotated[Path | None, arg(help="a file with the timm model's weights, instead of downloading them")]
Data = Annotated[
    str,
    arg(
        help="a folder with one sub-folder per class, ImageNet's root, a timm data set, scenes, or needle: large "
        "scenes with a small object (needle:256 is of so many pixels; needle:DIR sets photographs into a canvas)"
    ),
]
DataArgument = Annotated[
    Positional[str],
    arg(metavar="DATA", help='a folder of images, with or without classes, a timm data set, or "scenes"'),
]
Prior = Annotated[str | None, arg(help="where tokens go; by default as the model says")]
Scale = Annotated[
    float | Literal["auto"] | None,
    arg(help="size of the windows: pixels between their samples, or auto; by default as the model says, usually 1"),
]
Seed = Annotated[int, arg(help="of whatever is drawn, together with each image's name")]
Split = Annotated[str, arg(help="val, train or test, where the data has several")]
SkipUnreadable = Annotated[bool, tyro.conf.FlagCreatePairsOff, arg(help="go on without images that cannot be read")]
Fit = Annotated[
    Literal["crop", "whole", "squash"],
    arg(
        help="how an image becomes what the model sees: its middle square, the whole image in its own shape, or "
        "squashed to a square"
    ),
]
Json = Annotated[Path | None, arg(help="write the table, and what made it, to this file; - is standard output")]
TrainingOptions = Annotated[Options, arg(name="")]
