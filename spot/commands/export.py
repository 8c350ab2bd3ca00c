"""spot export: a model as one file that runs without SPoT."""

from pathlib import Path
from typing import Literal

from spot import options, report
from spot.errors import InputError


def export(
    model: options.ModelArgument,
    /,
    out: Path,
    to: Literal["onnx", "torch"] = "onnx",
    weights: options.Weights = None,
    image: Literal["uint8", "float"] = "uint8",
    prior: options.Maybe[str] = None,
    tokens: options.Maybe[int] = None,
    scale: options.Scale = None,
    sizes: bool = False,
    regions: bool = False,
    features: options.Several[Literal["pooled", "tokens"]] = (),
    opset: int = 23,
    merge: bool = False,
    cascade: bool = False,
    images: options.Maybe[Path] = None,
) -> None:
    """Write a model as one ONNX file (or torch.export program), and verify it against the model.

    The file contains normalisation, class names and preprocessing. Its inputs are images of any size and
    positions (B, N, 2), with --sizes (B, N, 3), with --regions (B, N, 7). With --prior or --tokens it takes only
    images.

    example: spot export scenes-a --prior isotropic --tokens 16 --merge --out scenes.onnx

    Args:
        out: the file to write: .onnx, or .pt2 for torch
        to: onnx, or torch for torch.export
        image: uint8 for RGB pixels (B, H, W, 3), float for the model's normalised input (B, C, H, W)
        prior: build this placement in, so that the file takes only images
        tokens: number of tokens to build in; by default the model's own
        sizes: take a scale for each window, as the third number of its position
        regions: take a scale and a region for each window
        features: also output pooled features (B, D), or features of all tokens (B, P + N, D)
        opset: of the ONNX file; below 23 attention is decomposed, for older runtimes
        merge: place more windows than --tokens and merge similar ones, at the cost of --tokens
        cascade: write the model's early-exit cascade to the folder --out instead: a file per stage
        images: a folder of pictures for verification; by default built-in scenes. Noise is always used too
    """
    options.check_prior(prior)
    from spot.export.files import export as write
    from spot.export.files import export_cascade
    from spot.export.verify import sample_pictures
    from spot.models.cascade import Cascade
    from spot.models.family import at_budget
    from spot.models.loading import load_source, read_prior
    from spot.models.tome import Merging

    if cascade and ({prior, tokens, scale} != {None} or sizes or regions or features or merge or to != "onnx"):
        raise InputError("a cascade has its own placements, and is written as ONNX files; leave other options out")
    source = load_source(model, weights=weights, scale=scale)
    if cascade:
        pictures = sample_pictures(at_budget(source), images)
        for each in export_cascade(Cascade.load(model, source), out, image=image, opset=opset, pictures=pictures):
            report.say(each.summary)
        return
    placement = read_prior(prior, source)
    loaded = at_budget(source, tokens, prior=placement)
    logits = ("logits",) if loaded.num_classes else ()
    written = write(
        Merging(source, loaded.tokens, placement) if merge else loaded, out, to=to, image=image,
        built_in=prior is not None or tokens is not None, sizes=sizes, regions=regions, outputs=(*logits, *features),
        opset=opset, pictures=sample_pictures(loaded, images),
    )  # fmt: skip
    report.say(written.summary)
