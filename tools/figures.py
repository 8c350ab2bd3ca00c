"""Draw the pictures of the README and the guides: python -m tools.figures [--weights W] [--street MODEL PHOTO].

--weights: the folder with timm's deit_tiny_patch16_224.fb_in1k.safetensors. Writes docs/images/photograph.png, one
photograph as a ViT sees it and as its retrofit does with an eighth of the tokens; docs/images/gallery.jpg, where every
prior places tokens and where a search moves them, towards the dense prediction and away from it;
docs/images/fit.jpg, a wide photograph cropped and whole; and docs/images/alike.jpg, points whose features are like
that of a chosen one. The photographs are in docs/images/photos, with their licences.

--street: a model of `spot learn --look glimpses`, and a photograph below val of the data of signs. Writes
docs/images/street.jpg: the places that the model classified, what its tokens saw, and the predictions. Those of other
inputs are the ones that `python -m paper.signs` wrote to docs/results/signs/signs.json.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

import spot
from paper.program import program
from spot import report
from spot.data.picture import evaluation_transform, open_image
from spot.evaluation.photos import names_of, short
from spot.models.family import Source, at_budget
from spot.models.glimpsed import Glimpsed
from spot.placement.glimpses import cut_out
from spot.placement.saliency import resolve_saliency, rgb
from spot.plots import save
from spot.plots.layout import PlainFigure
from spot.plots.placements import PATH_COLORS, Gallery, covered, draw_image, draw_windows, gallery_figure
from spot.store import read_json
from spot.tokens.position_embedding import grid_positions

NAME = "deit_tiny_patch16_224.fb_in1k"
DOCS = Path(__file__).parents[1] / "docs"
IMAGES = DOCS / "images"
TOKENS = 25
PRIORS = ("uniform", "gaussian", "sobol", "isotropic", "center", "salient", "focus")
POINTS = {"cat": (0.42, 0.3), "coffee": (0.45, 0.5), "rocket": (0.4, 0.5)}  # (y, x), chosen by eye: eye, cup, rocket
BESIDE = {  # other inputs of the same street, by their names in the study
    "frozen: picture shrunk to 224 pixels across": "112 patches of the street at 224 pixels",
    "frozen: picture shrunk to 680 pixels across": "1,050 patches, at 680 pixels",
    "frozen: all patches": "all 4,250 patches",
}
COLOURS = ("#ffd21f", "#ff8c1a", "#ff5ca8")  # of the street's places
STEPS, LR = 30, 1e-2  # longer than the paper's searches, so that the way of a token is seen


def main(weights: Path | None = None, street: tuple[Path, Path] | None = None, out: Path = IMAGES) -> None:
    """Draw the figures that the given files allow."""
    if street is not None:
        study = read_json(DOCS / "results" / "signs" / "signs.json")
        save(draw_street(spot.load(street[0]).eval(), street[1], study), out / "street.jpg")
    if weights is not None:
        photographs(weights, out)
    report.say(f"The figures are in {out}.")


def photographs(weights: Path, out: Path) -> None:
    """Draw all figures of the photographs in docs/images/photos."""
    files = sorted((IMAGES / "photos").glob("*.jpg"))
    family = spot.Family(f"{NAME}+spot", weights=weights / f"{NAME}.safetensors")
    vit, model = family.model(family.cells), family.model(TOKENS)
    save(photograph(vit, model, IMAGES / "photos" / "coffee.jpg"), out / "photograph.png")
    save(gallery(vit, model, files), out / "gallery.jpg")
    save(fits(family, IMAGES / "photos" / "rocket.jpg"), out / "fit.jpg")
    save(alike(vit, files), out / "alike.jpg")


def opened(model: spot.SpotViT, file: Path) -> tuple[Tensor, Tensor]:
    """A photograph as the model takes it (1, 3, H, W), and as a person sees it (3, H, W)."""
    images = model.transform()(open_image(file))[None]
    return images, rgb(images, model.data_config)[0]


@torch.no_grad()
def best(model: spot.SpotViT, images: Tensor, positions: Tensor, count: int = 1) -> list[tuple[str, float]]:
    """The most probable classes, in percent."""
    names = names_of(model)
    values, indices = model(images, positions)[0].softmax(0).topk(count)
    return [(short(names[i]), 100 * p) for i, p in zip(indices.tolist(), values.tolist(), strict=True)]


def photograph(vit: spot.SpotViT, model: spot.SpotViT, file: Path) -> Figure:
    """The grid, the placed tokens, the pixels they cover, and the predictions of the ViT and of its retrofit."""
    images, picture = opened(model, file)
    grid, positions = vit.grid(images), model.place(images, tokens=TOKENS, prior="focus", keys=[file.name])
    figure = PlainFigure(13, 3.6, dpi=130)
    dense, free, visible, answers = figure.subplots(1, 4, width_ratios=[1, 1, 1, 0.95])
    draw_image(dense, picture)
    draw_windows(dense, picture, grid[0], vit.patch_size, (1.0, 1.0, 1.0), linewidth=0.5)
    dense.set_title(f"ViT: {len(grid[0])} patches on a grid", fontsize=11)
    draw_image(free, picture)
    draw_windows(free, picture, positions[0], model.patch_size, PATH_COLORS(1.0), linewidth=1.2)
    free.set_title(f"SPoT: {TOKENS} windows, placed anywhere", fontsize=11)
    mask = covered(picture, positions[0], model.patch_size)
    draw_image(visible, picture * mask)
    visible.set_title(f"all that they cover: {mask.mean():.0%} of the pixels", fontsize=11)
    told = {
        f"the ViT, {len(grid[0])} patches": (best(vit, images, grid, 2), "0.55"),
        f"the ViT, the {TOKENS} windows": (best(vit, images, positions, 2), "0.75"),
        f"retrofitted, the {TOKENS} windows": (best(model, images, positions, 2), PATH_COLORS(0.55)),
    }
    height = 0.0
    for title, (classes, colour) in told.items():
        answers.text(0, height, title, fontsize=10, fontweight="bold", va="center")
        for name, percent in classes:
            height += 1
            answers.barh(height, percent, color=colour, height=0.75)
            answers.text(2, height, f"{name} {percent:.0f} %", fontsize=10, va="center")
        height += 1.4
    answers.set(xlim=(0, 100), ylim=(height - 0.6, -0.7))
    answers.axis("off")
    return figure


def gallery(vit: spot.SpotViT, model: spot.SpotViT, files: Sequence[Path]) -> Figure:
    """Placements of every prior with their predictions, then the moves of searches."""
    placed, moved, harmed = [], [], []
    spectral = resolve_saliency("spectral", model)
    for file in files:
        images, picture = opened(model, file)
        grid = model.grid(images)
        (goal, dense), *_ = best(vit, images, grid)
        dense_logits = vit(images, grid).detach()
        target = int(dense_logits.argmax())
        mask = spectral(images, [file.name])[0]
        for prior in PRIORS:
            positions = model.place(images, tokens=TOKENS, prior=prior, keys=[file.name])
            placed.append((picture, positions, "{}: {} {:.0f} %".format(prior, *best(model, images, positions)[0])))
        for prior in ("isotropic", "center", "salient", "focus"):
            start = model.place(images, tokens=TOKENS, prior=prior, keys=[file.name])
            result = spot.search(model, images, None, start, objective="agree", steps=STEPS, lr=LR, dense=dense_logits)
            step = int(result.best_step)
            chance = 100 * result.logits[0].softmax(-1)[:, target]
            change = f"from {prior}: {goal} {chance[0]:.0f} → {chance[step]:.0f} % (all: {dense:.0f} %)"
            moved.append((picture, result.trajectory[0, : step + 1], change, mask))
        start = model.place(images, tokens=TOKENS, prior="isotropic")
        result = spot.search(model, images, torch.tensor([target]), start, objective="ascent", steps=STEPS, lr=LR)
        chance = 100 * result.logits[0].softmax(-1)[:, target]
        harmed.append((picture, result.trajectory[0], f"{goal} {chance[0]:.0f} → {chance[-1]:.0f} %"))
    pictures, windows, answers = zip(*placed, strict=True)
    title = f"Where priors place {TOKENS} tokens, and the retrofitted ViT's answer"
    places = Gallery(pictures, windows, captions=answers, window=model.patch_size, columns=len(PRIORS), title=title)
    pictures, paths, changes, masks = zip(*moved, strict=True)
    title = f"Moved by gradient towards the prediction of all {len(model.grid())} tokens, over a saliency map"
    ways = Gallery(pictures, paths, masks=masks, captions=changes, columns=4, title=title)
    pictures, paths, falls = zip(*harmed, strict=True)
    title = "Moved adversarially, to make that class less probable"
    worse = Gallery(pictures, paths, captions=falls, adversarial=True, columns=4, title=title)
    return gallery_figure([places, ways, worse], width=15)


def fits(source: Source, file: Path, tokens: int = 49) -> Figure:
    """A photograph as each way of fitting gives it to the model, the windows on it, and the answer."""
    figure = PlainFigure(13, 4.2, dpi=110)
    for axes, fit in zip(figure.subplots(1, 3, width_ratios=[1, 1.5, 1]), ("crop", "whole", "squash"), strict=True):
        images = evaluation_transform(at_budget(source).data_config, fit=fit)(open_image(file))[None]
        model = at_budget(source, tokens, image_size=(images.shape[2], images.shape[3]))
        positions = model.place(images, prior="isotropic")
        picture = rgb(images, model.data_config)[0]
        draw_image(axes, picture)
        draw_windows(axes, picture, positions[0], model.patch_size, PATH_COLORS(1.0), linewidth=1.0)
        (name, percent), *_ = best(model, images, positions)
        height, width = picture.shape[-2:]
        axes.set_title(f"--fit {fit}, {width} × {height}: {name} {percent:.0f} %", fontsize=11)
    figure.suptitle(f"{tokens} tokens on a wide photograph", fontsize=12, fontweight="bold")
    return figure


@torch.no_grad()
def alike(model: spot.SpotViT, files: Sequence[Path], side: int = 56) -> Figure:
    """A point of each photograph, and how like its feature those of all points of all photographs are."""
    opened_all = [opened(model, file) for file in files]
    points = grid_positions((side, side))
    features = torch.cat([model.features_at(images, points[None]) for images, _ in opened_all])  # (M, side², D)
    features = F.normalize(features - features.mean((0, 1)), dim=-1)  # what all points have in common says nothing
    figure = PlainFigure(3.3 * (len(files) + 1), 3.5 * len(files), dpi=100)
    rows = figure.subplots(len(files), len(files) + 1, squeeze=False)
    for number, (axes, file) in enumerate(zip(rows, files, strict=True)):
        y, x = POINTS.get(file.stem, (0.5, 0.5))
        chosen = features[number, int(y * side) * side + int(x * side)]
        draw_image(axes[0], opened_all[number][1])
        height, width = opened_all[number][1].shape[-2:]
        axes[0].plot(x * width, y * height, "o", markersize=12, markerfacecolor="none", color="white", mew=3)
        axes[0].set_title("a point", fontsize=11)
        for panel, (_, picture), likeness in zip(axes[1:], opened_all, features @ chosen, strict=True):
            draw_image(panel, picture)
            shown = likeness.view(side, side)
            panel.imshow(shown, extent=(0, width, height, 0), vmin=-0.2, vmax=0.8, alpha=0.65, cmap="magma")
            panel.set_title(f"how like it: up to {likeness.max():.2f}", fontsize=11)
    return figure


@torch.no_grad()
def draw_street(model: spot.SpotViT, photo: Path, study: dict[str, Any]) -> Figure:
    """The street with the places that were classified, each as its tokens see it, and the predictions."""
    images = evaluation_transform(model.data_config, fit="full")(open_image(photo))[None]
    picture = rgb(images, model.data_config)[0]
    pixels, (height, width) = (255 * picture).round().byte(), picture.shape[-2:]
    several = Glimpsed(model)
    samples = round(several.tokens_per_glimpse**0.5) * model.patch_size  # a side of an inset
    glimpses = several.finder.find(images, several.glimpses).glimpses
    logits = several.glimpse_logits(images, glimpses)
    names = names_of(model)
    figure = PlainFigure(13, 5.6, dpi=110)
    wide, narrow = figure.subfigures(1, 2, width_ratios=[2.5, 1])
    axes = wide.subplots()
    draw_image(axes, picture)
    axes.set_title(f"{width} × {height} pixels: {several.tokens} tokens on {several.glimpses} places", fontsize=12)
    *cells, answers = narrow.subplots(several.glimpses + 1, 1, height_ratios=[*[1] * several.glimpses, 0.9])
    for number, (inset, colour) in enumerate(zip(cells, COLOURS, strict=False)):
        y, x, side = glimpses[0, number].tolist()
        corner = (x * width - side / 2, y * height - side / 2)
        axes.add_patch(Rectangle(corner, side, side, fill=False, edgecolor=colour, linewidth=2.5))
        draw_image(inset, cut_out(pixels, y * height, x * width, side, samples) / 255)
        inset.add_patch(Rectangle((0, 0), 1, 1, fill=False, edgecolor=colour, linewidth=6, transform=inset.transAxes))
        best = logits[0, number].softmax(0).max(0)
        inset.set_title(f"{names[int(best.indices)]} {best.values * 100:.0f} %", fontsize=11)
    kind = f"{photo.parent.parent.name}/{photo.parent.name}/{photo.name}"
    row = study["keys"].index(kind)
    lines = [f"{text}: {study['predicted'][name][row]}" for name, text in BESIDE.items() if name in study["predicted"]]
    here = names[int(several.picture_logits(logits)[0].argmax())]
    answers.text(
        0.5, 0.95, f"{several.tokens} placed tokens: {here}", ha="center", va="top", fontsize=12, weight="bold"
    )
    answers.text(0.5, 0.7, "\n".join(lines), ha="center", va="top", fontsize=10.5, linespacing=1.5)
    answers.axis("off")
    return figure


if __name__ == "__main__":
    program("tools.figures", main, __doc__)
