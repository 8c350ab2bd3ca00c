"""spot demo: the whole method in about a minute, on the built-in model, or on a photo of your own."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PRIORS = ("uniform", "gaussian", "sobol", "isotropic", "center", "salient", "focus")
ORACLE, DROPOUT = "oracle", "patch dropout"


def demo(
    *,
    image: Path | None = None,
    model: str | None = None,
    weights: Path | None = None,
    tokens: tuple[int, ...] = (),
    scenes: int = 320,
    gallery: int = 10,
    out: Path = Path("demo"),
    seed: int = 0,
) -> None:
    """Show what placing tokens freely is worth: a table, searched placements, and accuracy against cost.

    Without arguments it runs on the built-in scenes and the built-in model and downloads nothing.
    With --image it shows the same on a photograph, with any timm ViT.

    Args:
        image: a photograph, instead of the built-in scenes.
        model: by default the built-in scenes-a, or for a photograph a ViT-Ti/16 from timm.
        weights: a file with the timm model's weights, instead of downloading them.
        tokens: budgets; by default 9 16 36 64 on scenes and 25 49 100 196 on a photograph.
        scenes: how many scenes to classify.
        gallery: how many searched placements to draw.
        out: folder for the pictures.
        seed: of random placements.

    example: spot demo --image photo.jpg --model vit_tiny_patch16_224.augreg_in21k_ft_in1k
    """
    from spot.errors import InputError

    if scenes < 32 or gallery < 1:
        raise InputError("the demo needs at least 32 scenes, so that every class is there, and one for the gallery")
    if len(set(tokens)) < len(tokens):
        raise InputError(f"each budget is shown once, got {' '.join(map(str, tokens))}")
    refuse_unwritable(out)
    if image is None:
        on_scenes(model or "scenes-a", weights, tokens or (9, 16, 36, 64), scenes, gallery, out, seed)
    else:
        name = model or "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
        on_photo(image, name, weights, tokens or (25, 49, 100, 196), out, seed)


def refuse_unwritable(folder: Path) -> None:
    """Refuse a folder that pictures cannot be written to, before the work is done."""
    from spot.errors import InputError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}; choose another folder with --out") from error


def on_scenes(
    name: str, weights: Path | None, budgets: Sequence[int], count: int, gallery: int, out: Path, seed: int
) -> None:
    """The paper's main table in small, and its two pictures."""
    import spot
    from spot import report
    from spot.data.images import data_for
    from spot.data.scenes import CLASSES
    from spot.errors import InputError
    from spot.plots import save
    from spot.plots.accuracy import accuracy

    loaded = spot.load(name, weights=weights)
    if loaded.num_classes != len(CLASSES):
        raise InputError(f"{name} knows {loaded.num_classes} classes, the scenes are of {len(CLASSES)}; use --image")
    data: Any = data_for(loaded, "scenes", split="test", limit=count)
    rows = read_scenes(loaded, grid_parent(loaded, name), data, budgets, seed)
    searches = search_scenes(loaded, data, budgets)
    rows += [oracle_row(budget, found, data) for budget, found in searches.items()]
    report.show(
        side_by_side(rows, budgets),
        f"Top-1 accuracy, %, of {name} on {count} scenes it has never seen",
        digits=1,
        caption=f"{DROPOUT}: the ViT on a random part of its grid. salient: tokens drawn from the object's mask. "
        "focus: even coverage drawn towards it. "
        f"{ORACLE}: isotropic tokens after five steps of search with the label known: what placing could give.",
    )
    middle = sorted(budgets)[min(1, len(budgets) - 1)]
    draw_gallery(loaded, data, searches[middle], gallery, out / "placements.png")
    save(accuracy(with_costs(loaded, rows), title=f"{name}: what accuracy costs"), out / "accuracy.png")
    farewell(rows, budgets, len(loaded.grid()), out)


def grid_parent(model: Any, name: str) -> Any:
    """The ViT that the model was retrofitted from, if it is built in, else the model itself."""
    import spot
    from spot.models.checkpoints import built_in

    return spot.load(f"{name}-grid") if f"{name}-grid" in built_in() else model


def read_scenes(model: Any, parent: Any, data: Any, budgets: Sequence[int], seed: int) -> list[dict[str, Any]]:
    """Accuracy of every prior at every budget, and of patch dropout, in one pass."""
    from spot.data.images import loader
    from spot.evaluation.accuracy import Setting, evaluate
    from spot.models.patch_dropout import PatchDropout

    cells = len(parent.grid())
    settings = [Setting(PatchDropout(parent, n), seed=seed, name=DROPOUT) for n in budgets if n <= cells]
    settings += [Setting(prior, n, seed) for prior in PRIORS for n in budgets]

    def masks(images: Any, keys: Sequence[str]) -> Any:
        return data.draw([int(key.rpartition("/")[2]) for key in keys]).masks

    return evaluate(model, loader(data, 64), settings, saliency=masks, title="reading scenes").rows()


def search_scenes(model: Any, data: Any, budgets: Sequence[int]) -> dict[int, Any]:
    """The oracle on all scenes from isotropic placements, for each budget."""
    import spot
    from spot import report

    scenes = data.draw(range(len(data)))
    found = {}
    for budget in report.track(budgets, "searching"):
        model.tokens, model.prior = budget, "isotropic"
        found[budget] = spot.search(model, scenes.images, scenes.labels, model.place(scenes.images), max_batch=64)
    return found


def oracle_row(budget: int, found: Any, data: Any) -> dict[str, Any]:
    from spot.evaluation.accuracy import wilson

    labels = data.draw(range(len(data))).labels
    right = (found.logits[:, -1].argmax(1) == labels).double().mean().item()
    low, high = wilson(right, len(labels))
    return {"placement": ORACLE, "tokens": budget, "top1": 100 * right, "low": 100 * low, "high": 100 * high}


def side_by_side(rows: Sequence[Mapping[str, Any]], budgets: Sequence[int]) -> list[dict[str, Any]]:
    """A line per placement and a column per budget, as the paper prints them."""
    table: dict[str, dict[str, Any]] = {}
    for row in rows:
        line = table.setdefault(row["placement"], {"placement": row["placement"]})
        line[f"{row['tokens']} tokens"] = row["top1"]
    order = ["placement", *(f"{budget} tokens" for budget in budgets)]
    return [{name: line.get(name) for name in order} for line in table.values()]


def draw_gallery(model: Any, data: Any, found: Any, count: int, path: Path) -> None:
    """The scenes whose class became most probable by moving tokens."""
    from spot.placement.saliency import rgb
    from spot.plots import save
    from spot.plots.placements import placement_gallery

    scenes = data.draw(range(len(data)))
    chance = found.logits.softmax(-1)[range(len(data)), :, scenes.labels]  # (M, steps + 1)
    most = (chance[:, -1] - chance[:, 0]).argsort(descending=True)[:count].tolist()
    figure = placement_gallery(
        rgb(scenes.images[most], model.data_config),
        found.trajectory[most],
        captions=[f"{data.classes[scenes.labels[i]]}: {chance[i, 0]:.0%} → {chance[i, -1]:.0%}" for i in most],
        window=model.patch_size,
        title=f"{found.trajectory.shape[2]} tokens, moved by gradient: the class's probability before → after",
    )
    save(figure, path)


def with_costs(model: Any, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with multiply-adds and measured milliseconds per image of their budget, timed in turns."""
    import copy

    from spot.evaluation.throughput import measure

    budgets = sorted({row["tokens"] for row in rows}, reverse=True)
    models = {}
    for budget in budgets:
        models[str(budget)] = reader = copy.copy(model)
        reader.tokens, reader.prior = budget, "isotropic"
    timed = {row["tokens"]: row for row in measure(models, batch_sizes=(32,), rounds=5, warm_up=1)}
    return [
        {**row, "gmacs": timed[row["tokens"]]["GMACs"], "ms": 1000 / timed[row["tokens"]]["images/s"]} for row in rows
    ]


def farewell(rows: Sequence[Mapping[str, Any]], budgets: Sequence[int], cells: int, out: Path) -> None:
    """What was shown, in three sentences, and what to do next."""
    from spot import report

    score = {(row["placement"], row["tokens"]): row["top1"] for row in rows}
    sparse = min(budgets)
    best = max(("isotropic", "center"), key=lambda prior: score[prior, sparse])
    grid = score.get((DROPOUT, sparse))
    against = f", against {grid:.0f} % for patches of its grid picked at random" if grid is not None else ""
    report.console.print(
        f"\nWith {sparse} of {cells} tokens, placed by the {best} prior, the model names {score[best, sparse]:.0f} % "
        f"of the scenes{against}. Drawn from the object's mask they give {score['salient', sparse]:.0f} %, spread "
        f"evenly towards it {score['focus', sparse]:.0f} %, and isotropic ones moved a little by gradient, "
        f"knowing the label, {score[ORACLE, sparse]:.0f} %: so much depends on where tokens are. "
        f"The searched placements are in {out / 'placements.png'}, accuracy against cost in {out / 'accuracy.png'}.",
        soft_wrap=True,
    )
    report.console.print(
        "\nNext:\n"
        "  spot demo --image photo.jpg                  the same on your photo, with a ViT from timm\n"
        "  spot evaluate MODEL --data DIR --tokens 49   on your data\n"
        "  spot retrofit MODEL --data DIR --out RUN     teach your ViT to read off-grid tokens, without labels",
        highlight=False,
        soft_wrap=True,
    )


def on_photo(image: Path, name: str, weights: Path | None, budgets: Sequence[int], out: Path, seed: int) -> None:
    """What a ViT says of one photograph with fewer tokens, before and after a label-free search."""
    import torch

    import spot
    from spot import report
    from spot.commands.search import short
    from spot.data.images import class_names
    from spot.data.picture import evaluation_transform, open_image
    from spot.draws import generator_for
    from spot.placement.saliency import rgb
    from spot.plots import save
    from spot.plots.placements import placement_gallery

    picture = open_image(image)
    loaded = spot.load(name, weights=weights)
    names = class_names(loaded) or [f"class {index}" for index in range(loaded.num_classes)]
    images = evaluation_transform(loaded.data_config)(picture)[None]
    with torch.no_grad():
        dense = loaded(images, loaded.grid().expand(1, -1, -1))
    goal = int(dense.argmax())
    rows, paths, captions = [], [], []
    for budget in report.track(budgets, "searching"):
        for prior in ("isotropic", "center", "sobol"):
            loaded.tokens, loaded.prior = budget, prior
            start = loaded.place(images, generator_for(seed, image.name))
            found = spot.search(loaded, images, None, start, objective="agree", dense=dense)
            best = int(found.best_step)  # where tokens agree from the start, Adam's steps only lead away
            chance = found.logits[0].softmax(-1)
            rows.append(
                {
                    "tokens": budget,
                    "prior": prior,
                    "says": short(names[int(chance[0].argmax())]),
                    "p %": 100 * chance[0, goal].item(),
                    "after the search": short(names[int(chance[best].argmax())]),
                    "p % after": 100 * chance[best, goal].item(),
                }
            )
            if prior == "isotropic":
                paths.append(found.trajectory[0, : best + 1])
                captions.append(f"{budget} tokens: {chance[0, goal]:.0%} → {chance[best, goal]:.0%}")
    whole = f"{short(names[goal])} ({dense[0].softmax(0)[goal]:.0%})"
    report.show(rows, f"{image.name}: with all {len(loaded.grid())} tokens {loaded.name} says {whole}", digits=1)
    photo = rgb(images, loaded.data_config)[0]
    figure = placement_gallery(
        [photo] * len(paths),
        paths,
        captions=captions,
        window=loaded.patch_size,
        columns=4,
        title=f"{short(names[goal])}: probability before → after the search",
    )
    save(figure, out / "placements.png")
    report.console.print(
        f"\np is the probability of what the ViT says with all its tokens. The search moved the tokens so that few say "
        f"what all say; it needed no label. An unretrofitted ViT reads few tokens poorly: spot retrofit teaches it. "
        f"The placements are in {out / 'placements.png'}.",
        soft_wrap=True,
    )
