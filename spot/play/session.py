"""The page's requests to models: the playground's interface to the library.

`Session` holds the models and pictures, a `View` is a model on a picture. Each function in ACTIONS answers one kind of
request through `job.send`. Long ones call `job.rest` between forward passes, where they can be stopped.
"""

import base64
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from spot.data.folders import photo_files
from spot.draws import generator_for
from spot.errors import InputError, unknown
from spot.evaluation.cost import macs
from spot.evaluation.photos import names_of, short
from spot.evaluation.searches import PhotoSearch
from spot.models.family import Source, at_budget
from spot.models.loading import load_source
from spot.models.spot_vit import SpotViT
from spot.placement.files import Placements
from spot.placement.oracle import LABELLED, PRESETS, moved_at_random, search, wrong_labels
from spot.placement.priors import LEARNED, PRIORS, omega
from spot.placement.saliency import open_saliency, rgb
from spot.play.pictures import PictureStore, file_samples, folder_samples, scene_samples
from spot.play.request import MAX_TOKENS, Request
from spot.play.worker import Job
from spot.tokens.authors import AuthorsTokenizer
from spot.tokens.windows import windows

ON_SCENES = ("scenes-a", "scenes-b", "scenes-a-grid", "scenes-b-grid")
ON_PHOTOS = "vit-ti"
OBJECTIVES = ("descent", "obfuscate", "agree", "entropy", "ascent")
LEVELS = (9, 17, 33)  # points along each side of "Why here?"; each level contains the points of the previous one
FIELD_BATCH = 16
CONTROLS = 16  # number of random moves, the control of a search
TRIES = 32  # maximum number of random directions per token, until one stays in the image
THUMBNAIL = 96
PRIOR_MAPS = {name: prior.needs_map for name, prior in PRIORS.items()} | {LEARNED: False}  # whether it needs a map
SHARP = 3  # resolution of a displayed photograph, as a multiple of the model's
MAX_SHARP = 2048  # its largest side, in pixels


class Session:
    """The models by name and the pictures. Those of the command line are opened first, to report errors at the start.

    images: image files, folders or patterns. data: a data set, of which some pictures are shown.
    models: names; the built-in models of scenes are offered too. weights: one file for all models, or one each.
    """

    def __init__(
        self,
        images: Sequence[str | Path] = (),
        models: Sequence[str] = (),
        weights: Sequence[Path] = (),
        data: str | None = None,
        split: str = "val",
        saliency: str = "spectral",
    ) -> None:
        if Path(saliency).is_dir():
            raise InputError("the page needs a saliency source for any picture: spectral, clipseg or an .onnx file")
        open_saliency(saliency)
        photos = bool(images) or data not in (None, "scenes")
        chosen = list(dict.fromkeys(models)) or [ON_PHOTOS if photos else ON_SCENES[0]]
        if len(weights) not in (0, 1, len(chosen)):
            raise InputError(
                f"give one --weights for all models or one each, got {len(weights)} for {len(chosen)} models"
            )
        self.saliency, self.pictures = saliency, PictureStore()
        self.weights: dict[str, Path | None] = {}  # of each model that the page offers
        for index, name in enumerate(chosen):
            self.weights[name] = weights[index % len(weights)] if weights else None
        self.weights |= dict.fromkeys(ON_SCENES)  # they ship with their weights
        self.source = lru_cache(maxsize=None)(self._source)
        self.at_budget = lru_cache(maxsize=8)(self._at_budget)  # for the page's slider
        self.names = lru_cache(maxsize=None)(lambda model: [short(name) for name in names_of(self.model(model))])
        self.macs = lru_cache(maxsize=256)(lambda model, tokens: macs(self.model(model), tokens=tokens))
        self.picture = lru_cache(maxsize=2)(self.pictures.open)  # a photograph may have 120 MB
        self.view = lru_cache(maxsize=16)(partial(View, self))

        samples = file_samples(photo_files(images)) if images else []
        for name in chosen:
            self.model(name)
        if data is not None and data != "scenes":
            samples += folder_samples(data, self.model(chosen[0]), split)
        elif not images or data == "scenes":
            samples += scene_samples()
        self.pictures.samples = {sample.id: sample for sample in samples}

    def about(self) -> dict[str, Any]:
        """The page's initial data: models, samples, priors and search settings."""
        samples = [
            {"id": sample.id, "name": sample.name, "label": sample.label and short(sample.label)}
            for sample in self.pictures.samples.values()
        ]
        return {
            "models": list(self.weights),
            "samples": samples,
            "priors": [{"name": name, "map": needs_map} for name, needs_map in PRIOR_MAPS.items()],
            "objectives": list(OBJECTIVES),
            "labelled": list(LABELLED),
            "presets": {name: preset.steps for name, preset in PRESETS.items()},
            "saliency": Path(self.saliency).name,
            "limit": MAX_TOKENS,
        }

    def _source(self, name: str) -> Source:
        if name not in self.weights:
            raise unknown("model", name, self.weights)
        source = load_source(name, weights=self.weights[name])
        names_of(at_budget(source))  # refuses a model without a classifier
        return source

    def model(self, name: str) -> SpotViT:
        """A model by name, for anything independent of the budget."""
        return self.at_budget(name)

    def _at_budget(self, name: str, tokens: int | None = None, image_size: tuple[int, int] | None = None) -> SpotViT:
        model = at_budget(self.source(name), tokens, image_size=image_size)
        model.saliency = self.saliency
        return model.eval().requires_grad_(False)

    def view_of(self, request: Request) -> "View":
        """The model and picture of a request."""
        return self.view(request.text("picture"), request.text("model"))

    def thumbnail(self, picture: str) -> Image.Image:
        """A thumbnail of the picture's centre crop."""
        return ImageOps.fit(self.pictures.open(picture).image, (THUMBNAIL, THUMBNAIL))


class View:
    """A model and a picture transformed to its input, with the results that several requests need."""

    def __init__(self, session: Session, picture: str, model: str) -> None:
        opened = session.picture(picture)
        self.session, self.name, self.model = session, model, session.model(model)
        self.picture, self.key = picture, opened.name  # the picture's id, and its name
        self.images = opened.tensor(self.model)  # (1, 3, H, W), normalised

    def weights_for(self, tokens: int) -> SpotViT:
        """The model with the weights for a number of tokens."""
        return self.session.at_budget(self.name, tokens, (self.images.shape[2], self.images.shape[3]))

    def forward(self, positions: Tensor) -> Tensor:
        """Logits (B, classes) of the picture at placements (B, N, 2 or 3)."""
        model = self.weights_for(positions.shape[1])
        with torch.inference_mode():
            return model(self.images.expand(len(positions), -1, -1, -1), positions).float()

    @cached_property
    def dense(self) -> Tensor:
        """Logits (classes,) of the dense ViT."""
        return self.forward(self.model.grid(self.images))[0]

    @cached_property
    def maps(self) -> Tensor:
        """The picture's saliency map (1, H, W)."""
        return self.model.saliency_maps(self.images, [self.key])

    def label(self, request: Request) -> int:
        """The class that a request names."""
        return request.number("label", 0, self.model.num_classes - 1)

    def top(self, logits: Tensor, count: int = 5) -> list[dict[str, Any]]:
        """The most probable classes of logits (classes,), with their probabilities of the dense ViT."""
        best, beside = logits.softmax(-1).topk(min(count, len(logits))), self.dense.softmax(-1)
        names = self.session.names(self.name)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [{"index": i, "name": names[i], "p": p, "dense": beside[i].item()} for i, p in pairs]

    def samples(self, positions: Tensor) -> Tensor:
        """The K × K window of the token at positions (1, 1, 2 or 3), as RGB bytes (K, K, 3)."""
        tokenizer = self.model.tokenizer
        if isinstance(tokenizer, AuthorsTokenizer):  # it samples its windows differently
            taken = tokenizer.windows(self.images, positions)
        else:
            taken = windows(self.images, positions, self.model.patch_size)
        colors = rgb(taken.reshape(1, 3, *taken.shape[-2:]), self.model.data_config)[0]
        return (colors * 255).round().to(torch.uint8).permute(1, 2, 0)

    def shown(self, sharp: bool) -> Image.Image:
        """The model's input as an image; with `sharp`, the same crop at a higher resolution if the picture has it."""
        picture, size = self.session.picture(self.picture), self.model.img_size
        sharp = sharp and not picture.whole and min(picture.image.size) >= min(size) and SHARP * max(size) <= MAX_SHARP
        images = picture.tensor(self.model, SHARP) if sharp else self.images
        return to_pil_image(rgb(images, self.model.data_config)[0])


# ----------------------------------------------------------------------------- requests


def send_model(session: Session, request: Request, job: Job) -> None:
    """A model's sizes, classes, default prior and default budget."""
    name = request.text("model")
    model = session.model(name)
    job.send(
        {
            "size": list(model.img_size),
            "window": model.patch_size,
            "grid": list(model.grid_size),
            "tokens": model.tokens,
            "prior": model.prior if isinstance(model.prior, str) else "isotropic",
            "classes": session.names(name),
            "scale": 1 if model.scale is None else model.scale,
            "sizes": not isinstance(model.tokenizer, AuthorsTokenizer),
        }
    )


def send_prediction(session: Session, request: Request, job: Job) -> None:
    """The top classes at given positions and of the dense ViT, and the pixels of one token."""
    view, positions = session.view_of(request), request.positions()
    answer: dict[str, Any] = {"top": view.top(view.forward(positions)[0]), "dense": view.top(view.dense, 2)}
    token = request.optional("token", 0, positions.shape[1] - 1)
    if token is not None:
        pixels = view.samples(positions[:, token : token + 1])
        answer["samples"] = {"side": len(pixels), "rgb": base64.b64encode(pixels.numpy().tobytes()).decode()}
    job.send(answer)


def send_placement(session: Session, request: Request, job: Job) -> None:
    """Place tokens by a prior, like `spot predict` and `spot search`."""
    view, prior, tokens = session.view_of(request), request.text("prior"), request.number("tokens", 1, MAX_TOKENS)
    if prior not in PRIOR_MAPS:  # a policy's file is a prior too, but the page must not name local files
        raise unknown("prior", prior, PRIOR_MAPS)
    maps, seed = view.maps if PRIOR_MAPS[prior] else None, request.number("seed")
    placement: dict[str, Any] = {"tokens": tokens, "prior": prior, "scale": request.scale(), "seed": seed, "maps": maps}
    positions = view.model.place(view.images, keys=[view.key], **placement)
    job.send({"positions": positions[0].tolist()})


def send_saliency(session: Session, request: Request, job: Job) -> None:
    """The saliency map of the priors salient, focus and background."""
    small = F.interpolate(session.view_of(request).maps[:, None], size=(64, 64), mode="area")[0, 0]
    job.send({"values": small.tolist()})


def send_search(session: Session, request: Request, job: Job) -> None:
    """Run a search and send each step: positions, the class's probability and the top classes."""
    view, positions = session.view_of(request), request.positions()
    objective, preset = request.text("objective"), request.text("preset")
    if objective not in OBJECTIVES:
        raise unknown("objective", objective, OBJECTIVES)
    if preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    settings, labels = PRESETS[preset].changed(steps=request.optional("steps", 1, 200)), None
    if objective in LABELLED:
        if request.fields.get("label") is None:
            raise InputError(f"{objective} needs a label; pick one, or search without one by agree or entropy")
        labels = torch.tensor([view.label(request)])
        if objective == "obfuscate":
            labels = wrong_labels(labels, view.model.num_classes, keys=[view.key], seed=request.number("seed"))
            objective = "descent"
    model, names = view.weights_for(positions.shape[1]), session.names(view.name)
    shown = labels if labels is not None else view.dense.argmax()[None] if objective == "agree" else None
    step = 0

    def watched(images: Tensor, positions: Tensor) -> Tensor:
        """The model's forward pass, whose positions and prediction are sent to the page."""
        nonlocal step
        logits = model(images, positions)
        first = logits.detach()[0].float()
        index = int(first.argmax() if shown is None else shown[0])
        sent = {"part": step / settings.steps, "steps": settings.steps, "positions": positions.detach()[0].tolist()}
        sent |= {"p": first.softmax(-1)[index].item(), "class": index, "name": names[index]}
        job.send({**sent, "top": view.top(first)})
        step += 1
        job.rest()
        return logits

    search(watched, view.images, labels, positions, settings, objective=objective, dense=view.dense[None].clone())
    job.send({"part": 1, "done": True})


def send_control(session: Session, request: Request, job: Job) -> None:
    """The control of a search: move the same tokens by the same distances in random directions."""
    view, trajectory = session.view_of(request), request.trajectory()
    label, chance = view.label(request), generator_for(request.number("seed"), view.key)
    start, end = trajectory[0], trajectory[-1]
    sized = torch.cat([start[:, :2], end[:, 2:]], -1)  # windows have their final sizes
    moved = moved_at_random(sized.expand(CONTROLS, -1, -1), end, view.model.img_size, chance, TRIES)
    probabilities = []
    for places in moved:
        probabilities.append(view.forward(places[None])[0].softmax(-1)[label].item())
        job.rest()
    job.send({"positions": moved[0].tolist(), "probabilities": probabilities})


def send_field(session: Session, request: Request, job: Job) -> None:
    """Answer "Why here?": the class's log-probability over the positions of one token, from coarse to fine."""
    view, positions = session.view_of(request), request.positions()
    token, label = request.number("token", 0, positions.shape[1] - 1), view.label(request)
    low, high = omega(view.images)
    values, total = torch.full((1, 1), math.nan), LEVELS[-1] ** 2
    here = view.forward(positions).log_softmax(-1)[0, label].item()

    def send(**fields: Any) -> None:
        rows = [[None if math.isnan(value) else value for value in row] for row in values.tolist()]  # JSON has no NaN
        job.send({"values": rows, "here": here, **fields})

    for side in LEVELS:
        lines = torch.linspace(0, 1, side)
        points = torch.stack(torch.meshgrid(lines, lines, indexing="ij"), -1) * (high - low) + low
        # Keep the measured points of the previous level; the others are interpolated until they are measured.
        measured = torch.zeros(side, side, dtype=torch.bool)
        measured[::2, ::2] = side > LEVELS[0]
        values = F.interpolate(values[None, None], size=(side, side), mode="bilinear", align_corners=True)[0, 0]
        for part in (~measured).nonzero().split(FIELD_BATCH):
            rows, columns = part.unbind(1)
            places = positions.repeat(len(part), 1, 1)
            places[:, token, :2] = points[rows, columns]
            values[rows, columns] = view.forward(places).log_softmax(-1)[:, label]
            measured[rows, columns] = True
            send(side=side, part=int(measured.sum()) / total)
            job.rest()
    send(side=LEVELS[-1], part=1, done=True)


def send_cost(session: Session, request: Request, job: Job) -> None:
    """The number of tokens, the MACs and the latency of a forward pass on this placement."""
    view, positions, seconds = session.view_of(request), request.positions(), []
    for _ in range(7):
        start = time.perf_counter()
        view.forward(positions)
        seconds.append(time.perf_counter() - start)
        job.rest()
    tokens, patches = positions.shape[1], math.prod(view.model.grid_size)
    counted = {"macs": session.macs(view.name, tokens), "dense_macs": session.macs(view.name, patches)}
    job.send({"tokens": tokens, **counted, "dense_tokens": patches, "ms": 1000 * statistics.median(seconds)})


ACTIONS: dict[str, Callable[[Session, Request, Job], None]] = {
    "model": send_model, "predict": send_prediction, "place": send_placement, "saliency": send_saliency,
    "search": send_search, "control": send_control, "field": send_field, "cost": send_cost,
}  # fmt: skip
LONG = ("search", "control", "field", "cost")  # quick requests run between their steps


# ----------------------------------------------------------------------------- files


def picture_png(session: Session, request: Request) -> bytes:
    """A PNG of this trajectory, as drawn by `spot search`."""
    view, trajectory = session.view_of(request), request.trajectory()
    logits = torch.cat([view.forward(places[None]) for places in (trajectory[0], trajectory[-1])])
    label, image = request.optional("label", 0, view.model.num_classes - 1), rgb(view.images, view.model.data_config)[0]
    searched = PhotoSearch.of(Path(view.key), image, trajectory, logits, label, session.names(view.name))
    adversarial = request.text("objective", "descent") == "ascent"
    drawn = BytesIO()
    searched.figure(view.model.patch_size, adversarial=adversarial).savefig(drawn, format="png")
    return drawn.getvalue()


def placements_file(session: Session, request: Request) -> bytes:
    """A placements file of this picture, for `spot evaluate --placements` or this page."""
    view, trajectory = session.view_of(request), request.trajectory()
    about = {"model": view.model.name, "by": "spot play"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "placements.safetensors"
        Placements([view.key], trajectory[None], about).save(file)
        return file.read_bytes()


def placements_of(session: Session, picture: str, data: bytes) -> dict[str, Any]:
    """The picture's placement in a placements file, or the file's only one."""
    key = session.picture(picture).name
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "the file"
        file.write_bytes(data)
        try:
            placements = Placements.load(file)
        except InputError as error:
            raise InputError(str(error).replace(str(file), "the file")) from None
    if key not in placements and len(placements) > 1:
        raise InputError(f"the file has placements of {len(placements)} images, but none of {key}")
    trajectory = placements.select([key if key in placements else placements.keys[0]]).trajectory[0]
    if trajectory.shape[1] > MAX_TOKENS:
        raise InputError(f"the page takes up to {MAX_TOKENS} tokens, the file has {trajectory.shape[1]}")
    return {"trajectory": trajectory.tolist()}
