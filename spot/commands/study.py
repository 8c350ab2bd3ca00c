"""spot study: the paper's tables and figures, measured here and set beside the paper's numbers."""

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from spot.studies.lab import Lab
    from spot.studies.study import Result, Study


def study(
    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")],
    /,
    model: tuple[str, ...] = (),
    data: str = "scenes",
    tokens: tuple[int, ...] = (),
    seeds: int = 3,
    limit: int | None = None,
    oracle_limit: int | None = None,
    saliency: str | None = None,
    bank: str | None = None,
    bank_limit: int | None = None,
    run: tuple[Path, ...] = (),
    split: str | None = None,
    data_root: Path | None = None,
    batch_size: int = 64,
    workers: int | None = None,
    out: Path = Path("studies"),
    cache: Path | None = None,
    redraw: bool = False,
) -> None:
    """Measure a table or figure of the paper, and show the paper's numbers beside it.

    Studies: off-grid, priors, saliency-gain, transfer, classification, robustness, tome, elastic,
    throughput, overhead, retrofit, gallery; all of them with `all`. `findings` measures nothing: it
    reads the results in --out and says which of the paper's findings hold. Each study writes
    OUT/NAME.json (everything), .md (the table), .png and .pdf (the figure). Measurements are kept, so
    that a study that was stopped goes on, and studies share them. Under `accelerate launch` or
    torchrun the images are shared out.

    Args:
        name: a study, all, or findings.
        model: retrofitted ViTs: built-in names, folders or files, each as NAME or as NAME=FILE with the
            weights of the timm ViT it stands on; by default scenes-a, scenes-b and scenes-mae.
        data: a folder with one sub-folder per class, ImageNet's root, a timm data set, or "scenes".
        tokens: budgets; by default about an eighth, a quarter, a half and all of the grid. The smallest
            is the sparse one.
        seeds: how many, for placements that are drawn.
        limit: images for rows that are only read; by default 1024 scenes, or all photographs.
        oracle_limit: images for rows that are searched; by default 512 scenes, or as many as --limit.
        saliency: spectral (the default for photographs), clipseg, an .onnx file or a folder of maps, which
            for kNN with salient placements also holds those of the bank's images. Scenes know their masks.
        bank: labelled images for kNN; by default training scenes. Without one, photographs get no kNN.
        bank_limit: at most so many of them, evenly spread over the classes; by default 1024 scenes, or all.
        run: folders of training runs, whose logs `retrofit` shows; by default those the models stand in.
        split: val, train or test; by default test scenes and val photographs.
        data_root: where a timm data set keeps its files.
        batch_size: images at a time; changes speed only.
        workers: processes that read images.
        out: folder for results.
        cache: folder for measurements; by default OUT/cache.
        redraw: make tables and figures of the results there are, without measuring.

    example: spot study off-grid --model vit_tiny_patch16_224.augreg_in21k_ft_in1k+spot=ti.safetensors --data imagenet
    """
    from spot.commands.demo import refuse_unwritable
    from spot.errors import InputError
    from spot.studies.study import STUDIES, Result, find_study

    if name == "findings":
        tell(out)
        return
    names = STUDIES if name == "all" else (name,)
    studies = [find_study(each) for each in names]
    refuse_unwritable(out)
    if redraw:
        for each in studies:
            write(each, Result.load(out / f"{each.name}.json"), out)
        return
    from spot.processes import this_process
    from spot.studies.backbone import SCENE_BACKBONES, backbones
    from spot.studies.lab import Lab

    if not model and data != "scenes":
        raise InputError(f"say which models to study on {data}, with --model; the built-in ones know scenes only")
    lab = Lab(
        backbones(model or SCENE_BACKBONES, this_process().device),
        data,
        cache=cache or out / "cache",
        split=split,
        root=data_root,
        tokens=tokens,
        seeds=seeds,
        limit=limit,
        oracle_limit=oracle_limit,
        saliency=saliency,
        bank=bank,
        bank_limit=bank_limit,
        runs=run,
        batch_size=batch_size,
        workers=workers,
    )
    failed = [
        (each.name, trouble)
        for place, each in enumerate(studies)
        if (trouble := attempt(each, lab, out, place, studies))
    ]
    if lab.main and name == "all" and len(failed) < len(studies):
        tell(out)
    if failed:
        raise InputError("; ".join(f"{each}: {trouble}" if name == "all" else trouble for each, trouble in failed))


def attempt(study: "Study", lab: "Lab", out: Path, place: int, studies: "list[Study]") -> str:
    """Run one study of several and write what it found; what went wrong with its input, or nothing."""
    from spot import report
    from spot.errors import InputError

    begun, worked = time.perf_counter(), time.process_time()
    if lab.main:
        report.errors.print(f"{study.name} ({place + 1} of {len(studies)})", highlight=False)
    try:
        result = study.run(lab)
    except InputError as error:
        if isinstance(error.__cause__, OSError) or len(studies) == 1:
            raise  # nothing that follows could be kept either
        if lab.main:
            report.errors.print(f"spot: {study.name}: {error}", soft_wrap=True, markup=False, highlight=False)
        return str(error)
    result.study = study.name
    result.settings = {**lab.settings(), **result.settings, "command": shlex.join(["spot", *sys.argv[1:]])}
    result.settings["seconds"] = round(time.perf_counter() - begun, 1)
    result.settings["processor_seconds"] = round(time.process_time() - worked, 1)  # what a busy machine does not change
    if lab.main:
        write(study, result, out)
    return ""


def write(study: "Study", result: "Result", out: Path) -> None:
    """A result as JSON, Markdown, PNG and PDF, and in the terminal."""
    from spot.plots import save
    from spot.store import write_text

    result.save(out / f"{study.name}.json")
    figure = study.draw(result)
    for ending in ("png", "pdf"):
        save(figure, out / f"{study.name}.{ending}")
    write_text(out / f"{study.name}.md", study.markdown(result, f"{study.name}.png"))
    study.show(result)


def tell(out: Path) -> None:
    """Say which of the paper's findings hold, by the results in a folder, and write it there."""
    from spot import report
    from spot.store import write_text
    from spot.studies import findings

    result = findings.read(out)
    result.save(out / "findings.json")
    write_text(out / "findings.md", findings.markdown(result))
    report.show(findings.lines(result), "What the findings rest on")
    report.show(result.rows, "Do the paper's findings hold here?", caption="\n".join(result.notes))
