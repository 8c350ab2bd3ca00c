"""The DINO vote, worked out by hand and by a slow loop, over banks of any size."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch

import spot
from spot.data.images import open_data
from spot.data.loader import loader
from spot.errors import InputError
from spot.evaluation.accuracy import Setting, evaluate
from spot.evaluation.compare import open_bank
from spot.evaluation.features import embed
from spot.evaluation.knn import Bank, classify, compute_banks, knn_rows, read_bank
from spot.models.baselines import PatchDropout
from spot.placement.files import Placements
from spot.placement.priors import PRIORS
from tests.conftest import make_nano, write_noise


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


def slow(features, bank, labels, k) -> list[list[int]]:
    """DINO's vote with Python's sorting and float64."""
    answers = []
    for query in features.double():
        similarity = [float(query @ entry) / float(query.norm() * entry.norm()) for entry in bank.double()]
        votes: dict[int, float] = {}
        for index in sorted(range(len(bank)), key=similarity.__getitem__)[-k:]:
            label = int(labels[index])
            votes[label] = votes.get(label, 0) + math.exp(similarity[index] / 0.07)
        answers.append(sorted(votes, key=votes.__getitem__, reverse=True))
    return answers


@pytest.mark.parametrize("chunk", [3, 20, 50, 1000])
@pytest.mark.parametrize("k", [1, 7, 20])
def test_chunks_change_nothing(k, chunk):
    numbers = torch.Generator().manual_seed(k)
    bank = torch.randn(101, 8, generator=numbers)
    labels = torch.randint(12, (101,), generator=numbers)
    features = torch.randn(9, 8, generator=numbers)
    found = classify(features, Bank(bank, labels), k=k, chunk=chunk).tolist()
    for row, expected in zip(found, slow(features, bank, labels, k), strict=True):
        voted = min(5, len(expected))
        assert row[:voted] == expected[:voted]


def test_a_vote_that_makes_no_sense_is_refused():
    bank = Bank(at(0, 10), torch.arange(2))
    with pytest.raises(InputError, match=r"width 2, got \(1, 3\)"):
        classify(torch.ones(1, 3), bank, k=1)
    for k in (0, 3):
        with pytest.raises(InputError, match=f"k is from 1 to 2, got {k}"):
            classify(at(0), bank, k=k)


# From images ----------------------------------------------------------------------------------------


@pytest.fixture
def images(nano, tmp_path):
    """Opens a data set of six images, with options."""
    return partial(open_data, write_noise(tmp_path / "images", 6), transform=nano.transform())


def test_a_bank_holds_the_models_features_and_so_does_a_file_of_spot_embed(nano, images, tmp_path):
    (bank,) = compute_banks(nano, loader(images()), [Setting("isotropic", 4)])
    image, label, key = images()[2]
    with torch.no_grad():
        features = nano.forward_features(image[None], PRIORS["isotropic"](image[None], 4, None))
        expected = nano.forward_head(features, pre_logits=True)[0]
    row = sorted(images().keys).index(key)
    torch.testing.assert_close(bank.features[row], expected)
    assert bank.labels[row] == label
    embed(nano.at(tokens=4), images(), tmp_path / "f.safetensors")
    file = read_bank(tmp_path / "f.safetensors", [nano], images().classes)
    torch.testing.assert_close(file.features.sort(0).values, bank.features.sort(0).values)
    assert torch.equal(file.labels.sort().values, bank.labels.sort().values)


def test_data_that_makes_no_bank_is_refused(nano, images, tmp_path):
    unlabelled = open_data(tmp_path / "images" / "0", transform=nano.transform())
    with pytest.raises(InputError, match="needs labels"):
        next(compute_banks(nano, loader(unlabelled), [Setting("center", 4)]))
    with pytest.raises(InputError, match="give a file of spot embed"):
        next(compute_banks(nano, loader(images()), [Setting(Placements(["a"], torch.rand(1, 4, 2)))]))


def test_a_file_of_other_features_is_refused(nano, images, tmp_path):
    path, classes = tmp_path / "f.safetensors", images().classes

    def refused(model=nano, classes=classes):
        with pytest.raises(InputError) as problem:
            read_bank(path, [nano, model], classes)
        return str(problem.value)

    Placements(["a"], torch.rand(1, 4, 2)).save(path)
    assert "has no features" in refused()
    path.unlink()
    embed(nano, images(), path)
    assert "was made with model_hash=" in refused(make_nano(seed=1))
    assert "of other classes" in refused(classes=[*classes[1:], "more"])
    path.unlink()
    embed(nano, open_data(tmp_path / "images" / "0", transform=nano.transform()), path)
    assert "images without labels" in refused()


def test_images_are_their_own_nearest_neighbours_and_seeds_give_a_mean_and_a_deviation(nano, images):
    settings = [Setting("uniform", 4, seed) for seed in (0, 1)] + [Setting(name="dropout", model=PatchDropout(nano, 4))]
    found = evaluate(nano, loader(images(), 4), settings, features=True)
    first, second, dropout = compute_banks(nano, loader(images(), 5), settings)
    one, other = knn_rows(found, [first, second, dropout], k=1)
    assert one == {"knn": 100.0, "knn_std": 0.0, "knn_top5": 100.0}
    assert other == {"knn": 100.0, "knn_std": None, "knn_top5": 100.0}
    assert knn_rows(found, [second, first, dropout], k=1)[0]["knn"] < 100  # other placements are other features
    half = knn_rows(found, [first, second._replace(labels=second.labels.roll(1)), dropout], k=1)[0]
    assert half["knn"] == pytest.approx(50)
    assert half["knn_std"] == pytest.approx(math.sqrt(5000))  # of 100 and 0, with one degree of freedom less


def test_a_bank_of_scenes_has_50000_of_the_million():
    keys = open_bank(spot.load("scenes-a"), Path("scenes"), None, False).keys
    assert len(keys) == 50_000 and keys[-1] == "train/00049999"


def test_banks_that_do_not_fit_into_memory_together_are_computed_one_after_the_other(nano, images):
    settings = [Setting("uniform", 4, seed) for seed in (0, 1, 2)]
    together = list(compute_banks(nano, loader(images(), 4), settings))
    size = 4 * len(images()) * nano.embed_dim
    for memory in (1, size, 2 * size):
        some = compute_banks(nano, loader(images(), 4), settings, memory=memory)
        for bank, expected in zip(some, together, strict=True):
            assert torch.equal(bank.features, expected.features) and torch.equal(bank.labels, expected.labels)
