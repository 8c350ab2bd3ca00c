"""Locate objects in large pictures from picture labels alone.

1. A frozen dense ViT processes each picture in tiles. A linear layer predicts class scores for each token. A picture's
   score is the log-sum-exp over its tokens, and picture labels train the layer (multiple-instance learning).
2. Candidates are the peaks of the score map of the picture's class, in two sizes. The frozen ViT computes features of
   each candidate as a glimpse, and a linear head is fitted on one candidate per picture. Each picture then selects the
   candidate with the highest probability of its label, and the head is refitted, for a few rounds.
3. A finder is trained on the selected places, and its detections in all pictures are the next candidates for step 2.
   It has to generalise across pictures, so it does not detect places that were selected by chance.

Pictures of the class `none` contain no object. The weight of a place is the probability of the label there. Pictures
without a likely place are excluded from later training.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spot import report
from spot.data.large_pictures import LargePictures
from spot.errors import InputError
from spot.models.family import Source, dense_model
from spot.models.spot_vit import SpotViT
from spot.options import GlimpseOptions
from spot.placement.finder import MARGIN, Finder, highest_peaks
from spot.store import read_tensors, write_tensors
from spot.training.finder import Places, detect, glimpse_of, train_finder

KIND = "spot_tiles"
TILES = 7  # tiles per forward pass
BATCH = 24  # glimpses per forward pass
MAP_STEPS, FINDER_STEPS = 200, 700  # of training the layer for score maps, and the finder in a round
SIDES = (48.0, 80.0)  # sides of candidates from tiles, in pixels
LIKELY = (0.3, 0.5)  # minimum probability of the label at a place: for candidates from tiles, and from a finder
DECAY = (0.03, 0.1)  # L2 penalty of the head, for the same two cases


@torch.no_grad()
def tile_features(dense: SpotViT, pictures: LargePictures, folder: Path) -> list[Tensor]:
    """Tokens (R, C, D), float16, of each picture, computed in tiles of the model's size and cached in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    features = []
    for key, picture in report.track(pictures.items(), "tiles", len(pictures)):
        file = folder / f"{key.replace('/', '_')}.safetensors"
        if not file.is_file():
            tokens = dense_tokens(dense, picture.float()[None] / 127.5 - 1)
            write_tensors(file, {"tokens": tokens.half()}, KIND, {})
        features.append(read_tensors(file, KIND)[0]["tokens"])
    return features


def dense_tokens(dense: SpotViT, image: Tensor) -> Tensor:
    """Tokens (R, C, D) of an image (1, 3, H, W), from tiles of the model's size; overlapping tiles are averaged."""
    window, tile = dense.patch_size, dense.img_size[0]
    rows, columns = (length // window for length in image.shape[-2:])
    if min(image.shape[-2:]) < tile:
        raise InputError(f"a picture must have at least {tile} pixels along each side, got {tuple(image.shape[-2:])}")
    cells = tile // window
    starts = [
        [round(begin) for begin in np.linspace(0, count - cells, max(1, -(-count // (cells - 1))))]
        for count in (rows, columns)
    ]
    places = [(top, left) for top in starts[0] for left in starts[1]]
    tiles = torch.cat([image[..., top * window :, left * window :][..., :tile, :tile] for top, left in places])
    prefix = dense.num_prefix_tokens
    tokens = torch.cat([dense.forward_features(part, dense.grid(part))[:, prefix:] for part in tiles.split(TILES)])
    total, times = torch.zeros(rows, columns, tokens.shape[-1]), torch.zeros(rows, columns, 1)
    for (top, left), each in zip(places, tokens, strict=True):
        total[top : top + cells, left : left + cells] += each.unflatten(0, (cells, cells))
        times[top : top + cells, left : left + cells] += 1
    return total / times


def class_maps(features: list[Tensor], labels: Tensor, none: int, classes: int, seed: int) -> list[Tensor]:
    """Class scores (R, C, classes) of every picture's tokens, learned from picture labels; 0 for the class `none`."""
    flat = [each.flatten(0, 1) for each in features]
    sample = torch.cat([each[::8] for each in flat]).float()
    mean, width = sample.mean(0), sample.std(0) + 1e-4
    draw = torch.Generator().manual_seed(seed)
    weight = (0.01 * torch.randn(len(mean), classes, generator=draw)).requires_grad_()
    bias = torch.full((classes,), -4.0, requires_grad=True)
    kinds = torch.arange(classes) != none
    optimizer = torch.optim.Adam([weight, bias], 0.01)
    for _ in report.track(range(MAP_STEPS), "labels of pictures", MAP_STEPS):
        loss = 1e-3 * weight[:, kinds].square().sum()
        rows = torch.randperm(len(flat), generator=draw)[:64]
        bags = [((flat[row].float() - mean) / width @ weight + bias).logsumexp(0) * kinds for row in rows]
        loss = loss + F.cross_entropy(torch.stack(bags), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return [(((each.float() - mean) / width) @ weight + bias) * kinds for each in features]


@torch.no_grad()
def pooled_features(model: SpotViT, views: Tensor) -> Tensor:
    """Features (B, D) of glimpses (B, 3, S, S)."""
    parts = views.split(BATCH)
    return torch.cat(
        [model.forward_head(model.forward_features(part, model.grid(part)), pre_logits=True) for part in parts]
    )


def fit_head(model: SpotViT, features: Tensor, labels: Tensor, decay: float = 1e-2) -> None:
    """Set the head by logistic regression on features (M, D), standardised, with an L2 penalty."""
    mean, width = features.mean(0), features.std(0) + 1e-6
    x = (features - mean) / width
    weight = torch.zeros(features.shape[1], model.num_classes, requires_grad=True)
    bias = torch.zeros(model.num_classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=80, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ weight + bias, labels) + decay * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    with torch.no_grad():
        model.vit.head.weight.copy_((weight / width[:, None]).T)
        model.vit.head.bias.copy_(bias - (mean / width) @ weight)


def peak_centers(scores: Tensor, count: int, window: int) -> Tensor:
    """Centres (count, 2), in pixels, of the highest peaks of scores (R, C), whose cells are `window` pixels wide."""
    cell = highest_peaks(scores[None], count, 5)[0]
    return torch.stack([cell // scores.shape[1] + 0.5, cell % scores.shape[1] + 0.5], 1) * window


def most_likely_places(
    model: SpotViT, pictures: LargePictures, candidates: Places, options: GlimpseOptions, none: int, *, later: bool
) -> dict[str, Tensor]:
    """Select the most likely of each picture's candidates (n, 3): (1, 4), y, x, size and weight, if likely enough.

    The first round uses each picture's first candidate. later: the candidates come from a finder.
    """
    draw, samples = np.random.default_rng(options.seed), round(options.tokens**0.5) * model.patch_size
    features, others = {}, []
    for key, picture in report.track(pictures.items(), "candidates", len(pictures)):
        height, width = picture.shape[1:]
        anywhere = torch.tensor([draw.uniform(0, height), draw.uniform(0, width), draw.uniform(20, 90)])
        squares = torch.cat([candidates[key][:, :3], anywhere[None]]).tolist()
        views = torch.stack([glimpse_of(picture, y, x, MARGIN * size, samples) for y, x, size in squares])
        pooled = pooled_features(model, views / 127.5 - 1)
        features[key] = pooled[:-1]
        others.append(pooled[-1:])
    label = dict(zip(pictures.keys, pictures.labels, strict=True))
    chosen = {key: 0 for key in pictures.keys if label[key] != none}
    likely = dict.fromkeys(chosen, 1.0)
    empty = torch.cat([*(features[key] for key in pictures.keys if label[key] == none), *others])
    for _ in range(6):
        held = [key for key in chosen if likely[key] > 0.2] or list(chosen)
        x = torch.cat([empty, *(features[key][chosen[key]][None] for key in held)])
        fit_head(model, x, torch.tensor([none] * len(empty) + [label[key] for key in held]), DECAY[later])
        with torch.no_grad():
            for key in chosen:
                share = model.vit.head(features[key]).softmax(1)[:, label[key]]
                chosen[key], likely[key] = int(share.argmax()), float(share.max())
    return {
        key: torch.cat([candidates[key][row, :3], torch.tensor([likely[key]])])[None]
        for key, row in chosen.items()
        if likely[key] > LIKELY[later]
    }


def tile_candidates(scores: list[Tensor], pictures: LargePictures, none: int, window: int) -> dict[str, Tensor]:
    """Candidates (n, 3) by key: three peaks of the picture's class, or for pictures of `none` one peak per class."""
    candidates = {}
    for key, label, score in zip(pictures.keys, pictures.labels, scores, strict=True):
        asked = [label] if label != none else [each for each in range(len(pictures.classes)) if each != none]
        count = 1 if label == none else 3
        middles = torch.cat([peak_centers(score[..., each], count, window) for each in asked])
        sides = middles.new_tensor(SIDES) / MARGIN
        candidates[key] = torch.cat([middles.repeat_interleave(2, 0), sides.repeat(len(middles))[:, None]], 1)
    return candidates


def discover_places(
    model: SpotViT, source: Source, pictures: LargePictures, folder: Path, options: GlimpseOptions, none: int
) -> dict[str, Tensor]:
    """Places (n, 4) by key, learned from picture labels alone; see the module docstring.

    Args:
        model: classifies candidates; its head is refitted.
        source: its dense ViT processes tiles.
        folder: intermediate results, from which an interrupted run resumes.
        none: index of the class of pictures without an object.
    """
    places: dict[str, Tensor] = {}
    seed = options.seed
    finder, dense = Finder(model.patch_size, longest=options.longest), dense_model(source).eval()
    for number in range(options.rounds + 1):
        file = folder / f"places-{number}.safetensors"
        if not file.is_file():
            if number == 0:
                features = tile_features(dense, pictures, folder / "tiles")
                scores = class_maps(features, torch.tensor(pictures.labels), none, len(pictures.classes), seed)
                candidates = tile_candidates(scores, pictures, none, dense.patch_size)
            else:
                located, state = pictures.with_places(places, none), folder / f"round-{number}.pt"
                train_finder(
                    finder, located, places, steps=FINDER_STEPS, each=8, hard_negatives=False, seed=seed, state=state
                )
                candidates = detect(finder, pictures, 4)
            chosen = most_likely_places(model, pictures, candidates, options, none, later=number > 0)
            write_tensors(file, chosen, "spot_places", {})
        places = read_tensors(file, "spot_places", "places, as spot learn keeps them")[0]
    return places
