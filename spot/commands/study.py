"""spot study: the paper's tables and figures, measured here and set beside the paper's numbers."""

from pathlib import Path
from typing import Annotated

import tyro

from spot.studies.settings import StudySettings


def study(
    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")],
    /,
    settings: Annotated[StudySettings, tyro.conf.arg(name="")],
    model: tuple[str, ...] = (),
    out: Path = Path("studies"),
    cache: Path | None = None,
    redraw: bool = False,
) -> None:
    """Measure a table or figure of the paper, and show the paper's numbers beside it.

    Studies: off-grid, priors, saliency-gain, transfer, classification, robustness, tome, elastic, scale, needle,
    anytime, throughput, overhead, retrofit, gallery; all of them with `all`. `findings` measures nothing: it
    reads the results in --out and says which of the paper's findings hold. Each study writes
    OUT/NAME.json (everything), .md (the table), .png and .pdf (the figure). Measurements are kept, so
    that a study that was stopped goes on, and studies share them. Under `accelerate launch` or
    torchrun the images are shared out.

    Args:
        name: a study, all, or findings.
        model: retrofitted ViTs: built-in names, folders or files, each as NAME or as NAME=FILE with the
            weights of the timm ViT it stands on; by default scenes-a, scenes-b and scenes-mae.
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
    if not model and settings.data != "scenes":
        raise InputError(f"say with --model what to study on {settings.data}; the built-in models know scenes only")
    lab = Lab(backbones(model or SCENE_BACKBONES, this_process().device), settings, cache=cache or out / "cache")
    run_studies(studies, lab, out)
