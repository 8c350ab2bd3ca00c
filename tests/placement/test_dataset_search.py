import pytest
import torch
from PIL import Image

from spot.data.images import open_data
from spot.errors import InputError
from spot.placement import dataset_search
from spot.placement.dataset_search import search_dataset
from spot.placement.files import Placements
from spot.placement.oracle import entropy, search, wrong_labels
from spot.placement.policy import Policy
from spot.placement.priors import uniform
from tests.conftest import make_nano


class Pictures:
    """Random images by number."""

    def __init__(self, count, labelled=True):
        self.keys = [f"class{index % 3}/{index:03d}.jpg" for index in range(count)]
        self.labelled, self.read = labelled, []

    def __getitem__(self, index):
        self.read.append(self.keys[index])
        image = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(index))
        return image, index % 10 if self.labelled else -1, self.keys[index]


def nano(tokens=5, prior="uniform"):
    model = make_nano()
    model.tokens, model.prior = tokens, prior
    return model


def test_every_image_is_searched_as_if_alone(tmp_path):
    data, model = Pictures(7), nano()
    done = search_dataset(model, data, tmp_path / "p.safetensors", batch_size=3, seed=4, steps=2)
    assert done.images == 7
    assert list(done.placements.keys) == data.keys
    for index, key in enumerate(data.keys):
        image, label, _ = data[index]
        start = model.place(image[None], keys=[key], seed=4)
        alone = search(model, image[None], torch.tensor([label]), start, steps=2)
        kept = done.placements.select([key])
        torch.testing.assert_close(kept.trajectory, alone.trajectory, atol=1e-5, rtol=0)
        torch.testing.assert_close(kept.values["losses"], alone.losses, atol=1e-4, rtol=1e-4)
        chances = alone.logits.softmax(-1)[:, :, label]
        torch.testing.assert_close(kept.values["probabilities"], chances, atol=1e-5, rtol=1e-4)
        assert kept.values["predictions"].tolist() == alone.logits.argmax(-1).tolist()
        assert kept.values["labels"].tolist() == [label]


def test_what_is_done_is_not_done_again(tmp_path):
    path = tmp_path / "p.safetensors"
    search_dataset(nano(), Pictures(4), path, batch_size=3, steps=2)
    more = Pictures(6)
    done = search_dataset(nano(), more, path, batch_size=3, steps=2)
    assert more.read == more.keys[4:]
    assert done.images == 2
    assert list(Placements.load(path).keys) == more.keys
    fewer = search_dataset(nano(), Pictures(2), path, steps=2)  # of a larger file, the data's own images
    assert fewer.images == 0
    assert list(fewer.placements.keys) == more.keys[:2]
    assert len(Placements.load(path)) == 6


def test_a_changed_setting_seed_or_model_is_refused_and_nothing_is_lost(tmp_path):
    path = tmp_path / "p.safetensors"
    search_dataset(nano(), Pictures(2), path, steps=2)
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"settings.steps=2, now settings.steps=3; write to another file"):
        search_dataset(nano(), Pictures(2), path, steps=3)
    with pytest.raises(InputError, match="seed=0, now seed=1"):
        search_dataset(nano(), Pictures(2), path, steps=2, seed=1)
    other = nano()
    with torch.no_grad():
        other.vit.head.bias += 1
    with pytest.raises(InputError, match="model_hash"):
        search_dataset(other, Pictures(2), path, steps=2)
    assert path.read_bytes() == before


def test_positions_alone_can_be_kept(tmp_path):
    whole = search_dataset(nano(), Pictures(3), tmp_path / "t.safetensors", steps=2)
    final = search_dataset(nano(), Pictures(3), tmp_path / "p.safetensors", steps=2, keep="positions")
    assert final.placements.trajectory.shape == (3, 1, 5, 2)
    assert torch.equal(final.placements.positions, whole.placements.positions)


def test_wrong_labels_belong_to_the_image(tmp_path):
    one = search_dataset(nano(), Pictures(6), tmp_path / "a.safetensors", objective="obfuscate", batch_size=6, steps=1)
    two = search_dataset(nano(), Pictures(6), tmp_path / "b.safetensors", objective="obfuscate", batch_size=4, steps=1)
    targets, labels = one.placements.values["targets"], one.placements.values["labels"]
    assert (targets != labels).all()
    assert torch.equal(targets, two.placements.values["targets"])
    assert torch.equal(targets, wrong_labels(labels, 10, keys=one.placements.keys, seed=0))


def test_without_labels_there_is_agreement(tmp_path):
    with pytest.raises(InputError, match=r"class0/000.jpg has none; use 'agree' or 'entropy'"):
        search_dataset(nano(), Pictures(2, labelled=False), tmp_path / "p.safetensors", steps=1)
    data = Pictures(2, labelled=False)
    done = search_dataset(nano(), data, tmp_path / "p.safetensors", objective="agree", steps=3)
    losses = done.placements.values["losses"]
    assert (losses[:, -1] < losses[:, 0]).all()
    assert done.placements.values["probabilities"].isnan().all()


def test_labels_of_other_classes_do_no_harm_where_none_are_needed(tmp_path):
    class Foreign(Pictures):
        def __getitem__(self, index):
            image, _, key = super().__getitem__(index)
            return image, 10 + index, key  # the model has ten classes, 0 to 9

    done = search_dataset(nano(), Foreign(2), tmp_path / "p.safetensors", objective="entropy", steps=1)
    assert done.placements.values["probabilities"].isnan().all()
    with pytest.raises(InputError, match="between 0 and 9"):
        search_dataset(nano(), Foreign(2), tmp_path / "q.safetensors", steps=1)


def test_the_file_says_what_made_it_and_a_function_keeps_its_name_from_run_to_run(tmp_path):
    model, path, options = nano(prior=uniform), tmp_path / "p.safetensors", {"seed": 4, "steps": 1, "lr": 0.01}
    search_dataset(model, Pictures(1), path, objective=entropy, **options)
    about = search_dataset(model, Pictures(2), path, objective=entropy, **options).placements.metadata
    expected = {"prior": "uniform", "objective": "entropy", "tokens": 5, "seed": 4}
    assert {name: about[name] for name in expected} == expected
    assert about["settings"]["lr"] == 0.01 and len(about["model_hash"]) == 16


def test_salient_starts_are_drawn_from_the_maps_of_each_image(tmp_path):
    def corner(images, keys):  # only the upper left quarter is salient
        maps = torch.zeros(len(images), 32, 32)
        maps[:, :16, :16] = 1
        return maps

    model = nano(prior="salient")
    done = search_dataset(model, Pictures(3), tmp_path / "p.safetensors", saliency=corner, steps=1, lr=1e-6)
    assert (done.placements.positions < 0.5 + 1e-4).all()
    assert done.placements.metadata["prior"] == "salient"
    own = search_dataset(model, Pictures(3), tmp_path / "q.safetensors", steps=1).placements
    assert own.metadata["saliency"] == "spectral"  # the model's own


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_is_no_image_stops_the_search_or_is_skipped(tmp_path, workers):
    (tmp_path / "data").mkdir()
    for name in ("0.png", "2.png"):
        Image.new("RGB", (40, 40), "red").save(tmp_path / "data" / name)
    (tmp_path / "data" / "1.png").write_text("not an image")
    path, options = tmp_path / "p.safetensors", {"steps": 1, "objective": "agree", "workers": workers}
    stopping, skipping = (
        open_data(tmp_path / "data", transform=nano().transform(), skip=skip) for skip in (False, True)
    )
    with pytest.raises(InputError, match=r"1\.png is not an image"):
        search_dataset(nano(), stopping, path, **options)
    assert list(search_dataset(nano(), skipping, path, **options).placements.keys) == ["0.png", "2.png"]
    skipping.select(["1.png"])
    with pytest.raises(InputError, match="no image could be read"):
        search_dataset(nano(), skipping, tmp_path / "none.safetensors", **options)


def test_two_processes_write_the_file_that_one_writes(tmp_path, monkeypatch):
    class Process:
        """What accelerate.PartialState tells a process; the test runs them one after the other."""

        num_processes = 2

        def __init__(self, index):
            self.process_index = index

        def wait_for_everyone(self):
            if self.process_index == 1:
                raise EOFError  # the other one goes on from here

    search_dataset(nano(), Pictures(7), tmp_path / "one.safetensors", batch_size=2, steps=1)
    path = tmp_path / "two.safetensors"
    monkeypatch.setattr(dataset_search, "this_process", lambda: Process(1))
    with pytest.raises(EOFError):
        search_dataset(nano(), Pictures(7), path, batch_size=2, steps=1)
    monkeypatch.setattr(dataset_search, "this_process", lambda: Process(0))
    search_dataset(nano(), Pictures(7), path, batch_size=2, steps=1)
    assert path.read_bytes() == (tmp_path / "one.safetensors").read_bytes()


@pytest.mark.parametrize("options, message", [({"batch_size": 0}, "at least 1"), ({"keep": "all"}, "'all'")])
def test_bad_options_are_refused(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        search_dataset(nano(), Pictures(1), tmp_path / "p.safetensors", **options)


def test_two_searches_do_not_write_one_file_at_a_time(tmp_path):
    path = tmp_path / "found.safetensors"

    class Meanwhile(Pictures):
        def __getitem__(self, index):
            with pytest.raises(InputError, match="is being written"):
                search_dataset(nano(), Pictures(4), path, steps=2, seed=1)
            return super().__getitem__(index)

    assert search_dataset(nano(), Meanwhile(4), path, steps=1).images == 4


def test_wrong_labels_depend_on_the_seed(tmp_path):
    targets = [
        search_dataset(
            nano(prior="isotropic"), Pictures(12), tmp_path / f"{seed}.safetensors", objective="obfuscate", steps=1,
            seed=seed,
        ).placements.values["targets"]
        for seed in (0, 1)
    ]  # fmt: skip
    assert not torch.equal(*targets)


def test_placements_from_another_policy_are_refused(tmp_path):
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(nano().at(prior=Policy(8)))
    search_dataset(models[0], Pictures(2), tmp_path / "found.safetensors", steps=1)
    with pytest.raises(InputError, match="policy"):
        search_dataset(models[1], Pictures(4), tmp_path / "found.safetensors", steps=1)
    with pytest.raises(InputError, match="has no learned prior"):
        search_dataset(nano(prior="learned"), Pictures(2), tmp_path / "other.safetensors", steps=1)
