"""The lab measures what a plain loop measures, once, and keeps it."""

import copy
from unittest.mock import Mock

import pytest
import torch

import spot
from paper import lab as module
from paper.backbone import backbones, budgets
from paper.lab import Lab
from paper.settings import StudySettings
from paper.sources import Sources, balance
from paper.statistics import Predictions, predicted
from spot.data.images import data_for, open_data
from spot.data.loader import loader
from spot.errors import InputError
from spot.evaluation.accuracy import Setting
from spot.hashes import hash_model
from spot.models.checkpoints import save_folder
from spot.models.family import save_delta
from spot.placement import priors
from tests.conftest import VIT_TINY, make_nano
from tests.data.files import folders


def read_all(small, name="images", limit=None):
    """All images of a folder, their labels and keys, for model `one`."""
    data = data_for(spot.load(small / "one"), small / name, limit=limit)
    ((images, labels, keys),) = loader(data, 100)
    return images, labels, keys


@pytest.fixture
def evaluated(monkeypatch):
    """A mock of the lab's `evaluate` that measures, and counts how often images were read."""
    monkeypatch.setattr(module, "evaluate", Mock(side_effect=module.evaluate))
    return module.evaluate


@pytest.mark.parametrize(
    "cells, expected", [(196, (25, 49, 100, 196)), (64, (9, 16, 36, 64)), (256, (36, 64, 121, 256))]
)
def test_budgets_are_squares_near_an_eighth_a_quarter_a_half_and_all(cells, expected):
    assert budgets(cells) == expected


def test_accuracy_is_that_of_a_plain_loop(small, make_lab):
    images, labels, keys = read_all(small)
    model = spot.load(small / "one", tokens=4, prior="isotropic")
    with torch.no_grad():
        right = model(images).argmax(1) == labels
    lab = make_lab()
    found = lab.accuracy(lab.backbones[0], {"": Setting("isotropic", 4)})[""]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    assert found.keys == sorted(keys)
    assert torch.equal(found.right, right[order])


def test_neighbours_vote_as_a_plain_loop_votes(small, make_lab):
    model = spot.load(small / "one", tokens=4, prior="isotropic")
    (queries, labels, keys), (entries, answers, _) = read_all(small), read_all(small, "bank")
    with torch.no_grad():
        here, there = (
            torch.nn.functional.normalize(model.forward_head(model.forward_features(each), pre_logits=True), dim=1)
            for each in (queries, entries)
        )
    right = {}
    for key, label, similar in zip(keys, labels.tolist(), here @ there.T, strict=True):
        votes = torch.zeros(10)
        for index in similar.argsort(descending=True)[:20].tolist():
            votes[answers[index]] += torch.exp(similar[index] / 0.07)
        right[key] = int(votes.argmax()) == label
    lab = make_lab()
    found = lab.accuracy(lab.backbones[0], {"": Setting("isotropic", 4)}, knn=True)[""]
    assert found.knn.tolist() == [right[key] for key in found.keys]


def test_what_was_measured_is_not_measured_again(make_lab, evaluated):
    wanted = dict(enumerate([Setting("uniform", 4, 1), Setting("salient", 4), Setting("patch-dropout", 9)]))
    first = make_lab()
    found = first.accuracy(first.backbones[0], wanted, knn=True)
    searched = first.oracle(first.backbones[0])
    before = evaluated.call_count
    again = make_lab()
    for number, new in again.accuracy(again.backbones[0], wanted, knn=True).items():
        assert torch.equal(found[number].right, new.right) and torch.equal(found[number].knn, new.knn)
    assert evaluated.call_count == before
    assert torch.equal(again.oracle(again.backbones[0]).trajectory, searched.trajectory)
    more = again.accuracy(again.backbones[0], {**wanted, 3: Setting("uniform", 4, 2)})
    assert evaluated.call_count == before + 1 and len(more) == 4


def change_sigma(small, lab, monkeypatch):
    model = lab.backbones[0].model
    lab.backbones[0].__dict__["loaded"] = spot.SpotViT(model.vit, tokens=4, sigma=0.7, options=model.options).eval()


def change_constant_of_prior(small, lab, monkeypatch):
    monkeypatch.setattr(priors, "FOCUS_BLUR", 2 * priors.FOCUS_BLUR)


def rewritten(file):
    def rewrite(small, lab, monkeypatch):
        (small / file).write_bytes((small / file).read_bytes())  # of the same size

    return rewrite


@pytest.mark.parametrize(
    "change",
    [change_sigma, change_constant_of_prior, *map(rewritten, ("maps/0/i00.png", "images/0/i00.png", "bank/0/b00.png"))],
    ids=["sigma", "constant", "map", "image", "image of the bank"],
)
def test_a_measurement_is_made_again_when_its_content_changed(small, make_lab, evaluated, monkeypatch, change):
    def measure():
        lab = make_lab(["one"])
        change(small, lab, monkeypatch) if changed else None
        lab.accuracy(lab.backbones[0], {"": Setting("focus", 4)}, knn=True)
        return evaluated.call_count

    changed = False
    assert measure() == measure()
    changed = True
    assert measure() > 1


def test_a_pass_that_was_killed_keeps_the_groups_before_it(make_lab, monkeypatch, evaluated):
    monkeypatch.setattr(module, "AT_ONCE", 2)
    wanted = {seed: Setting("uniform", 4, seed) for seed in range(5)}
    lab, keep = make_lab(), Lab._measured

    def killed(self, backbone, oracle, pairs):
        if pairs[0][0].seed == 2:
            raise KeyboardInterrupt
        return keep(self, backbone, oracle, pairs)

    with monkeypatch.context() as during:
        during.setattr(Lab, "_measured", killed)
        with pytest.raises(KeyboardInterrupt):
            lab.accuracy(lab.backbones[0], wanted)
    assert evaluated.call_count == 1
    lab.accuracy(lab.backbones[0], wanted)
    assert evaluated.call_count == 3  # seeds 2 and 3, then 4


def test_a_search_starts_where_the_prior_places(small, make_lab):
    lab = make_lab()
    found = lab.oracle(lab.backbones[0], tokens=4)
    read = lab.accuracy(lab.backbones[0], {"": Setting("isotropic", 4)})[""]
    assert len(found) == 30
    assert torch.equal(predicted(found, 0).right, read.on(predicted(found).keys).right)


def test_positions_are_read_by_another_model(small, make_lab):
    lab = make_lab()
    found = lab.oracle(lab.backbones[0], tokens=4)
    images, labels, keys = read_all(small, limit=30)
    with torch.no_grad():
        right = make_nano(1)(images, found.positions_for(keys)).argmax(1) == labels
    order = sorted(range(30), key=keys.__getitem__)
    assert torch.equal(lab.at(lab.backbones[1], found).right, right[order])


def test_a_search_of_another_version_or_a_damaged_one_is_named_and_made_again(make_lab, monkeypatch, capsys):
    lab = make_lab()
    first = lab.oracle(lab.backbones[0])
    (path,) = (lab.cache.folder / "oracle").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    assert torch.equal(lab.oracle(lab.backbones[0]).trajectory, first.trajectory)
    assert "damaged" in capsys.readouterr().err
    version = spot.__version__
    monkeypatch.setattr(spot, "__version__", "9.9.9")
    again = make_lab().oracle(lab.backbones[0])
    said = f"made with spot='{version}', now spot='9.9.9'; it is made again"
    assert said in capsys.readouterr().err.replace("\n", " ")
    assert again.metadata["spot"] == "9.9.9" and torch.equal(again.trajectory, first.trajectory)


def test_without_maps_of_the_bank_salient_tokens_have_no_neighbours(small, make_lab, tmp_path):
    (tmp_path / "maps").mkdir()
    for path in (small / "maps").rglob("i*.png"):
        there = tmp_path / "maps" / path.relative_to(small / "maps")
        there.parent.mkdir(exist_ok=True)
        there.write_bytes(path.read_bytes())
    lab = make_lab(saliency=str(tmp_path / "maps"))
    wanted = {prior: Setting(prior, 4) for prior in ("salient", "uniform")}
    found = lab.accuracy(lab.backbones[0], wanted, knn=True)
    assert found["salient"].knn is None and found["uniform"].knn is not None


def test_built_in_backbones_know_their_parents():
    first, _, masked = backbones(["scenes-a", "scenes-b", "scenes-mae"])
    assert first.parent is not None and first.parent_hash != first.hash
    assert masked.parent is None


def test_models_are_named_without_the_tag_of_their_weights():
    names = [each.name for each in backbones(["vit_tiny_patch16_224.augreg_in21k_ft_in1k+spot=a.pth", "scenes-a"])]
    assert names == ["vit_tiny_patch16_224+spot", "scenes-a"]
    assert backbones(["x=a.pth"])[0].weights.name == "a.pth"
    with pytest.raises(InputError, match="studied once"):
        backbones(["scenes-a", "scenes-a"])


def test_images_of_classes_that_the_model_does_not_know_are_refused(tmp_path):
    pets = str(folders(tmp_path / "pets", "cat", "dog"))
    lab = Lab(backbones(["scenes-a"]), StudySettings(pets), cache=tmp_path)
    with pytest.raises(InputError, match="there is no class 'cat'; none of the 32 known names is similar"):
        lab.accuracy(lab.backbones[0], {"": Setting("isotropic", 9)})


def test_predictions_of_some_images_keep_their_order():
    predictions = Predictions(["a", "b", "c"], torch.tensor([True, False, True]))
    assert predictions.on(["c", "b"]).right.tolist() == [True, False]
    with pytest.raises(InputError, match="'d' was not measured"):
        predictions.on(["d"])


@pytest.mark.parametrize("kept", ["folder", "delta"])
def test_a_retrofit_of_a_timm_vit_knows_it_by_its_weights(vit_tiny, shared_data, tmp_path, kept):
    weights = shared_data / "weights" / f"{VIT_TINY}.safetensors"
    trained = copy.deepcopy(vit_tiny)
    with torch.no_grad():
        trained.vit.head.bias.add_(1)
    path = tmp_path / "model.safetensors"
    if kept == "folder":
        path = tmp_path / "model"
        save_folder(trained, path)
    else:
        save_delta(trained, vit_tiny.vit.state_dict(), path, base=VIT_TINY)
    (found,) = backbones([f"{path}={weights}"])
    assert found.name == "model"
    assert found.parent_hash == hash_model(vit_tiny)
    torch.testing.assert_close(found.model.vit.head.bias, trained.vit.head.bias)


@pytest.mark.parametrize("limit, oracle_limit, searched", [(25, 7, 7), (None, 13, 13), (5, 9, 5)])
def test_what_is_searched_is_among_what_is_read(make_lab, limit, oracle_limit, searched):
    lab = make_lab(["one"], limit=limit, oracle_limit=oracle_limit)
    read, chosen = (lab.sources.images(lab.backbones[0].model, oracle=oracle).keys for oracle in (False, True))
    assert set(chosen) <= set(read) and len(chosen) == searched


def test_a_bank_may_be_of_some_images_that_a_file_names(make_lab, tmp_path):
    listed = tmp_path / "names.txt"
    listed.write_text("1/b01.png\n3/b13.png\n\n1/b21.png\n")
    lab = make_lab(bank_keep=listed)
    assert lab.sources.bank(lab.backbones[0].model).keys == ["1/b01.png", "1/b21.png", "3/b13.png"]
    assert lab.describe()["bank_keep"] == "names.txt"
    listed.write_text("1/b01.png\n1/none.png\n")
    with pytest.raises(InputError, match=r"there is no image 1/none.png to keep, nor 0 others"):
        make_lab(bank_keep=listed).sources.bank(lab.backbones[0].model)


def test_a_balanced_set_has_as_many_of_every_class_spread_over_its_images(tmp_path):
    for name, count in (("a", 9), ("b", 3), ("c", 4)):
        folders(tmp_path, name, images=count)
    data = open_data(tmp_path, transform=lambda image: torch.zeros(3, 8, 8))
    balance(data, 7)
    assert data.keys == ["a/0.png", "a/4.png", "b/0.png", "b/1.png", "c/0.png", "c/2.png"]
    assert [data[index][1] for index in range(6)] == [0, 0, 1, 1, 2, 2]
    with pytest.raises(InputError, match="2 images are too few for 3 classes"):
        balance(data, 2)


@pytest.mark.parametrize("bank, kind, side", [(None, "needle:96", 96), ("scenes", "scenes", 64)])
def test_the_bank_of_needles_is_of_needles_by_default_and_so_are_its_masks(bank, kind, side):
    settings = StudySettings(data="needle:96", bank=bank, bank_limit=4)
    assert settings.bank == kind
    model, sources = spot.load("scenes-a"), Sources(settings)
    images, _, keys = zip(*sources.bank(model).__getitems__(range(4)), strict=True)
    assert len(sources.bank(model)) == 4
    assert sources.saliency(model, kind)(torch.stack(images), keys).shape == (4, side, side)
