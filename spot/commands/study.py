"""spot study: the paper's tables and figures, measured here and set beside the paper's numbers."""

from pathlib import Path
from typing import Annotated

import tyro

from spot.commands import options


def study(
    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")],
    /,
    model: tuple[str, ...] = (),
    data: options.Data = "scenes",
    tokens: tuple[int, ...] = (),
    seeds: int = 3,
    limit: int | None = None,
    oracle_limit: int | None = None,
    saliency: str | None = None,
    bank: str | None = None,
    bank_limit: int | None = None,
    run: tuple[Path, ...] = (),
    split: str | None = None,
    data_root: options.DataRoot = None,
    batch_size: options.BatchSize = 64,
    workers: options.Workers = None,
    out: Path = Path("studies"),
    cache: Path | None = None,
    redraw: bool = False,
) -> None:
    """Measure a table or figure of the paper, and show the paper's numbers beside it.

    Studies: off-grid, priors, saliency-gain, transfer, classification, robustness, tome, elastic, scale,
    throughput, overhead, retrofit, gallery; all of them with `all`. `findings` measures nothing: it
    reads the results in --out and says which of the paper's findings hold. Each study writes
    OUT/NAME.json (everything), .md (the table), .png and .pdf (the figure). Measurements are kept, so
    that a study that was stopped goes on, and studies share them. Under `accelerate launch` or
    torchrun the images are shared out.

    Args:
        name: a study, all, or findings.
        model: retrofitted ViTs: built-in names, folders or files, each as NAME or as NAME=FILE with the
            weights of the timm ViT it stands on; by default scenes-a, scenes-b and scenes-mae.
        tokens: budgets; by default about an eighth, a quarter, a half and all of the grid. The smallest
            is the sparse one.
        seeds: how many, for placements that are drawn.
        limit: images for rows that are not searched; by default 1024 scenes, or all photographs.
        oracle_limit: images for rows that are searched; by default 512 scenes, or as many as --limit.
        saliency: spectral (the default for photographs), clipseg, an .onnx file or a folder of maps, which
            for kNN with salient placements also holds those of the bank's images. Scenes know their masks.
        bank: labelled images for kNN; by default training scenes. Without one, photographs get no kNN.
        bank_limit: at most so many of them, evenly spread over the classes; by default 1024 scenes, or all.
        run: folders of training runs, whose logs `retrofit` shows; by default those the models stand in.
        split: val, train or test; by default test scenes and val photographs.
        out: folder for results.
        cache: folder for measurements; by default OUT/cache.
        redraw: make tables and figures of the results there are, without measuring.

    example: spot study off-grid --model vit_tiny_patch16_224.augreg_in21k_ft_in1k+spot=ti.safetensors --data imagenet
    """
    from spot import report
    from spot.errors import InputError
    from spot.processes import this_process
    from spot.studies.backbone import SCENE_BACKBONES, backbones
    from spot.studies.lab import Lab
    from spot.studies.run import run as run_studies
    from spot.studies.run import tell_findings, write
    from spot.studies.sources import StudySettings
    from spot.studies.study import STUDIES, Result, find_study

    if name == "findings":
        tell_findings(out)
        return
    studies = [find_study(each) for each in (STUDIES if name == "all" else (name,))]
    report.check_outputs(folder=out)
    if redraw:
        for each in studies:
            write(each, Result.load(out / f"{each.name}.json"), out)
        return
    if not model and data != "scenes":
        raise InputError(f"say which models to study on {data}, with --model; the built-in ones know scenes only")
    settings = StudySettings(
        data=data, split=split or "", root=data_root, tokens=tokens, seeds=seeds, limit=limit,
        oracle_limit=oracle_limit, saliency=saliency or "", bank=bank, bank_limit=bank_limit, runs=run,
        batch_size=batch_size, workers=-1 if workers is None else workers,
    )  # fmt: skip
    lab = Lab(backbones(model or SCENE_BACKBONES, this_process().device), settings, cache=cache or out / "cache")
    run_studies(studies, lab, out)
