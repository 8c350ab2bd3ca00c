"""Street signs: large photographs with small objects, `python -m paper.signs DATA WEIGHTS --models NAME=FOLDER …`

    python -m paper.signs signs vit_tiny.safetensors --u2netp u2netp.onnx --models "finder from boxes=boxes/model"

511 photographs of German streets with 1360 × 800 pixels, from GTSDB (Houben, Stallkamp, Salmen, Schlipsing, Igel:
"Detection of Traffic Signs in Real-World Images: The German Traffic Sign Detection Benchmark", IJCNN 2013). Each has
traffic signs of only one kind, or none: five classes. The paper has no such table, so all rows are ours.

There are three kinds of rows. *frozen*: a linear head on features of the retrofitted ViT-Ti; only the input differs.
*fine-tuned*: the whole ViT on shrunk pictures, with the steps and learning rates of the next kind. *finder*: models of
`spot learn --look glimpses`, trained with boxes or only with labels; *one stage*: the same with `--glimpses.candidates
0`. Costs include the finder or the saliency map. Results are cached in --cache.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import spot
from paper.provenance import stored
from paper.statistics import difference, share
from paper.study import Row
from spot import report
from spot.data.pictures import Pictures, boxes_to_places, read_boxes
from spot.errors import InputError
from spot.hashes import hash_model
from spot.models.family import at_budget, dense_model
from spot.models.glimpsed import Glimpsed
from spot.models.loading import load_source
from spot.models.spot_vit import SpotViT
from spot.placement.glimpses import glimpse_positions, whole_picture
from spot.placement.priors import isotropic
from spot.placement.saliency import OnnxSaliency, map_macs, rgb, spectral_residual
from spot.store import read_json, read_tensors, write_json, write_tensors
from spot.training.discovery import fit_head
from spot.training.glimpses import Glimpses, color_jitter, train_classifier
from tools.program import program

MARGIN, PATCH = 1.25, 16
KIND = "spot_signs"
MAP_SIDE = 64.0  # pixels: the side of a glimpse on the peak of a saliency map, which gives no sizes


@dataclass
class Street:
    """Pictures, the locations of their signs, and the cache folder."""

    train: Pictures
    val: Pictures
    places: dict[str, Tensor]  # by key: (n, 4), y, x and size in pixels, weight
    cache: Path
    u2net: Path | None = None
    others: Tensor = field(init=False)  # (M, 3): locations of all training signs, in pixels

    def __post_init__(self) -> None:
        self.others = torch.cat([self.places[key][:, :3] for key in self.train.keys])

    def told(self, key: str, pixels: Tensor) -> Tensor:
        """The glimpse (1, 1, 3) on the largest sign; without signs, at the place and size of another picture's sign."""
        own = self.places[key]
        place = own[own[:, 2].argmax(), :3] if len(own) else self.others[draw_for(key).integers(len(self.others))]
        return around(place, pixels)

    def chance(self, key: str, pixels: Tensor) -> Tensor:
        """A glimpse at the location and size of another picture's sign, whether or not this picture has a sign."""
        return around(self.others[draw_for(key).integers(len(self.others))], pixels)


def around(place: Tensor, pixels: Tensor) -> Tensor:
    """The glimpse (1, 1, 3) on a place (y, x and size in pixels), on whole pixels inside the picture like a crop."""
    height, width = pixels.shape[1:]
    y, x, size = place.tolist()
    top, left, side = whole_square(y, x, MARGIN * size, (height, width))
    return torch.tensor([[[(top + side / 2) / height, (left + side / 2) / width, float(side)]]])


def whole_square(y: float, x: float, side: float, size: tuple[int, int]) -> tuple[int, int, int]:
    """Top, left and side of the nearest square of whole pixels inside a picture of size (H, W)."""
    half = max(4, round(side / 2))
    top, left = (min(max(0, round(at) - half), length - 2 * half) for at, length in zip((y, x), size, strict=True))
    return max(0, top), max(0, left), 2 * half


def draw_for(key: str) -> np.random.Generator:
    """A random generator for a picture, seeded by its name."""
    return np.random.default_rng(list(key.encode()))


def normal(pixels: Tensor) -> Tensor:
    """Bytes (3, H, W) → the ViT's normalised input (1, 3, H, W)."""
    return pixels.float()[None] / 127.5 - 1


# Inputs of the frozen ViT: picture → image, and positions or None for its own grid

Seen = tuple[Tensor, Tensor | None]


def on_glimpse(pixels: Tensor, glimpse: Tensor) -> tuple[Tensor, Tensor]:
    """49 tokens in a glimpse (1, 1, 3) of the picture."""
    images = normal(pixels)
    return images, glimpse_positions(images, glimpse, 49, PATCH)


def frameless(street: Street, key: str, pixels: Tensor) -> Seen:
    images, positions = on_glimpse(pixels, street.told(key, pixels))
    return images, positions[..., :3].contiguous()


def spectral(street: Street, key: str, pixels: Tensor) -> Seen:
    small = F.interpolate(normal(pixels), (200, 340), mode="area")
    maps = spectral_residual(rgb(small, {"mean": (0.5,) * 3, "std": (0.5,) * 3}))
    return on_peak(pixels, F.avg_pool2d(maps[:, None], 15, 1, 7)[0, 0])


def u2net(street: Street, key: str, pixels: Tensor) -> Seen:
    assert street.u2net is not None
    return on_peak(pixels, OnnxSaliency(street.u2net)(pixels.float()[None] / 255)[0])


def on_peak(pixels: Tensor, map_: Tensor) -> Seen:
    """A glimpse at the maximum of a saliency map (R, C)."""
    best = int(map_.argmax())
    place = [(best // map_.shape[1] + 0.5) / map_.shape[0], (best % map_.shape[1] + 0.5) / map_.shape[1], MAP_SIDE]
    return on_glimpse(pixels, torch.tensor([[place]]))


def shrunk(width: int, street: Street, key: str, pixels: Tensor) -> Seen:
    return shrink_to(normal(pixels), width), None


def shrink_to(images: Tensor, width: int) -> Tensor:
    """Images (B, 3, H, W) resized to this width, with a height in whole patches."""
    return shrink(images, shrunk_size(images, width))


def shrunk_size(images: Tensor, width: int) -> tuple[int, int]:
    """(H, W) in whole patches for images resized to this width."""
    return round(width * images.shape[-2] / images.shape[-1] / PATCH) * PATCH, width


def shrink(images: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(images, size, mode="bilinear", antialias=True, align_corners=False)


def cut(pixels: Tensor, glimpse: Tensor, samples: int) -> Tensor:
    """A glimpse (1, 1, 3) cut out at whole pixels and resized with antialiasing: (1, 3, S, S)."""
    height, width = pixels.shape[1:]
    y, x, side = glimpse[0, 0].tolist()
    top, left, side = whole_square(y * height, x * width, side, (height, width))
    part = normal(pixels[:, top : top + side, left : left + side])
    return F.interpolate(part, (samples, samples), mode="bilinear", antialias=True, align_corners=False)


TOLD = "told the box"
SEEN: dict[str, tuple[int, Callable[..., Seen]]] = {  # number of tokens, and the input
    f"{TOLD}: 49 tokens in its region": (49, lambda street, key, pixels: on_glimpse(pixels, street.told(key, pixels))),
    f"{TOLD}: the same, positions in the picture": (49, frameless),
    f"{TOLD}: cut out, resized to 112 pixels": (
        49, lambda street, key, pixels: (cut(pixels, street.told(key, pixels), 112), None)
    ),
    "a glimpse at random": (49, lambda street, key, pixels: on_glimpse(pixels, street.chance(key, pixels))),
    "a glimpse on the peak of the spectral residual": (49, spectral),
    "a glimpse on the peak of U²-Net-p": (49, u2net),
    "even windows of 16 pixels": (49, lambda _, key, pixels: (normal(pixels), isotropic(normal(pixels), 49))),
    "even windows that tile the picture": (
        49, lambda _, key, pixels: (normal(pixels), whole_picture(normal(pixels), 49, PATCH))
    ),
    "picture shrunk to 160 pixels across": (60, partial(shrunk, 160)),
    "picture shrunk to 224 pixels across": (112, partial(shrunk, 224)),
    "picture shrunk to 320 pixels across": (240, partial(shrunk, 320)),
    "picture shrunk to 680 pixels across": (1050, partial(shrunk, 680)),
    "all patches": (4250, partial(shrunk, 1360)),
}  # fmt: skip
WIDTHS = (160, 224, 320)  # of the shrunk pictures that the whole ViT is fine-tuned on


def pooled(model: SpotViT, seen: Seen) -> Tensor:
    """Features (1, D) of one input."""
    images, positions = seen
    return model.forward_head(
        model.forward_features(images, model.grid(images) if positions is None else positions), pre_logits=True
    )


@torch.no_grad()
def features(street: Street, name: str, model: SpotViT, part: Pictures, split: str) -> Tensor:
    """Features (M, D) of an input for all pictures, cached so that an interrupted run resumes."""
    file = street.cache / f"{slug(name)}-{split}.safetensors"
    known = read_tensors(file, KIND)[0]["features"] if file.is_file() else torch.zeros(0, model.embed_dim)
    made = list(known[:, None].unbind())
    for index in report.track(range(len(made), len(part)), f"{name}, {split}", len(part) - len(made)):
        made.append(pooled(model, SEEN[name][1](street, part.keys[index], part.pixels(index))))
        if len(made) % 16 == 0 or len(made) == len(part):
            write_tensors(file, {"features": torch.cat(made)}, KIND, {})
    return torch.cat(made)


def slug(name: str) -> str:
    """A name converted for use in a file name."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def with_head(street: Street, name: str, model: SpotViT) -> Tensor:
    """Logits (M, classes) of a linear head on frozen features; a fifth of train selects its penalty."""
    x, y = features(street, name, model, street.train, "train"), torch.tensor(street.train.labels)
    of_class = [[row for row, label in enumerate(y.tolist()) if label == each] for each in y.unique().tolist()]
    second = sorted(row for rows in of_class for row in rows[2::5])  # every fifth picture of each class
    first = sorted({*range(len(y))} - {*second})
    scores = {}
    for decay in (1e-3, 1e-2, 1e-1):
        fit_head(model, x[first], y[first], decay)
        with torch.no_grad():
            scores[decay] = float((model.vit.head(x[second]).argmax(1) == y[second]).float().mean())
    fit_head(model, x, y, max(scores, key=lambda decay: scores[decay]))
    with torch.no_grad():
        return model.vit.head(features(street, name, model, street.val, "val"))


# The whole ViT, fine-tuned on shrunk pictures


class Shrunk(Glimpses):
    """Random shrunk views of whole pictures for `train_classifier`, in place of glimpses."""

    def __init__(self, pictures: Pictures, width: int, seed: int = 0) -> None:
        self.pictures, self.width, self.seed = pictures, width, seed
        self.small: dict[int, Tensor] = {}

    def batch(self, rows: Sequence[int], draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        views = []
        for row in rows:
            height, width = shrunk_size(self.pictures.pixels(row), self.width)
            if row not in self.small:  # somewhat larger than the view, so that the view can move
                large = (round(1.12 * height), round(1.12 * width))
                self.small[row] = shrink(normal(self.pictures.pixels(row)), large)[0]
            room = (length - seen + 1 for length, seen in zip(self.small[row].shape[1:], (height, width), strict=True))
            top, left = (int(draw.integers(each)) for each in room)
            part = self.small[row][:, top : top + height, left : left + width]
            views.append(color_jitter((part + 1) / 2, draw))
        return torch.stack(views) * 2 - 1, torch.tensor([self.pictures.labels[row] for row in rows])


def fine_tuned(street: Street, source: Any, width: int) -> tuple[SpotViT, Tensor]:
    """The ViT fine-tuned on pictures of this width, and its cached logits on val."""
    file = street.cache / f"fine-tuned-{width}.safetensors"
    model = at_budget(source, 49)
    model.reset_classifier(len(street.train.classes))
    if not file.is_file():
        torch.manual_seed(0)
        train_classifier(model, Shrunk(street.train, width), state=file.with_suffix(".pt"))
        with torch.no_grad():
            each = (shrink_to(normal(street.val.pixels(index)), width) for index in range(len(street.val)))
            logits = torch.cat([model(images, model.grid(images)) for images in each])
        write_tensors(file, {"logits": logits}, KIND, {})
    return model, read_tensors(file, KIND)[0]["logits"]


# Models with a finder


@torch.no_grad()
def with_finder(street: Street, model: SpotViT, name: str, most: int = 6) -> dict[str, Tensor]:
    """Places with scores (M, 6, 4) in val, and logits (M, 6, classes) of tokens and crops there, and of the box."""
    file = street.cache / f"{name}-{hash_model(model)[:12]}.safetensors"
    if not file.is_file():
        several, side, made = Glimpsed(model, most), round(model.tokens**0.5) * PATCH, []
        for index in report.track(range(len(street.val)), name, len(street.val)):
            key, pixels = street.val.keys[index], street.val.pixels(index)
            images, box = normal(pixels), street.told(key, pixels)
            found = several.finder.find(images, most)
            crops = torch.cat([cut(pixels, found.glimpses[:, [number]], side) for number in range(most)])
            told = cut(pixels, box, side)
            made.append(
                {
                    "places": torch.cat([found.glimpses[0], found.scores[0, :, None]], 1),
                    "tokens": several.each(images, found.glimpses)[0],
                    "crops": model(crops, model.grid(crops)),
                    "told": several.each(images, box)[0],
                    "told crops": model(told, model.grid(told)),
                }
            )
        write_tensors(file, {part: torch.stack([each[part] for each in made]) for part in made[0]}, KIND, {})
    return dict(read_tensors(file, KIND)[0])


# The table


@torch.no_grad()
def cost(cache: Path, name: str, call: Callable[[], Any], times: int = 15) -> dict[str, float]:
    """Multiply-adds of a call, and its processor time on one thread in milliseconds: the median of several calls.

    It is for one picture in memory at batch 1, measured once and stored by its name.
    """
    file = cache / "costs.json"
    known: dict[str, dict[str, float]] = read_json(file) if file.is_file() else {}
    if name not in known:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # it counts its products
            call()
        spent = []
        for _ in range(times):
            begun = time.process_time()  # not wall time: the machine may be busy
            call()
            spent.append(time.process_time() - begun)
        known[name] = {"GMACs": counter.get_total_flops() / 2e9, "ms": 1000 * median(spent)}
        write_json(file, known)
    return known[name]


def settings() -> dict[str, Any]:
    """The results' settings."""
    return {"models": {"vit-ti": {"source": "vit-ti", **stored("vit-ti")}}, "data": "GTSDB"}


def main(
    data: Path,
    weights: Path,
    models: tuple[str, ...] = (),
    u2netp: Path | None = None,
    skip: tuple[str, ...] = (),
    out: Path = Path("docs/results/signs"),
    cache: Path = Path("runs/signs-study"),
) -> None:
    """Measure the table of signs.

    Args:
        data: the folder signs, with train, val and boxes.csv.
        weights: of the timm ViT-Ti that vit-ti is based on.
        models: folders of spot learn --look glimpses, each as NAME=FOLDER with a name for the table: "finder from
            boxes", "finder from labels", "one stage, from boxes" or "one stage, from labels".
        u2netp: the ONNX file of U²-Net-p, for its row.
        skip: rows to leave out, by the beginning of their name, such as "frozen: all" or "fine-tuned".
    """
    from paper.signs_page import write

    named = [given.partition("=") for given in models]
    if not all(path for _, _, path in named):
        raise InputError(f"models are given as NAME=FOLDER, got {', '.join(models)}")
    torch.set_num_threads(1)
    train, val = Pictures.open(data, "train"), Pictures.open(data, "val")
    known: dict[str, Tensor] = {}
    for part in (train, val):
        known |= boxes_to_places(read_boxes(data / "boxes.csv", part))
    cache.mkdir(parents=True, exist_ok=True)
    street, truth = Street(train, val, known, cache, u2netp), torch.tensor(val.labels)
    source = load_source("vit-ti", weights=weights)
    some, key = val.pixels(0), val.keys[0]
    predicted: dict[str, Tensor] = {}
    rows: list[Row] = []

    def add(training: str, name: str, tokens: int, logits: Tensor, price: Row) -> None:
        predicted[f"{training}: {name}"] = answer = logits.argmax(1)
        rows.append({"training": training, "input": name, "tokens": tokens, **share(answer == truth), **price})

    def frozen(tokens: int) -> SpotViT:
        model = (dense_model(source) if tokens == 4250 else at_budget(source, 49)).eval().requires_grad_(False)
        model.reset_classifier(len(train.classes))
        return model

    def price_of(name: str, model: SpotViT) -> dict[str, float]:
        tokens, see = SEEN[name]
        return cost(cache, f"frozen {name}", lambda: pooled(model, see(street, key, some)), 3 if tokens > 1000 else 15)

    for name, (tokens, see) in SEEN.items():
        if f"frozen: {name}".startswith(skip) or (see is u2net and u2netp is None):
            continue
        model = frozen(tokens)
        price = price_of(name, model)
        extra = (map_macs(str(u2netp)) or 0) / 1e9 if see is u2net else 0
        add("frozen", name, tokens, with_head(street, name, model), {**price, "GMACs": price["GMACs"] + extra})
    for width in WIDTHS:
        name, small = f"picture shrunk to {width} pixels across", shrink_to(normal(some), width)
        if not f"fine-tuned: {name}".startswith(skip):
            tuned, logits = fine_tuned(street, source, width)
            call = partial(tuned.eval().requires_grad_(False), small, tuned.grid(small))
            add("fine-tuned", name, len(tuned.grid(small)[0]), logits, cost(cache, f"fine-tuned {width}", call))
    found: dict[str, tuple[SpotViT, dict[str, Tensor]]] = {}
    looks = {"all 4,250 patches": price_of("all patches", frozen(4250))}
    for training, _, path in named:
        model = spot.load(path).eval().requires_grad_(False)
        each, finder = model.tokens, slug(training)
        made = with_finder(street, model, f"{finder}-{each}")
        found[f"{finder}-{each}"] = model, made
        for count in (1, 3, 6) if each < 25 else (1, 2):
            several = Glimpsed(model, count)
            price = cost(cache, f"{finder} {count} × {each}", partial(several, normal(some)))
            places, side = f"{count} place{'s' * (count > 1)} of {each} tokens", round(each**0.5) * PATCH
            add(training, places, count * each, several.decide(made["tokens"][:, :count]), price)
            name = f"the same places, cut out and resized to {side} pixels ({count} × {each})"
            add(training, name, count * each, several.decide(made["crops"][:, :count]), {})
        several = Glimpsed(model, 1)
        for seen, name in (("told", f"{TOLD}: {each} tokens"), ("told crops", f"{TOLD}: cut out, {each} tokens")):
            add(training, name, each, several.decide(made[seen]), {})
        finding: Any = model.policy
        looks[f"the finder alone, {training}"] = cost(cache, finder, partial(finding.find, normal(some), 3))
    base = predicted.get("finder from labels: 3 places of 16 tokens")
    for row, answer in zip(rows, predicted.values(), strict=True):
        row |= {} if base is None else difference(answer == truth, base == truth)
    write(rows, looks, street, found, predicted, out)


if __name__ == "__main__":
    program("paper.signs", main, __doc__)
