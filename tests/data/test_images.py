"""Images as a person sees them, labels as the model counts them, and no image lost in silence."""

import struct
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from timm.data import ImageNetInfo

from spot.data.classes import class_folders, class_names
from spot.data.images import open_data
from spot.data.loader import loader
from spot.errors import InputError
from tests.data.files import cut_short, folders, picture, plain

WNIDS = ImageNetInfo().label_names()


def test_sorted_class_folders_are_counted_from_zero(tmp_path):
    data = open_data(folders(tmp_path, "dog", "ant", "cat", images=2), transform=plain)
    assert data.classes == ["ant", "cat", "dog"]
    assert [(label, key) for _, label, key in data][:3] == [
        (0, "ant/0.png"),
        (0, "ant/1.png"),
        (1, "cat/0.png"),
    ]
    assert len(data) == 6


@pytest.mark.parametrize("names, expected", [((WNIDS[7], WNIDS[999]), [7, 999]), (("10", "9"), [10, 9])])
def test_labels_are_the_models_indices_and_not_places_in_the_folder(tmp_path, names, expected):
    data = open_data(folders(tmp_path, *names), transform=plain, classes=WNIDS)
    assert [label for _, label, _ in data] == expected
    assert data.classes == WNIDS


def test_class_folders_that_do_not_fit_the_model_are_refused(tmp_path):
    folders(tmp_path, WNIDS[0], "unicorn")
    with pytest.raises(InputError, match="no class 'unicorn'"):
        open_data(tmp_path, transform=plain, classes=WNIDS)
    with pytest.raises(InputError, match="10 unnamed classes, the data 2 class folders"):
        open_data(tmp_path, transform=plain, classes=10)
    assert open_data(tmp_path, transform=plain, classes=2).classes == [WNIDS[0], "unicorn"]


def test_a_path_without_images_is_refused(tmp_path):
    (tmp_path / "empty" / "class").mkdir(parents=True)
    for path, sentence in (
        (tmp_path / "empty" / "class", "there is no image in"),
        (tmp_path / "empty", "there is no image in"),
        (tmp_path / "nowhere", "is missing"),
        (picture(tmp_path / "a.png"), "is a file"),
    ):
        with pytest.raises(InputError, match=sentence):
            open_data(path, transform=plain)


def test_a_flat_folder_has_no_labels(tmp_path):
    for name in ("b.png", "a.jpg"):
        picture(tmp_path / name)
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / "._a.jpg").write_text("macOS")
    assert [(label, key) for _, label, key in open_data(tmp_path, transform=plain)] == [
        (-1, "a.jpg"),
        (-1, "b.png"),
    ]


def test_images_beside_class_folders_are_not_left_out_in_silence(tmp_path):
    picture(folders(tmp_path, "ant", "cat") / "stray.png")
    with pytest.raises(InputError, match=r"images beside folders, such as stray\.png"):
        open_data(tmp_path, transform=plain)


def test_imagenet_with_train_and_val_gives_the_split_asked_for(tmp_path):
    folders(tmp_path / "val", WNIDS[3])
    folders(tmp_path / "train", WNIDS[3], WNIDS[4])
    options = {"transform": plain, "classes": WNIDS}
    assert [key for _, _, key in open_data(tmp_path, **options)] == [f"val/{WNIDS[3]}/0.png"]
    assert [label for _, label, _ in open_data(tmp_path, split="train", **options)] == [3, 4]
    with pytest.raises(InputError, match="holds val, train, but no test"):
        open_data(tmp_path, split="test", **options)


def test_a_class_may_be_called_train(tmp_path):
    assert open_data(folders(tmp_path, "bus", "train"), transform=plain).classes == ["bus", "train"]


def test_imagenet_from_kaggle_takes_labels_from_its_table(tmp_path):
    base = tmp_path / "ILSVRC" / "Data" / "CLS-LOC"
    picture(base / "val" / "ILSVRC2012_val_00000001.png")
    picture(base / "val" / "ILSVRC2012_val_00000002.png")
    folders(base / "train", WNIDS[5])
    (tmp_path / "LOC_val_solution.csv").write_text(
        "ImageId,PredictionString\n"
        f"ILSVRC2012_val_00000002,{WNIDS[65]} 1 2 3 4 {WNIDS[65]} 5 6 7 8 \n"
        f"ILSVRC2012_val_00000001,{WNIDS[970]} 85 1 499 272 \n"
    )
    options = {"transform": plain, "classes": WNIDS}
    assert [label for _, label, _ in open_data(tmp_path, **options)] == [970, 65]
    assert [label for _, label, _ in open_data(tmp_path, split="train", **options)] == [5]


def test_a_limit_spreads_over_the_classes(tmp_path):
    data = open_data(folders(tmp_path, *"abcdef", images=3), transform=plain, limit=6)
    assert [key for _, _, key in data] == [f"{name}/0.png" for name in "abcdef"]
    assert len(open_data(tmp_path, transform=plain, limit=1000)) == 18


# Unreadable images, batches, waiting -----------------------------------------------------------


@pytest.fixture
def damaged(tmp_path) -> Path:
    """Five images, of which a/1.jpg is cut short and b/0.png is text."""
    folders(tmp_path, "a", "b", "c")
    cut_short(tmp_path / "a" / "1.jpg")
    (tmp_path / "b" / "0.png").write_text("not an image")
    return folders(tmp_path, "c", images=2)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_stops_the_run_with_one_sentence(damaged, workers):
    with pytest.raises(InputError, match=r"a/1\.jpg cannot be read") as caught:
        list(loader(open_data(damaged, transform=plain), 2, workers))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("batch_size, workers", [(1, 0), (2, 1), (8, 0)])
def test_or_is_left_out_and_counted(damaged, workers, batch_size):
    data = open_data(damaged, transform=plain, skip=True)
    batches = list(loader(data, batch_size, workers))
    assert [key for batch in batches for key in batch.keys] == ["a/0.png", "c/0.png", "c/1.png"]
    assert torch.cat([batch.labels for batch in batches]).tolist() == [0, 2, 2]
    assert all(len(batch.images) == len(batch.keys) for batch in batches)
    assert data.skipped == ["a/1.jpg", "b/0.png"]
    assert [sample is None for sample in data] == [False, True, True, False, False]  # without a loader


def test_waiting_is_the_readers_time_and_not_the_consumers(tmp_path):
    def slow(image):
        time.sleep(0.02)
        return plain(image)

    batches = loader(open_data(folders(tmp_path, "a", images=6), transform=slow), 2)
    for _ in batches:
        time.sleep(0.05)
    assert 0.12 <= batches.waited < batches.seconds - 0.14  # 6 images of 20 ms; 3 batches of 50 ms


# timm's data sets and class names ----------------------------------------------------------------


@pytest.fixture
def mnist(tmp_path) -> Path:
    """Three digits of 28 × 28 in MNIST's own files."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    pixels = np.zeros((3, 28, 28), dtype=np.uint8)
    pixels[1] = 255
    for part, labels in (("t10k", [7, 2, 1]), ("train", [5, 0, 4])):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 0x803, 3, 28, 28) + pixels.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, 3) + bytes(labels))
    return tmp_path


def test_a_torchvision_data_set_is_opened_by_timms_name(mnist):
    data = open_data("torch/mnist", transform=plain, root=mnist)
    samples = list(data)
    assert [(label, key) for _, label, key in samples] == [(7, "00000000"), (2, "00000001"), (1, "00000002")]
    assert samples[1][0].flatten().tolist() == [255, 255, 255]  # grey became RGB
    assert [label for _, label, _ in open_data("torch/mnist", transform=plain, root=mnist, split="train")] == [5, 0, 4]
    assert len(open_data("torch/mnist", transform=plain, root=mnist, limit=2)) == 2


def test_ten_digits_are_not_the_first_ten_of_a_thousand_classes(mnist):
    with pytest.raises(InputError, match="torch/mnist has 10 classes, the model 1000"):
        open_data("torch/mnist", transform=plain, root=mnist, classes=WNIDS)
    assert len(open_data("torch/mnist", transform=plain, root=mnist, classes=10)) == 3


def test_a_timm_name_that_cannot_be_opened_says_why(tmp_path, monkeypatch):
    if find_spec("datasets"):  # which would ask the hub, again and again
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="give the data root"):
        open_data("torch/mnist", transform=plain)
    with pytest.raises(InputError, match=r"torch/nothing: Unknown torchvision dataset"):
        open_data("torch/nothing", transform=plain, root=".")
    with pytest.raises(InputError, match="needs a folder of shards on this disk"):
        open_data("wds/anything", transform=plain)
    for name in ("wds/anything", "hfds/nobody/anything"):
        with pytest.raises(InputError, match=r"no shard of split val|could not open hfds/nobody/anything"):
            open_data(name, transform=plain, root=tmp_path)


def test_a_1000_class_model_knows_imagenets_folders_and_names():
    model = timm.create_model("vit_tiny_patch16_224")
    assert class_folders(model)[:2] == ["n01440764", "n01443537"]
    assert class_names(model)[1] == "goldfish, Carassius auratus"


def test_a_model_with_its_own_names_is_asked_first_and_another_admits_it_has_none():
    model = timm.create_model("vit_tiny_patch16_224", num_classes=2)
    assert class_folders(model) == 2
    assert class_names(model) is None
    model.pretrained_cfg = {"label_names": ["c", "d"], "label_descriptions": {"d": "dog"}}
    assert class_folders(model) == ["c", "d"]
    assert class_names(model) == ["c", "dog"]
