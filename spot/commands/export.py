"""spot export: a model as one file that runs without SPoT."""

from pathlib import Path
from typing import Literal

from spot.commands import options


def export(
    model: options.ModelArgument,
    /,
    out: Path,
    to: Literal["onnx", "torch"] = "onnx",
    weights: options.Weights = None,
    image: Literal["uint8", "float"] = "uint8",
    prior: str | None = None,
    tokens: int | None = None,
    scale: options.Scale = None,
    sizes: bool = False,
    features: tuple[Literal["pooled", "tokens"], ...] = (),
    opset: int = 23,
    compiled: bool = False,
    images: Path | None = None,
    int8: bool = False,
    calibrate: Path | None = None,
) -> None:
    """Write a model as one ONNX file (or torch.export program), and verify it against the model.

    Normalisation, class names and preprocessing are inside the file. It takes images of any size and
    positions (B, N, 2), or with --sizes (B, N, 3); or, with --prior or --tokens, images alone.

    Args:
        out: the file to write: .onnx, or .pt2 for torch.
        to: onnx, or torch for torch.export.
        image: uint8 takes RGB pixels (B, H, W, 3), float the model's own normalised input (B, C, H, W).
        prior: build this placement in, so that the file takes images alone.
        tokens: how many tokens to build in; by default the model's own.
        sizes: take a scale for each window, as the third number of its position.
        features: also give pooled features (B, D), or features of all tokens (B, P + N, D).
        opset: of the ONNX file; below 23 attention is written as its parts, for older runtimes.
        compiled: with torch, compile through AOTInductor for machines like this one.
        images: a folder of pictures to verify with; by default built-in scenes. Noise is always tried.
        int8: eight bits for the linear layers of the blocks: a quarter of the size. Needs --calibrate.
        calibrate: a folder of pictures like those that the file will be run on, without labels; 128 are taken.

    example: spot export scenes-a --prior isotropic --tokens 16 --out scenes.onnx
    """
    import spot
    from spot import report
    from spot.errors import InputError
    from spot.export.files import export as write
    from spot.export.verify import sample_pictures

    if int8 != (calibrate is not None):
        raise InputError("--int8 and --calibrate FOLDER go together: pictures say how large a layer's inputs get")
    loaded = spot.load(model, weights=weights, scale=scale)
    logits = ("logits",) if loaded.num_classes else ()
    pictures = sample_pictures(loaded, images if calibrate is None else calibrate, 8 if calibrate is None else 128)
    written = write(
        loaded, out, to=to, image=image, prior=prior, tokens=tokens, sizes=sizes, outputs=(*logits, *features),
        opset=opset, compiled=compiled, pictures=pictures[1::2] if int8 else pictures,
        int8=pictures[::2] if int8 else None,
    )  # fmt: skip
    report.say(written.summary)
