"""What the programs of paper/ and tools/ have in common: how they begin and end, and the retrofits they measure."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import tyro
from torch import Tensor

import spot
from spot.cli import one_sentence
from spot.data.folders import read_keys
from spot.data.images import Images, data_for
from spot.models.shipped import ALIASES

SET_ASIDE = Path(__file__).parents[1] / "tools" / "set_aside.txt"  # the photographs for choices, not for training


def program(
    name: str, main: Callable[..., object], about: str | None = None, arguments: Sequence[str] | None = None
) -> None:
    """Run `python -m NAME`. Its arguments are main's: those without a default by their place, the others by their name.

    Bad input ends in one sentence on stderr and exit code 2. about: instead of main's docstring.
    """
    with one_sentence(name):
        config = (tyro.conf.PositionalRequiredArgs,)
        tyro.cli(main, prog=f"python -m {name}", description=about, args=arguments, config=config)


def images_set_aside(model: spot.SpotViT, train: Path) -> Images:
    """The photographs of the folder that are set aside from training, for choices."""
    data = data_for(model, str(train))
    assert isinstance(data, Images)
    data.select(read_keys(SET_ASIDE))
    return data


def shipped_retrofits(weights: Path) -> Iterator[tuple[str, spot.Family]]:
    """The retrofits that ship, by their short names; `weights` is the folder with timm's files."""
    for alias, name in ALIASES.items():
        yield alias, spot.Family(alias, weights=weights / f"{name.removesuffix('+spot')}.safetensors")


def divergence(dense: Tensor, sparse: Tensor) -> Tensor:
    """The KL divergence (M,) of log-probabilities (M, classes) from the dense ViT's."""
    return torch.nn.functional.kl_div(sparse, dense, reduction="none", log_target=True).sum(1)
