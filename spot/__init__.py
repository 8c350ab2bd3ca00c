"""SPoT: Vision Transformers whose tokens can be placed anywhere in an image.

Public names are imported on first use, which keeps ``import spot`` and ``spot --help`` fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spot.evaluation.accuracy import Setting as Setting
    from spot.evaluation.accuracy import evaluate as evaluate
    from spot.models.baselines import BASELINES as BASELINES
    from spot.models.cascade import Cascade as Cascade
    from spot.models.family import Family as Family
    from spot.models.loading import load as load
    from spot.models.loading import load_policy as load_policy
    from spot.models.shipped import list_models as list_models
    from spot.models.spot_vit import SpotViT as SpotViT
    from spot.models.spot_vit import adapt as adapt
    from spot.placement.files import Placements as Placements
    from spot.placement.oracle import SearchResult as SearchResult
    from spot.placement.oracle import SearchSettings as SearchSettings
    from spot.placement.oracle import search as search
    from spot.placement.priors import PRIORS as PRIORS
    from spot.tokens.position_embedding import KernelPositionEmbedding as KernelPositionEmbedding
    from spot.tokens.windows import windows as windows

__version__ = "0.3.0"

_HOMES = {
    "BASELINES": "spot.models.baselines",
    "Cascade": "spot.models.cascade",
    "Family": "spot.models.family",
    "KernelPositionEmbedding": "spot.tokens.position_embedding",
    "PRIORS": "spot.placement.priors",
    "Placements": "spot.placement.files",
    "SearchResult": "spot.placement.oracle",
    "SearchSettings": "spot.placement.oracle",
    "Setting": "spot.evaluation.accuracy",
    "SpotViT": "spot.models.spot_vit",
    "adapt": "spot.models.spot_vit",
    "evaluate": "spot.evaluation.accuracy",
    "list_models": "spot.models.shipped",
    "load": "spot.models.loading",
    "load_policy": "spot.models.loading",
    "search": "spot.placement.oracle",
    "windows": "spot.tokens.windows",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'spot' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
