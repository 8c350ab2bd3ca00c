"""Features of a data set: the model's own, in order, refused under other settings. tests/faults kills and resumes."""

from contextlib import nullcontext

import pytest
import torch
from PIL import Image
from timm.layers import DropPath

from spot.cli import main
from spot.data.images import data_for
from spot.errors import InputError
from spot.evaluation.features import embed
from spot.placement.files import Placements
from spot.placement.policy import Policy
from tests.conftest import make_nano


@torch.no_grad()
def test_features_are_what_enters_the_classifier_in_the_data_s_order(tmp_path):
    """Also those of a model that averages tokens and is in training."""
    model = make_nano(img_size=64, global_pool="avg")
    model.vit.fc_norm.weight.add_(1)
    model.vit.blocks[0].drop_path1 = DropPath(0.9)
    model.eval()
    data = data_for(model, "scenes", limit=10)
    images, labels, keys = zip(*(data[index] for index in range(10)), strict=True)
    positions = model.place(torch.stack(images), tokens=5, prior="uniform", keys=keys, seed=3)
    pooled = model.forward_head(model.forward_features(torch.stack(images), positions), pre_logits=True)
    made = embed(model.train().at(tokens=5, prior="uniform"), data, tmp_path / "f.safetensors", seed=3, batch_size=3)
    assert model.training
    read = Placements.load(tmp_path / "f.safetensors")
    assert list(read.keys) == list(keys) == list(made.keys)
    assert read.values["labels"].tolist() == list(labels)
    torch.testing.assert_close(read.values["features"], pooled, atol=1e-5, rtol=1e-4)
    assert read.metadata["tokens"] == 5 and read.metadata["prior"] == "uniform"
    assert [path.name for path in tmp_path.iterdir()] == ["f.safetensors"]


def test_folders_of_classes_that_the_model_does_not_have_are_embedded_too(tmp_path):
    for name, colour in (("ant", "red"), ("bee", "blue")):
        (tmp_path / "pets" / name).mkdir(parents=True)
        Image.new("RGB", (40, 30), colour).save(tmp_path / "pets" / name / "one.png")
    out = tmp_path / "features.safetensors"
    main(["embed", str(tmp_path / "pets"), "--model", "scenes-a", "--tokens", "9", "--workers", "0", "--out", str(out)])
    made = Placements.load(out)
    assert list(made.keys) == ["ant/one.png", "bee/one.png"] and made.values["labels"].tolist() == [0, 1]


def test_bad_input_is_one_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["embed", "scenes", "--model", "scenes-a", "--out", str(tmp_path / "f.npy")])
    assert "a .safetensors file" in capsys.readouterr().err
    model = make_nano(img_size=64)
    data = data_for(model, "scenes", limit=2)
    with pytest.raises(InputError, match="at least 1 image"):
        embed(model, data, tmp_path / "f.safetensors", batch_size=0)
    embed(model.at(tokens=4), data, tmp_path / "f.safetensors")
    with pytest.raises(InputError, match="tokens=4, now tokens=5"):
        embed(model.at(tokens=5), data, tmp_path / "f.safetensors")


def test_features_of_another_seed_or_policy_do_not_go_into_one_file(tmp_path):
    data = data_for(make_nano(img_size=64), "scenes", limit=4)
    model = make_nano(img_size=64).at(tokens=5, prior="uniform")
    embed(model, data, tmp_path / "f.safetensors", seed=0)
    with pytest.raises(InputError, match="seed=0, now seed=1"):
        embed(model, data, tmp_path / "f.safetensors", seed=1)
    for seed in (0, 1):
        torch.manual_seed(seed)
        placed = model.at(prior=Policy(8))
        with pytest.raises(InputError, match="policy=") if seed else nullcontext():
            embed(placed, data, tmp_path / "learned.safetensors")
