"""The DINO vote, worked out by hand and by a slow loop, over banks of any size."""

import math
import os
from functools import partial

import pytest
import torch

from spot.cli import main
from spot.data.images import open_data
from spot.data.loader import loader
from spot.data.picture import evaluation_transform
from spot.errors import InputError
from spot.evaluation.accuracy import Setting, evaluate
from spot.evaluation.knn import Bank, build_banks, classify, knn_rows
from spot.hashes import hash_model
from spot.models.wrappers import PatchDropout
from spot.placement.files import Placements
from spot.placement.priors import PRIORS
from tests.conftest import write_noise


def at(*degrees: float) -> torch.Tensor:
    """Unit vectors in the plane."""
    return torch.tensor([[math.cos(math.radians(d)), math.sin(math.radians(d))] for d in degrees])


def test_two_neighbours_outvote_a_nearer_one_unless_it_is_much_nearer():
    # Similarities: class 0 at cos 0 = 1, twice class 1 at cos θ = c. 2·exp(c/T) > exp(1/T) if c > 1 − T·ln 2.
    turning = math.degrees(math.acos(1 - 0.07 * math.log(2)))
    for away, winner in ((turning - 0.5, 1), (turning + 0.5, 0)):
        bank = Bank(at(0, away, -away), torch.tensor([0, 1, 1]))
        assert classify(at(0), bank, k=3)[0, 0] == winner


def test_five_answers_are_ordered_by_votes_and_fewer_classes_give_fewer():
    bank = Bank(at(0, 20, 40, 60, 80, 100), torch.tensor([5, 4, 3, 2, 1, 0]))
    assert classify(at(0), bank, k=6)[0].tolist() == [5, 4, 3, 2, 1]
    assert classify(at(0), Bank(at(0, 20), torch.tensor([1, 0])), k=2)[0].tolist() == [1, 0]


def test_the_coldest_vote_is_the_nearest_neighbours():
    bank = Bank(at(0, 1, 1), torch.tensor([0, 1, 1]))
    assert classify(at(0), bank, k=3, temperature=1e-6)[0, 0] == 0  # exp(1e6) alone would overflow


def slow(features, bank, labels, k, temperature) -> list[list[int]]:
    """DINO's vote with Python's sorting and float64."""
    answers = []
    for query in features.double():
        similarity = [float(query @ entry) / float(query.norm() * entry.norm()) for entry in bank.double()]
        votes: dict[int, float] = {}
        for index in sorted(range(len(bank)), key=similarity.__getitem__)[-k:]:
            label = int(labels[index])
            votes[label] = votes.get(label, 0) + math.exp(similarity[index] / temperature)
        answers.append(sorted(votes, key=votes.__getitem__, reverse=True))
    return answers


@pytest.mark.parametrize("chunk", [3, 20, 50, 1000])
@pytest.mark.parametrize("k", [1, 7, 20])
def test_chunks_change_nothing(k, chunk):
    numbers = torch.Generator().manual_seed(k)
    bank = torch.randn(101, 8, generator=numbers)
    labels = torch.randint(12, (101,), generator=numbers)
    features = torch.randn(9, 8, generator=numbers)
    unit = bank / bank.norm(dim=1, keepdim=True)
    found = classify(features, Bank(unit, labels), k=k, chunk=chunk).tolist()
    for row, expected in zip(found, slow(features, bank, labels, k, 0.07), strict=True):
        voted = min(5, len(expected))
        assert row[:voted] == expected[:voted]


# Files ------------------------------------------------------------------------------------------


def test_a_bank_comes_back_from_its_file(tmp_path):
    bank = Bank(at(0, 10, 20, 30, 40), torch.arange(5), {"weights": "abc"})
    bank.save(tmp_path / "bank.safetensors")
    again = Bank.load(tmp_path / "bank.safetensors")
    assert torch.equal(again.features, bank.features) and again.about == {"weights": "abc"}
    assert classify(at(22), again, k=1, chunk=2)[0, 0] == 2


def test_a_vote_that_makes_no_sense_is_refused():
    bank = Bank(at(0, 10), torch.arange(2), {"weights": "abc", "classes": ["a", "b"]})
    bank.refuse_other("bank.safetensors", 2, weights="abc", classes=["a", "b"])
    with pytest.raises(InputError, match=r"made with classes=\['a', 'b'\], now"):
        bank.refuse_other("bank.safetensors", 2, weights="abc", classes=["b", "c"])
    with pytest.raises(InputError, match=r"width 2, got \(1, 3\)"):
        classify(torch.ones(1, 3), bank, k=1)
    for k in (0, 3):
        with pytest.raises(InputError, match=f"k is from 1 to 2, got {k}"):
            classify(at(0), bank, k=k)
    with pytest.raises(InputError, match="above 0"):
        classify(at(0), bank, k=1, temperature=0)


# From images ----------------------------------------------------------------------------------------


@pytest.fixture
def seen() -> list[object]:
    """The images that were decoded."""
    return []


@pytest.fixture
def images(nano, tmp_path, seen):
    """Opens a data set of six images, with options."""
    transform = evaluation_transform(nano.data_config)

    def counted(image):
        seen.append(image)
        return transform(image)

    return partial(open_data, write_noise(tmp_path / "images", 6), transform=counted)


def test_a_bank_holds_the_models_features_at_length_one(nano, images, tmp_path):
    (bank,) = build_banks(nano, images(), [Setting("isotropic", 4)], tmp_path / "cache")
    image, label, key = images()[2]
    with torch.no_grad():
        features = nano.forward_features(image[None], PRIORS["isotropic"](image[None], 4, None))
        expected = nano.forward_head(features, pre_logits=True)[0]
    row = sorted(images().keys).index(key)
    torch.testing.assert_close(bank.features[row], expected / expected.norm())
    assert bank.labels[row] == label
    assert (bank.about["placement"], bank.about["tokens"], bank.about["seed"]) == ("isotropic", 4, 0)
    assert bank.about["weights"] == hash_model(nano)


def test_a_bank_is_made_once_for_the_same_model_placement_and_files(nano, images, seen, tmp_path):
    def build(*settings, **options):
        seen.clear()
        build_banks(nano, images(**options), settings, tmp_path / "cache")
        return len(seen)

    assert build(Setting("uniform", 4), Setting("uniform", 9)) == 6  # one pass for both
    assert build(Setting("uniform", 4), Setting("uniform", 9)) == 0
    assert build(Setting("uniform", 4, seed=1)) == 6
    assert build(Setting("uniform", 4), limit=3) == 3
    os.utime(tmp_path / "images" / "0" / "00.png", (1, 1))
    assert build(Setting("uniform", 4)) == 6
    with torch.no_grad():
        nano.vit.norm.bias.add_(0.1)
    assert build(Setting("uniform", 4)) == 6
    assert build(Setting("uniform")) == 6
    nano.tokens = 7  # the model's own budget
    assert build(Setting("uniform")) == 6


def test_banks_too_large_for_memory_are_made_one_after_the_other(nano, images, seen, tmp_path):
    settings = [Setting("uniform", tokens) for tokens in (1, 4, 9)]
    build_banks(nano, images(), settings, tmp_path / "cache", memory=6 * 32 * 4 * 2)  # room for two
    assert len(seen) == 12


def test_data_that_makes_no_bank_is_refused(nano, images, tmp_path):
    unlabelled = open_data(tmp_path / "images" / "0", transform=evaluation_transform(nano.data_config))
    with pytest.raises(InputError, match="needs labels"):
        build_banks(nano, unlabelled, [Setting("center", 4)], tmp_path / "cache")
    with pytest.raises(InputError, match="give a bank file"):
        build_banks(nano, images(), [Setting(Placements(["a"], torch.rand(1, 4, 2)))], tmp_path / "cache")


def test_images_are_their_own_nearest_neighbours(nano, images, tmp_path):
    settings = [Setting("uniform", 4, seed) for seed in (0, 1)] + [Setting(name="dropout", model=PatchDropout(nano, 4))]
    found = evaluate(nano, loader(images(), 4), settings, features=True)
    banks = build_banks(nano, images(), settings, tmp_path / "cache")
    first, second = knn_rows(found, banks, k=1)
    assert first == {"knn": 100.0, "knn_std": 0.0, "knn_top5": 100.0}
    assert second == {"knn": 100.0, "knn_std": None, "knn_top5": 100.0}
    crossed = knn_rows(found, [banks[1], banks[0], banks[2]], k=1)[0]["knn"]
    assert crossed < 100  # another seed's placements are other features


def test_seeds_give_a_mean_and_a_deviation(nano, images):
    found = evaluate(nano, loader(images(), 8), [Setting("uniform", 4, seed) for seed in (0, 1)], features=True)
    right = Bank(torch.nn.functional.normalize(found.features[0], dim=1), found.labels)
    wrong = Bank(torch.nn.functional.normalize(found.features[1], dim=1), found.labels.roll(1))
    (row,) = knn_rows(found, [right, wrong], k=1)
    assert row["knn"] == pytest.approx(50)
    assert row["knn_std"] == pytest.approx(math.sqrt(5000))  # of 100 and 0, with one degree of freedom less


def test_a_bank_of_scenes_has_50000_of_the_million(monkeypatch):
    class Enough(Exception):
        pass

    def made(model, labelled, *_, **__):
        assert len(labelled) == 50_000 and labelled.keys[-1] == "train/00049999"
        raise Enough

    monkeypatch.setattr("spot.evaluation.compare.build_banks", made)
    with pytest.raises(Enough):
        main(["evaluate", "scenes-a", "--data", "scenes", "--knn", "scenes", "--limit", "8", "--workers", "0"])
