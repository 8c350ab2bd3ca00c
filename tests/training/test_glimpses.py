"""Teaching a model to find things in large pictures: with boxes, and without."""

import csv
from contextlib import suppress

import numpy as np
import pytest
import torch
from PIL import Image

import spot
from spot.data.large_pictures import LargePictures, boxes_to_places, read_boxes
from spot.errors import InputError
from spot.options import GlimpseOptions
from spot.placement.finder import Finder
from spot.placement.glimpses import cut_out, glimpse_positions
from spot.training import discovery, optim
from spot.training import finder as finder_training
from spot.training.discovery import dense_tokens, peak_centers
from spot.training.finder import detect, detection_loss, target_maps, train_finder, train_second_stage
from spot.training.glimpses import Glimpses, learn_to_find
from tests.tokens.test_regions import NANO, nano

COLOURS = {"blue": (20, 40, 220), "red": (220, 30, 20)}


@pytest.fixture(scope="module")
def street(tmp_path_factory):
    """18 grey pictures of 96 × 160 pixels: none, or with a red or a blue disc of 12 to 20 pixels, and their boxes."""
    root, draw, rows = tmp_path_factory.mktemp("street"), np.random.default_rng(0), []
    for kind in ("none", *COLOURS):
        for number in range(6):
            pixels = draw.integers(90, 150, (96, 160, 3)).astype(np.uint8)
            file = root / "train" / kind / f"{number}.png"
            if kind in COLOURS:
                size, top, left = draw.integers(12, 20), draw.integers(5, 70), draw.integers(5, 130)
                y, x = np.mgrid[:96, :160] + 0.5
                disc = (y - top - size / 2) ** 2 + (x - left - size / 2) ** 2 < (size / 2) ** 2
                pixels[disc] = COLOURS[kind]
                rows.append([f"train/{kind}/{number}.png", left, top, left + size, top + size])
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)
    with (root / "boxes.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["file", "left", "top", "right", "bottom"], *rows])
    return root


@pytest.fixture(scope="module")
def pictures(street):
    return LargePictures.open(street)


@pytest.fixture(scope="module")
def places(street, pictures):
    return boxes_to_places(read_boxes(street / "boxes.csv", pictures))


def test_a_cut_out_is_what_tokens_read_of_the_whole_picture():
    picture = torch.randint(256, (3, 90, 130), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    model = spot.adapt(nano())
    for y, x, side in ((40.3, 61.7, 13.0), (3.0, 128.0, 24.0), (50.0, 60.0, 55.5)):
        glimpse = torch.tensor([[[y / 90, x / 130, side]]])
        whole = model(picture.float()[None], glimpse_positions(picture.float()[None], glimpse, 16, 8))
        part = cut_out(picture, y, x, side, 32)[None]
        torch.testing.assert_close(model(part, model.grid(part)), whole, atol=2e-3, rtol=1e-3)


def test_boxes_are_places_in_pixels(street, pictures, places):
    left, top, right, bottom = read_boxes(street / "boxes.csv", pictures)["train/red/3.png"][0].tolist()
    assert places["train/red/3.png"].tolist() == [[(top + bottom) / 2, (left + right) / 2, right - left, 1.0]]
    assert places["train/none/0.png"].shape == (0, 4)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("train/red/0.png,150,5,170,20", "outside its picture of 96 × 160 pixels: left 150, top 5, right 170"),
        ("train/red/0.png,20,5,10,20", "empty or outside its picture"),
        ("train/red/0.png,a,5,10,20", "something other than numbers"),
        ("train/reed/0.png,1,5,10,20", "no box for any of the 18 pictures"),
    ],
)
def test_bad_boxes_get_a_sentence(pictures, tmp_path, line, sentence):
    (tmp_path / "boxes.csv").write_text(f"file,left,top,right,bottom\n{line}\n")
    with pytest.raises(InputError, match=sentence):
        read_boxes(tmp_path / "boxes.csv", pictures)


def test_a_picture_in_which_nothing_can_be_found_is_named(pictures, tmp_path):
    for kind, size in (("none", (40, 90)), ("sign", (4, 90))):
        (tmp_path / kind).mkdir()
        Image.fromarray(np.zeros((*size, 3), np.uint8)).save(tmp_path / kind / "1.png")
    source = spot.adapt("vit_tiny_patch16_224", **NANO)
    with pytest.raises(InputError, match=r"sign/1\.png: a picture of 4 × 90 pixels is smaller than one token"):
        learn_to_find(source, tmp_path, tmp_path / "run")
    with pytest.raises(InputError, match=r"no\.csv is missing"):
        read_boxes(tmp_path / "no.csv", pictures)


def test_a_class_folder_without_images_gets_a_sentence(tmp_path):
    (tmp_path / "train" / "empty").mkdir(parents=True)
    (tmp_path / "train" / "full").mkdir()
    Image.new("RGB", (90, 90)).save(tmp_path / "train" / "full" / "1.png")
    with pytest.raises(InputError, match="empty has no image"):
        LargePictures.open(tmp_path)


def test_what_the_network_is_to_say_is_1_at_the_middle_of_a_place():
    heatmap, values, weights = target_maps(torch.tensor([[4.3, 10.8, 20.0, 1.0]]))
    assert heatmap.max() == heatmap[4, 10] == 1
    torch.testing.assert_close(values[:, 4, 10], torch.tensor([0.0, -0.2, 0.3]), atol=1e-6, rtol=0)
    assert weights[4, 10] == 1 and weights[0, 0] == 0
    said = torch.cat([torch.full((1, 16, 24), -9.0), values])
    missed = detection_loss(said[None], heatmap[None], values[None], weights[None])
    said[0, 4, 10] = 9.0
    found = detection_loss(said[None], heatmap[None], values[None], weights[None])
    assert found < missed / 5


def test_a_finder_learns_where_discs_are(pictures, places):
    torch.manual_seed(0)
    finder = train_finder(Finder(8, longest=160, width=8, body=16), pictures, places, steps=100, each=4)
    hits = []
    for key, found in detect(finder, pictures, 1).items():
        if len(places[key]):
            y, x, *_ = found[0].tolist()
            hits.append(float((places[key][0, :2] - torch.tensor([y, x])).abs().max()) < places[key][0, 2] / 2)
    assert np.mean(hits) >= 0.75  # by chance 1 of 40


def test_the_second_stage_tells_discs_from_what_else_was_found(pictures, places):
    """The first stage is untrained, so that its places are anywhere."""
    torch.manual_seed(0)
    first = Finder(8, longest=160, width=4, body=8).eval()
    finder = train_second_stage(first, pictures, places, candidates=30, steps=60)
    for name, tensor in first.look.state_dict().items():
        assert torch.equal(finder.look.state_dict()[name], tensor)  # the first stage is the same
    discs, others = [], []
    for key, picture in pictures.items():
        for y, x, size, _ in places[key].tolist():
            discs.append(cut_out(picture, y, x, 2 * size, 32))
        if not len(places[key]):
            others.append(cut_out(picture, 48.0, 80.0, 32.0, 32))
    there, elsewhere = (finder.look.second(torch.stack(part) / 127.5 - 1) for part in (discs, others))
    assert there.min() > elsewhere.max()


def test_glimpses_of_a_picture_with_nothing_are_of_its_class(pictures, places):
    none = pictures.classes.index("none")
    views, labels = Glimpses(pictures, places, none=none, samples=24).batch(range(18), np.random.default_rng(0))
    assert views.shape == (18, 3, 24, 24)
    assert all(label in (own, none) for label, own in zip(labels.tolist(), pictures.labels, strict=True))


def test_tiles_give_every_patch_its_token():
    model = spot.adapt(nano())
    image = torch.randn(1, 3, 72, 100, generator=torch.Generator().manual_seed(0))
    tokens = dense_tokens(model, image)
    assert tokens.shape == (9, 12, 32)
    corner = model.forward_features(image[..., :32, :32], model.grid(image[..., :32, :32]))[0, 1]
    torch.testing.assert_close(tokens[0, 0], corner, atol=1e-5, rtol=1e-4)


def test_the_highest_peaks_of_scores_are_in_pixels():
    scores = torch.zeros(10, 12)
    scores[2, 3], scores[2, 4], scores[8, 9] = 5.0, 4.0, 3.0
    assert peak_centers(scores, 2, 8).tolist() == [[20.0, 28.0], [68.0, 76.0]]


@pytest.mark.parametrize("told", [True, False])
def test_a_model_learns_to_find_and_an_interrupted_run_ends_with_the_same_weights(street, tmp_path, told, monkeypatch):
    monkeypatch.setattr(discovery, "FINDER_STEPS", 8)
    monkeypatch.setattr(finder_training, "SAVE_EVERY", 3)
    source = spot.adapt("vit_tiny_patch16_224", **NANO)
    how = GlimpseOptions(tokens=9, longest=160, candidates=4, steps=8, epochs=1, rounds=2)
    boxes = street / "boxes.csv" if told else None
    model = learn_to_find(source, street, tmp_path / "run", how, boxes=boxes)
    writes = []

    def stopping(write):
        def write_and_stop(path, *content):
            write(path, *content)
            if "spot_tiles" not in content:
                writes.append(path)
                raise KeyboardInterrupt

        return write_and_stop

    monkeypatch.setattr(optim, "write_state", stopping(optim.write_state))
    monkeypatch.setattr(discovery, "write_tensors", stopping(discovery.write_tensors))
    stopped = None
    while stopped is None:
        with suppress(KeyboardInterrupt):
            stopped = learn_to_find(source, street, tmp_path / "stopped", how, boxes=boxes)
    # Before and after the crops around false positives; each round of discovery has as many, a finder and places.
    assert len(writes) == (2 if told else 2 + 1 + 2 * 4)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(stopped.state_dict()[name], tensor, atol=0, rtol=0, msg=name)
    again = spot.load(tmp_path / "run" / "model")
    images = torch.randn(1, 3, 96, 160)
    torch.testing.assert_close(again(images), model(images))
    assert again.tokens == 9 and again.place(images).shape == (1, 9, 7)
    with pytest.raises(InputError, match="was made with tokens=9, now tokens=16; choose another --out"):
        learn_to_find(source, street, tmp_path / "run", GlimpseOptions(tokens=16), boxes=boxes)
