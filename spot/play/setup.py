"""Create a session from command-line arguments: its models and pictures."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from spot.data.files import photo_files
from spot.errors import InputError
from spot.models.family import Source
from spot.models.loading import load_source
from spot.models.shipped import built_in
from spot.placement.saliency import open_saliency
from spot.play.pictures import Pictures, file_samples, folder_samples, scene_samples
from spot.play.session import Session

ON_SCENES = ("scenes-a", "scenes-b", "scenes-a-grid", "scenes-b-grid")
ON_PHOTOS = "vit-ti"


def open_session(
    images: Sequence[str | Path] = (),
    models: Sequence[str] = (),
    weights: Sequence[Path] = (),
    data: str | None = None,
    split: str = "val",
    saliency: str = "spectral",
) -> Session:
    """A session with the given models first. Models and pictures are opened here, to report errors at the start."""
    if Path(saliency).is_dir():
        raise InputError("the page needs a saliency that can look at any picture: spectral, clipseg or an .onnx file")
    open_saliency(saliency)
    named = list(dict.fromkeys(models)) or ([ON_PHOTOS] if images or data not in (None, "scenes") else [ON_SCENES[0]])
    if len(weights) not in (0, 1, len(named)):
        raise InputError(f"give one --weights for all models or one each, got {len(weights)} for {len(named)} models")
    files = [weights[index % len(weights)] if weights else None for index in range(len(named))]
    loaders: dict[str, Callable[[], Source]] = {}
    for name, file in zip(named, files, strict=True):
        loaders[name] = partial(load_source, name, weights=None if name in ON_SCENES else file)
    for name in ON_SCENES:
        if name in built_in():
            loaders.setdefault(name, partial(load_source, name))
    samples = file_samples(photo_files(images)) if images else []
    pictures = Pictures(samples)
    session = Session(loaders, pictures, saliency)
    for name in named:
        session.model(name)
    if data is not None and data != "scenes":
        samples += folder_samples(data, session.model(named[0]), split)
    elif data == "scenes" or not samples:
        samples += scene_samples()
    pictures.samples.update({sample.id: sample for sample in samples})
    return session
