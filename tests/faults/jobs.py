"""Work that writes files, small enough to be killed before each file operation: (folder) → digest of the result."""

from collections.abc import Callable
from pathlib import Path

import torch

from spot.data.images import open_data
from spot.data.picture import evaluation_transform
from spot.evaluation.features import embed
from spot.models.checkpoints import save_folder
from spot.placement.dataset_search import search_dataset
from spot.placement.saliency import write_maps
from spot.store import read_json, write_json, write_state, write_tensors
from tests.conftest import make_nano
from tests.faults.harness import digest
from tests.training.small_run import make_images, small_run

Job = Callable[[Path], str]


def images(folder: Path, count: int = 6) -> Path:
    """Two classes of pictures, outside the folder that work is killed in."""
    return folder if folder.is_dir() else make_images(folder, classes=2, each=count // 2)


def jobs(pictures: Path) -> dict[str, Job]:
    """The work by name. Everything is made before, so that only its own files are touched."""
    model = make_nano()
    data = open_data(pictures, transform=evaluation_transform(model.data_config))
    raw = open_data(pictures, transform=to_tensor)

    def search(folder: Path) -> str:
        search_dataset(model.at(tokens=4, prior="uniform"), data, folder / "p.safetensors", steps=1, batch_size=2)
        return digest(folder / "p.safetensors")

    def features(folder: Path) -> str:
        embed(model.at(tokens=4), data, folder / "f.safetensors", batch_size=2)
        return digest(folder / "f.safetensors")

    def maps(folder: Path) -> str:
        write_maps(raw, folder / "maps", "spectral")
        return digest(*sorted((folder / "maps").rglob("*.png")))

    def model_folder(folder: Path) -> str:
        save_folder(model, folder / "model")
        return digest(folder / "model" / "model.safetensors", folder / "model" / "config.json")

    def files(folder: Path) -> str:
        for number in (1, 2):  # over the old
            write_json(folder / "a.json", {"n": number})
            write_tensors(folder / "b.safetensors", {"x": torch.full((9,), number)}, "k", {})
            write_state(folder / "c.pt", {"x": torch.full((9,), number)})
        return f"{read_json(folder / 'a.json')} {digest(folder / 'b.safetensors')}"

    def train(folder: Path) -> str:
        small_run("cls-in1k", pictures, folder / "run", batch_size=2, epochs=1.0, randaug=None, mix_share=0.0)
        return digest(folder / "run" / "model" / "model.safetensors")

    return {"search": search, "features": features, "maps": maps, "model": model_folder, "files": files, "train": train}


def to_tensor(picture) -> torch.Tensor:
    return torch.tensor(list(picture.tobytes())).view(picture.height, picture.width, 3).permute(2, 0, 1) / 255
