"""Shards (wds/) and local parquet (hfds/): the same images as in memory, each exactly once."""

import io
import json
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from paper.sources import hash_images
from spot.cli import main
from spot.data.images import Images, open_data
from spot.data.loader import loader as batches_of
from spot.data.scenes import draw_scenes
from spot.errors import InputError


def plain(image):
    return torch.from_numpy(np.asarray(image).copy())


def scene_bytes():
    """Eleven scenes as bytes (H, W, 3), and their labels."""
    made = draw_scenes(range(11))
    pixels = made.images.mul(255).round().byte().permute(0, 2, 3, 1).numpy()
    return list(pixels), [int(label) for label in made.labels]


@pytest.fixture(scope="module")
def scenes():
    return scene_bytes()


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_shard(path, samples):
    """samples: key → {extension: bytes}."""
    with tarfile.open(path, "w") as tar:
        for key, parts in samples.items():
            for extension, data in parts.items():
                about = tarfile.TarInfo(f"{key}.{extension}")
                about.size = len(data)
                tar.addfile(about, io.BytesIO(data))


def write_shards(folder):
    """Write the scenes as three shards of validation (4, 4 and 3), and one of training."""
    both = enumerate(zip(*scene_bytes(), strict=True))
    samples = [(f"s{number:03d}", {"png": png(pixels), "cls": b"%d" % label}) for number, (pixels, label) in both]
    for number in range(3):
        write_shard(folder / f"scenes-val-{number}.tar", dict(samples[4 * number : 4 * number + 4]))
    write_shard(folder / "scenes-train-0.tar", dict(samples[:8]))
    return folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def parquet(tmp_path_factory, scenes):
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("parquet")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    images = [{"bytes": png(pixels), "path": None} for pixels in scenes[0]]
    made = datasets.Dataset.from_dict({"image": images, "label": scenes[1]}, features=features)
    made.to_parquet(str(folder / "validation-00000-of-00001.parquet"))
    made.select(range(8)).to_parquet(str(folder / "train-00000-of-00001.parquet"))
    return folder


@pytest.fixture(params=["wds", "hfds"])
def data(request):
    return f"{request.param}/{request.getfixturevalue({'wds': 'shards', 'hfds': 'parquet'}[request.param])}"


def test_images_and_labels_are_those_that_were_written(data, scenes, tmp_path):
    opened = open_data(data, transform=plain, root=tmp_path if data.startswith("hfds") else None)
    assert isinstance(opened, Images) and len(opened) == 11
    for (image, label, _), pixels, expected in zip(opened, *scenes, strict=True):
        assert np.array_equal(image.numpy(), pixels) and label == expected
    assert len(open_data(data, transform=plain, split="train")) == 8
    assert len(open_data(data, transform=plain, limit=5)) == 5


def test_two_processes_read_each_image_exactly_once(data):
    opened = open_data(data, transform=plain)
    shared = [list(batches_of(opened, 2, workers=1, process=number, processes=2)) for number in (0, 1)]
    keys = [key for batches in shared for batch in batches for key in batch.keys]
    assert sorted(keys) == sorted(opened.keys) and len(keys) == 11


def test_keys_name_shard_and_sample(shards):
    assert open_data(f"wds/{shards}", transform=plain).keys[3:5] == ["scenes-val-0/s003", "scenes-val-1/s004"]


def test_timm_s_own_stream_gives_the_same(shards, scenes):
    from timm.data import create_dataset

    split = "::".join(f"scenes-val-{number}.tar" for number in range(3))
    stream = create_dataset("wds/any", root=str(shards), split=split)
    theirs = [(np.asarray(image), label) for image, label in stream]
    ours = open_data("wds/any", transform=plain, root=shards)
    assert len(theirs) == len(ours)
    assert all(np.array_equal(a, b.numpy()) and one == two for (a, one), (b, two, _) in zip(theirs, ours, strict=True))


def test_info_and_labels_in_json_are_timm_s(tmp_path, scenes):
    image = {"json": b'{"kind": 7}', "jpg": png(scenes[0][0])}
    write_shard(tmp_path / "a.tar", {"x": image, "y": {"txt": b"no image"}})
    split = {"name": "validation", "num_samples": 1, "filenames": ["a.tar"], "shard_lengths": [1], "alt_label": "kind"}
    (tmp_path / "_info.json").write_text(json.dumps({"splits": {"validation": split}}))
    opened = open_data(f"wds/{tmp_path}", transform=plain)
    assert [(label, key) for _, label, key in opened] == [(7, "a/x")]
    with pytest.raises(InputError, match="has the splits validation, and no train"):
        open_data(f"wds/{tmp_path}", transform=plain, split="train")


def test_results_are_kept_under_another_name_when_a_shard_is_written_anew(tmp_path, scenes):
    write_shard(tmp_path / "a.tar", {"x": {"png": png(scenes[0][0])}})
    before = hash_images(open_data(f"wds/{tmp_path}", transform=plain))
    write_shard(tmp_path / "a.tar", {"x": {"png": png(scenes[0][1])}, "note": {"txt": b"."}})
    assert hash_images(open_data(f"wds/{tmp_path}", transform=plain)) != before


def test_an_unreadable_image_stops_or_is_left_out_by_name(tmp_path, scenes):
    write_shard(tmp_path / "a.tar", {"x": {"png": png(scenes[0][0])}, "y": {"png": b"no picture"}})
    with pytest.raises(InputError, match=r"a/y"):
        list(batches_of(open_data(f"wds/{tmp_path}", transform=plain)))
    opened = open_data(f"wds/{tmp_path}", transform=plain, skip=True)
    assert [key for batch in batches_of(opened) for key in batch.keys] == ["a/x"] and opened.skipped == ["a/y"]


@pytest.mark.parametrize(
    "samples, sentence",
    [
        ({}, "no image in the shards"),
        ({"x": {"png": b"", "cls": b"cat"}}, "must have a class number in its .cls, got 'cat'"),
        ({"x": {"png": b"", "cls": b"40"}}, "has class 40, the model's are 0 to 31"),
    ],
)
def test_shards_that_do_not_fit_are_one_sentence(tmp_path, samples, sentence):
    write_shard(tmp_path / "a.tar", samples)
    with pytest.raises(InputError, match=sentence):
        open_data(f"wds/{tmp_path}", transform=plain, classes=32)


def test_what_is_no_shard_is_one_sentence(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"x" * 2000)
    with pytest.raises(InputError, match="not a readable shard"):
        open_data(f"wds/{tmp_path}", transform=plain)


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr("spot.data.images.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs datasets; pip install 'spot-vit\[data\]'"):
        open_data("hfds/a", transform=plain)


def test_they_are_evaluated_searched_mapped_and_trained_on(data, tmp_path, capsys):
    table = tmp_path / "rows.json"
    main(["evaluate", "scenes-a", "--data", data, "--tokens", "9", "--json", str(table)])
    (row,) = json.loads(table.read_text())["rows"]
    assert row["images"] == 11
    search = ["search", "--model", "scenes-a", "--tokens", "9", "--steps", "1", "--limit", "3"]
    main([*search, "--data", data, "--out", str(tmp_path / "p.safetensors")])
    main(["saliency", "--data", data, "--limit", "2", "--out", str(tmp_path / "maps")])
    assert len(list((tmp_path / "maps").rglob("*.png"))) == 2
    nano = ["img_size=64", "patch_size=16", "embed_dim=32", "depth=1", "num_heads=2", "num_classes=32"]
    settings = ["--recipe", "scenes-retrofit", "--set", "batch_size=4", "epochs=1", "budgets=(4,9)"]
    run = ["--data", data, "--out", str(tmp_path / "run")]
    main(["retrofit", "vit_tiny_patch16_224", "--fresh", *nano, *settings, *run])
    assert "The trained model is in" in capsys.readouterr().out
