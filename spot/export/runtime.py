"""Run a file that `spot export --to onnx` wrote, without torch: numpy, Pillow and ONNX Runtime.

    exported = Exported("vit.onnx")
    pixels = exported.prepare(open_image("photo.jpg"))  # resized and cropped as in the model's evaluation
    logits = exported(pixels[None])["logits"]           # (1, classes); exported.classes names them
    logits = exported(pixels[None], positions)["logits"]  # (1, N, 2), (y, x) fractions, unless built in

A file that was exported with sizes also takes (1, N, 3): the third number is each window's scale. A file with regions
takes (1, N, 7): the last four numbers are the region for the position embedding (spot/tokens/positions.py).

Nothing here may import torch, because the import takes longer than a prediction.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from spot.data.picture import open_photos, resize_and_crop
from spot.errors import InputError
from spot.store import refuse_no_file

KEY = "spot_vit"  # key of our entry in the file's metadata
STAGES = "cascade.json"  # in the folder of an exported cascade
EXTRA = "pip install 'spot-vit[export]'"


class Exported:
    """An exported model. Call it with images (B, H, W, 3) and, unless built in, positions (B, N, 2)."""

    def __init__(self, path: str | Path, threads: int | None = None) -> None:
        """threads: by default ONNX Runtime's choice."""
        self.session = onnx_session(path, threads)
        entries = self.session.get_modelmeta().custom_metadata_map
        if KEY not in entries:
            raise InputError(f"{path} was not written by spot export, and does not describe its input; export it again")
        self.path = Path(path)
        self.about: dict[str, Any] = json.loads(entries[KEY])
        self.takes_positions = len(self.session.get_inputs()) > 1
        self.takes_bytes = self.about["image"] == "uint8"

    @property
    def classes(self) -> list[str]:
        """Readable names of the classes, in order."""
        return list(self.about["classes"])

    def prepare(self, image: Image.Image) -> NDArray[Any]:
        """An RGB image → the file's input without the batch dimension: resized and cropped."""
        preprocessing = self.about["preprocessing"]
        pixels = np.asarray(resize_and_crop(image, preprocessing["size"]))
        if self.takes_bytes:
            return pixels
        mean, std = (np.array(preprocessing[name], np.float32) for name in ("mean", "std"))
        return ((pixels.astype(np.float32) / 255 - mean) / std).transpose(2, 0, 1)

    def __call__(self, images: ArrayLike, positions: ArrayLike | None = None) -> dict[str, NDArray[Any]]:
        """Run the model and return each output by name. Positions default to the exported placement."""
        images = np.ascontiguousarray(images)
        self.check_images(images)
        inputs = {"images": images}
        if self.takes_positions:
            inputs["positions"] = self.checked_positions(positions, images)
        elif positions is not None:
            raise InputError(f"{self.path} has its placement built in; export it without --prior to pass positions")
        names = self.about["outputs"]
        return dict(zip(names, self.session.run(names, inputs), strict=True))

    def check_images(self, images: NDArray[Any]) -> None:
        """Refuse images that the file does not take."""
        channels = self.about["channels"]
        kind, axis = ("uint8", 3) if self.takes_bytes else ("float32", 1)
        shape = "(B, H, W, 3)" if self.takes_bytes else f"(B, {channels}, H, W)"
        if images.ndim != 4 or images.shape[axis] != channels or images.dtype != kind or not images.size:
            raise InputError(f"images must be {kind} of shape {shape}, got {images.dtype} {images.shape}")
        fixed = self.about.get("fixed_size", self.about.get("learned"))  # files of 0.2 have the second alone
        if fixed and self._sides(images) != self.about["img_size"]:
            needed, got = (" × ".join(map(str, each)) for each in (self.about["img_size"], self._sides(images)))
            raise InputError(f"{self.path} has a placement for images of {needed} pixels built in, got {got}")

    def _sides(self, images: NDArray[Any]) -> list[int]:
        """[H, W] of images."""
        return list(images.shape[1:3] if self.takes_bytes else images.shape[2:])

    def checked_positions(self, positions: ArrayLike | None, images: NDArray[Any]) -> NDArray[np.float32]:
        """Positions in the file's format, (B, N, 2, 3 or 7); raises a clear error for others."""
        batch = len(images)
        if positions is None:
            own = self.about["positions"]
            if own is None:
                raise InputError(f"{self.path} takes positions, and its model's prior draws them; pass positions")
            positions = np.broadcast_to(np.array(own, np.float32), (batch, *np.shape(own)))
        array = np.ascontiguousarray(positions, np.float32)
        columns = self.session.get_inputs()[1].shape[2]
        if array.ndim == 3 and array.shape[2] in (2, 3) and array.shape[2] < columns:  # scale 1, the whole picture
            rest = np.array([1, 0.5, 0.5, 1, 1], np.float32)[array.shape[2] - 2 : columns - 2]
            array = np.concatenate([array, np.broadcast_to(rest, (*array.shape[:2], len(rest)))], 2)
        if array.ndim != 3 or array.shape[0] != batch or array.shape[2] != columns:
            why = {3: "; export it with --sizes for windows of other scales", 7: "; export it with --regions"}
            advice = why.get(array.shape[2], "") if array.ndim == 3 else ""
            raise InputError(f"positions must have shape ({batch}, N, {columns}), got {array.shape}{advice}")
        low, high = self.about["token_range"]
        if not low <= array.shape[1] <= high:
            raise InputError(f"{self.path} takes {low} to {high} tokens, got {array.shape[1]}; export it anew for more")
        if not np.isfinite(array).all():
            raise InputError("positions must be finite, got NaN or infinity; fractions of height and width are needed")
        if columns > 2:
            largest = min(self.about["largest_scale"], max(1.0, max(self._sides(images)) / self.about["patch_size"]))
            least, most = float(array[..., 2].min()), float(array[..., 2].max())
            if least <= 0 or most > largest * (1 + 1e-5):
                bad = least if least <= 0 else most
                raise InputError(f"scales must be above 0 and at most {largest:g} for this image, got {bad:g}")
        return array


class ExportedCascade:
    """A folder that `spot export --cascade` wrote: a file per stage. An image stops when its confidence is high enough.

    cascade = ExportedCascade("vit-ti-cascade")
    result = cascade(pixels[None])  # logits (B, classes), confidence (B,) and stages (B,), the number of stages run
    """

    def __init__(self, folder: str | Path, threads: int | None = None) -> None:
        self.path = Path(folder)
        refuse_no_file(self.path / STAGES, "the stages of a cascade written by spot export --cascade")
        self.stages: list[dict[str, Any]] = json.loads((self.path / STAGES).read_text())["stages"]
        self.files = [Exported(self.path / stage["file"], threads) for stage in self.stages]
        self.about, self.classes, self.prepare = self.files[0].about, self.files[0].classes, self.files[0].prepare

    def __call__(self, images: ArrayLike, until: float | None = None) -> dict[str, NDArray[Any]]:
        """until: the confidence at which an image stops at any stage, instead of the calibrated thresholds."""
        images = np.ascontiguousarray(images)
        logits = np.zeros((len(images), len(self.classes)), np.float32)
        confidence, taken = np.zeros(len(images), np.float32), np.zeros(len(images), np.int64)
        rows = np.arange(len(images))
        for number, (file, stage) in enumerate(zip(self.files, self.stages, strict=True)):
            left = images if len(rows) == len(images) else images[rows]
            predicted = np.log(probabilities(file(left)["logits"]) + 1e-30)
            logits[rows] = stage["weight"] * predicted + stage["earlier_weight"] * logits[rows]
            confidence[rows], taken[rows] = probabilities(logits[rows]).max(1), number + 1
            threshold = stage["threshold"] if until is None else until
            rows = rows[confidence[rows] < threshold]
            if not len(rows):
                break
        return {"logits": logits, "confidence": confidence, "stages": taken}


def predict_photos(
    exported: Exported | ExportedCascade, paths: Sequence[Path], *, top: int = 5, skip: bool = False
) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """Yield each photograph with its most probable classes, as `spot.evaluation.photos.predict` does with torch."""
    if "logits" not in exported.about["outputs"]:
        raise InputError(f"{exported.path} gives {', '.join(exported.about['outputs'])} and no classes; export logits")
    if top < 1:
        raise InputError(f"top must be at least 1 class, got {top}")
    for path, pixels in open_photos(paths, exported.prepare, skip=skip):
        shares = probabilities(exported(pixels[None])["logits"][0]) * 100
        best = np.argsort(-shares, kind="stable")[:top].tolist()
        yield path, [{"index": i, "class": exported.classes[i], "probability": float(shares[i])} for i in best]


def onnx_session(path: str | Path, threads: int | None = None) -> Any:
    """An ONNX Runtime session on the CPU. Its threads do not spin while they wait."""
    refuse_no_file(path, "a file written by spot export")
    try:
        import onnxruntime
    except ImportError as error:
        raise InputError(f"running an exported file needs onnxruntime; {EXTRA}") from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no other common base class
        raise InputError(f"ONNX Runtime cannot open {path}: {' '.join(str(error).split())[:200]}") from error


def probabilities(logits: NDArray[Any]) -> NDArray[Any]:
    """Softmax over the last axis."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)
