"""Reproduce a table or figure of the paper: `python -m paper NAME`, or all of them: `python -m paper all`."""

from inspect import getdoc
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from paper.backbone import SCENE_BACKBONES, backbones
from paper.lab import Lab
from paper.program import program
from paper.run import run, write, write_findings
from paper.settings import StudySettings
from paper.study import STUDIES, Result, find_study
from spot import report
from spot.errors import InputError
from spot.processes import this_process


def study(
    name: Annotated[Positional[str], arg(metavar="NAME")],
    /,
    settings: Annotated[StudySettings, arg(name="")],
    model: tuple[str, ...] = (),
    out: Path = Path("studies"),
    cache: Path | None = None,
    redraw: bool = False,
) -> None:
    """Measure a table or figure of the paper, and show it with the paper's numbers.

    Studies: {studies}; `all` runs all of them. `findings` measures nothing: it reads the results in --out and
    reports which of the paper's findings hold. Each study writes OUT/NAME.json (everything), .md (the table),
    .png and .pdf (the figure). Measurements are cached, so that interrupted studies resume and studies share
    measurements. Under `accelerate launch` or torchrun the images are divided among the processes.

    Args:
        name: a study, all, or findings.
        model: retrofitted ViTs: built-in names, folders or files, each as NAME or as NAME=FILE with the
            weights of the timm ViT it is based on; by default scenes-a, scenes-b and scenes-mae.
        out: folder for results.
        cache: folder for measurements; by default OUT/cache.
        redraw: redraw tables and figures from existing results, without measuring.

    example: python -m paper off-grid --model vit-ti=ti.safetensors --data imagenet
    """
    if name == "findings":
        write_findings(out)
        return
    studies = [find_study(each) for each in (STUDIES if name == "all" else (name,))]
    report.check_outputs(folder=out)
    if redraw:
        for each in studies:
            write(each, Result.load(out / f"{each.name}.json"), out)
        return
    if not model and settings.data != "scenes":
        raise InputError(f"name models with --model to study {settings.data}; the built-in ones classify scenes only")
    lab = Lab(backbones(model or SCENE_BACKBONES, this_process().device), settings, cache=cache or out / "cache")
    run(studies, lab, out)


def main(arguments: list[str] | None = None) -> None:
    """Run studies; bad input ends in one sentence on stderr and exit code 2."""
    text = (getdoc(study) or "").format(studies=", ".join(STUDIES))
    program("paper", study, text.split("\n\nArgs:")[0], arguments)


if __name__ == "__main__":
    main()
