"""Files of every format that is read, damaged in many ways: each is read right, or refused in one sentence."""

import contextlib
import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from paper.cache import Cache
from spot.data.picture import open_image
from spot.hashes import hash_tensors
from spot.models.checkpoints import load_saved, read_weights, save_model
from spot.models.family import apply_delta, save_delta
from spot.placement.files import Placements
from spot.store import read_tensors, write_state, write_tensors
from spot.training.run_folder import RunFolder
from tests.conftest import make_nano
from tests.faults.harness import Tally

SETTINGS = {"recipe": {"name": "r", "lr": 0.1}, "seed": 0}
ABOUT = {"kind": "outcomes", "name": "x", "tokens": 4}


@dataclass
class Format:
    """A good file, how it is read, and whether what is read of a damaged one must be the same."""

    content: bytes
    suffix: str
    read: Callable[[Path], Any]  # → something comparable
    checked: bool = False  # has a checksum: damage is never taken for content
    header: str = ""  # our entry of a safetensors header


def formats(folder: Path) -> dict[str, Format]:
    """One good file of each format."""
    model, base = make_nano(), make_nano().vit.state_dict()
    image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    settings = json.dumps({"settings": SETTINGS})
    cache, run, resumed = Cache(folder), folder / "run", folder / "resumed"
    resumed.mkdir()
    (resumed / "run.json").write_text(settings)
    found: dict[str, Format] = {}

    def add(name: str, suffix: str, write: Callable[[Path], Any], read: Callable[[Path], Any], **more: Any) -> None:
        path = folder / f"good{suffix}"
        write(path)
        found[name] = Format(path.read_bytes(), suffix, read, **more)

    def copied(place: Path, read: Callable[[], Any]) -> Callable[[Path], Any]:
        """A function that reads a file after copying it to its place."""

        def copy_and_read(path: Path) -> Any:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
            return read()

        return copy_and_read

    def hashed(tensors: Any) -> Any:
        return None if tensors is None else hash_tensors(tensors)

    def model_read(path: Path) -> Any:
        with torch.no_grad():
            return finite(load_saved(path)(image, tokens=4)).tolist()

    def placements_read(path: Path) -> Any:
        placements = Placements.load(path)
        return [list(placements.keys), finite(placements.trajectory).tolist()]

    def cache_write(path: Path) -> None:
        cache.put(ABOUT, {"ranks": torch.arange(5)})
        shutil.copyfile(cache.path(ABOUT), path)

    places = Placements(["a", "b"], torch.rand(2, 4, 2), {"m": 1}, {"losses": torch.rand(2)})
    add("model", ".safetensors", lambda p: save_model(model, p), model_read, checked=True, header="spot_vit")
    add("placements", ".safetensors", places.save, placements_read, checked=True, header="spot-placements")
    add("delta", ".safetensors", lambda p: save_delta(make_nano(1), base, p, base="vit_tiny_patch16_224"),
        lambda p: hash_tensors(apply_delta(base, p)), checked=True, header="spot_delta")  # fmt: skip
    add("cache", ".safetensors", cache_write, copied(cache.path(ABOUT), lambda: hashed(cache.get(ABOUT))), checked=True)
    run_read = copied(run / "run.json", lambda: RunFolder(run, SETTINGS).settings)
    add("run.json", ".json", lambda p: p.write_text(settings), run_read)
    state = {"model": torch.rand(40), "step": torch.tensor(3)}
    newest = resumed / "checkpoints" / "00000002.pt"
    state_read = copied(newest, lambda: hashed(RunFolder(resumed, SETTINGS).load()))
    add("checkpoint", ".pt", lambda p: write_state(p, state), state_read, checked=True)
    weights = {"a.weight": torch.rand(4), "b": torch.ones(2)}
    add("weights", ".pth", lambda p: torch.save(weights, p), lambda p: sorted(read_weights(p)))
    picture = Image.effect_noise((24, 16), 60).convert("RGB")
    for ending in ("png", "jpg", "gif", "bmp", "tiff", "webp", "avif"):
        with contextlib.suppress(KeyError, OSError):  # this Pillow was built without it
            add(ending, f".{ending}", picture.save, lambda p: open_image(p).mode)
    return found


def finite(values: torch.Tensor) -> torch.Tensor:
    assert bool(values.isfinite().all()), "not finite"
    return values


def mutated(content: bytes, draw: random.Random) -> bytes:
    """The file with some of its bytes changed, lost, doubled or moved."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        place = draw.randrange(len(data)) if data else 0
        near = min(place, draw.randrange(300))  # headers are at the beginning
        place, size = draw.choice((place, near)), draw.choice((1, 2, 8, 64))
        kind = draw.randrange(7)
        if kind == 0 and data:
            data[place] ^= 1 << draw.randrange(8)
        elif kind == 1 and data:
            data[place] = draw.randrange(256)
        elif kind == 2:
            del data[place:]
        elif kind == 3:
            del data[place : place + size]
        elif kind == 4:
            data[place:place] = draw.randbytes(size)
        elif kind == 5:
            data[place : place + size] = b"\0" * min(size, len(data) - place)
        else:
            data[place:place] = data[near : near + size]
    return bytes(data)


VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 7, 2.5, 1e308, math.nan, 10**18, "", "x", "a/b", "local-dir:/tmp", [], [1], [[]], {}, {"a": 1},
    "spectral", "uniform", "auto", "authors", [0, 0, 0], [1e-300] * 3, "vit_tiny_patch16_224", "resnet50",
)  # fmt: skip


def reheaded(good: Format, path: Path, draw: random.Random) -> None:
    """Write a file with a right checksum whose header or tensors say something else."""
    source = path.with_name("source.safetensors")
    source.write_bytes(good.content)
    tensors, about = read_tensors(source, good.header)
    for _ in range(draw.choice((1, 1, 2))):
        part, place = about, draw.choice([*about])
        while isinstance(part.get(place), dict) and part[place] and draw.random() < 0.8:
            part, place = part[place], draw.choice([*part[place]])
        if draw.random() < 0.2:
            part.pop(place, None)
        else:
            part[place] = draw.choice(VALUES)
        if draw.random() < 0.3:
            name = draw.choice([*tensors])
            tensor = tensors.pop(name)
            change = draw.randrange(4)
            if change == 0 and tensor.ndim:
                tensors[name] = tensor[:-1]
            elif change == 1:
                tensors[name] = tensor.to(draw.choice((torch.float16, torch.int64, torch.uint8, torch.bool)))
            elif change == 2:
                tensors[name + "x"] = tensor
    write_tensors(path, tensors, good.header, about)


def mutate(name: str, good: Format, tally: Tally, folder: Path, seeds: range) -> None:
    """Read as many damaged files as there are seeds."""
    path = folder / f"bad{good.suffix}"
    path.write_bytes(good.content)
    right = good.read(path)
    for seed in seeds:
        draw = random.Random(f"{name} {seed}")
        structural = bool(good.header) and seed % 2 == 1
        if structural:
            reheaded(good, path, draw)
        else:
            path.write_bytes(mutated(good.content, draw))
        bare = good.checked and not structural and b"sha256" in good.content and b'"sha256"' not in path.read_bytes()

        def work(structural: bool = structural, bare: bool = bare) -> None:
            made = good.read(path)
            if good.checked and not structural and not bare:
                assert made is None or made == right, "damage was taken for content"

        tally.check(f"damaged {name}", work, f"seed {seed}")
