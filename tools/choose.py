"""Choices that are made by looking at results, on images set aside from training: `python -m tools.choose WHAT …`.

    python -m tools.choose tome  VIT+spot=vit.safetensors DEIT+spot=deit.safetensors --data imagenet-train-5k
    python -m tools.choose focus VIT+spot=vit.safetensors --data imagenet-train-5k --saliency maps

`tome` compares schedules of merging at the cost of 25, 49 and 100 tokens, with the retrofitted and the plain weights;
`focus` the constants of the prior. Both read only the images that tools/set_aside.txt names, and print a table.
"""

import argparse
from functools import partial
from pathlib import Path

import torch

from spot import report
from spot.data.images import data_for
from spot.data.loader import loader
from spot.data.picture import evaluation_transform
from spot.evaluation.accuracy import Candidate, evaluate
from spot.models.spot_vit import SpotViT
from spot.models.tome import ToMe
from spot.placement.priors import Prior, focus
from spot.placement.saliency import resolve_saliency
from spot.studies.backbone import backbones

SET_ASIDE = Path(__file__).with_name("set_aside.txt")
BUDGETS = (25, 49, 100)
FLOORS = (None, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0)  # None is an even schedule; 1 the highest floor that the cost allows
FOCUS = [(blur, share) for blur in (1 / 14, 1 / 7, 2 / 7) for share in (0.3, 0.5, 0.7)]


def tome(model: SpotViT) -> list[Candidate]:
    """Schedules at the cost of each budget."""
    return [
        Candidate(ToMe.matching(model, budget, floor=floor), name=f"{floor or 'even'} {budget}")
        for budget in BUDGETS
        for floor in FLOORS
    ]


def focused(model: SpotViT) -> list[Candidate]:
    """Constants of focus at each budget, beside isotropic."""
    priors = [
        Prior(f"{blur:.2f}/{share}", partial(focus, blur=blur, share=share), needs_map=True) for blur, share in FOCUS
    ]
    even = [Candidate(model, "isotropic", budget, name=f"isotropic {budget}") for budget in BUDGETS]
    return even + [Candidate(model, prior, n, name=f"{prior.name} {n}") for n in BUDGETS for prior in priors]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tome", "focus"))
    parser.add_argument("models", nargs="+", metavar="MODEL=WEIGHTS")
    parser.add_argument("--data", required=True)
    parser.add_argument("--saliency", default="spectral")
    parser.add_argument("--every", type=int, default=1, help="only every so many of the images set aside")
    given = parser.parse_args()
    torch.set_num_threads(1)
    aside = set(SET_ASIDE.read_text().split())
    for backbone in backbones(given.models):
        models = {backbone.name: backbone.model}
        if given.what == "tome" and backbone.parent is not None:
            models[f"{backbone.name}, plain weights"] = backbone.parent
        for label, model in models.items():
            data = data_for(model, given.data, split="train")
            data.keep([index for index, key in enumerate(data.keys) if key in aside][:: given.every])
            config = model.data_config
            maps = resolve_saliency(given.saliency, config, evaluation_transform(config), given.data)
            candidates = tome(model) if given.what == "tome" else focused(model)
            rows = evaluate(model, loader(data, 50), candidates, saliency=maps).rows()
            lines: dict[str, dict[str, object]] = {}
            for row in rows:
                way, _, budget = row["placement"].rpartition(" ")
                lines.setdefault(way, {given.what: way})[f"{budget} tokens"] = round(row["top1"], 1)
            report.say(f"{label}, {len(data)} images set aside, top-1 %")
            print(report.markdown(list(lines.values())), flush=True)


if __name__ == "__main__":
    main()
