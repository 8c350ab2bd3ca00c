"""A configuration from a file may be a stranger's: what it may ask timm for, and which values make sense."""

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer

from spot.errors import InputError

DATA = ("mean", "std", "interpolation", "crop_pct", "input_size", "label_names", "label_descriptions")
MOST_BLOCKS, MOST_SIDE = 1000, 20_000  # a header can claim any size


def refuse_steering(name: str, options: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Refuse a file's configuration that would make timm open or fetch anything else than an architecture."""
    allowed = {key for kind in (VisionTransformer, Eva) for key in inspect.signature(kind.__init__).parameters}
    strange = sorted({*options} - allowed) + sorted({*data} - {*DATA})
    if ":" in name or "/" in name or strange:
        raise InputError(f"the configuration asks timm for {strange or name}, which no saved model needs; refused")


def refuse_nonsense(options: Mapping[str, Any], data: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse values of a file's configuration that would fail only later, or fill the memory."""
    depth, sides = options.get("depth", 1), list(flat_numbers(options.get("img_size", 1)))
    if not isinstance(depth, int) or not 0 < depth <= MOST_BLOCKS or not all(0 < side <= MOST_SIDE for side in sides):
        raise InputError(f"a model has 1 to {MOST_BLOCKS} blocks and images of at most {MOST_SIDE} pixels a side")
    for name in ("mean", "std", "crop_pct", "input_size"):
        values = list(flat_numbers(data.get(name, 1.0)))
        counts = {"crop_pct": {1}, "input_size": {3}}.get(name, {1, 3, options.get("in_chans", 3)})
        good = all(math.isfinite(value) and (name == "mean" or value > 0) for value in values)
        if not good or (name in data and len(values) not in counts):
            count = " or ".join(map(str, sorted(counts)))
            raise InputError(f"the configuration's {name} must be {count} numbers, got {data.get(name)!r:.80}")
    for names in (config.get("class_names") or (), data.get("label_names") or ()):
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise InputError(f"the configuration's class names must be a list of names, got {names!r:.80}")
    named = (data.get("interpolation", ""), config.get("saliency", ""), config.get("tokenizer"))
    if not all(isinstance(name, str) for name in named):
        raise InputError(f"the configuration's interpolation, saliency and tokenizer must be names, got {named!r:.80}")


def flat_numbers(value: Any) -> Iterator[float]:
    """The numbers of a number or of a list; anything else among them counts as NaN."""
    for each in value if isinstance(value, (list, tuple)) else [value]:
        yield each if isinstance(each, (int, float)) and not isinstance(each, bool) else math.nan
