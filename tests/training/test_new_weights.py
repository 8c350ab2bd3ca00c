import pytest
import torch

import spot
from spot.data.images import data_for
from spot.errors import InputError
from spot.options import TrainOptions
from spot.training.new_weights import classifier_for_data, random_vit, with_classifier
from tests.conftest import make_nano
from tests.training.small_run import make_images, small_recipe

SHAPE = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_a_seed_gives_one_model():
    first, again, other = (random_vit("vit_tiny_patch16_224", SHAPE, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["vit.head.weight"], other["vit.head.weight"])


def test_positions_start_as_waves_that_tell_every_cell_apart():
    table = random_vit("vit_tiny_patch16_224", SHAPE).vit.pos_embed.detach()[0]
    assert not table[0].any()  # the class token stands nowhere
    distances = torch.cdist(table[1:], table[1:])
    assert (distances + torch.eye(16) * 9).min() > 0.3
    # Columns share their x waves (the second half) and rows their y waves.
    cells = table[1:].unflatten(0, (4, 4))
    torch.testing.assert_close(cells[:1, :, 16:].expand(4, -1, -1), cells[:, :, 16:])
    torch.testing.assert_close(cells[:, :1, :16].expand(-1, 4, -1), cells[:, :, :16])


@pytest.mark.parametrize(
    "option", [{"num_heads": 0}, {"num_heads": 5}, {"embed_dim": 0}, {"patch_size": 0}, {"depth": -1}]
)
def test_a_vit_that_cannot_be_built_is_one_sentence(option):
    (name,) = option
    with pytest.raises(InputError, match=f"timm cannot build.*{name}"):
        random_vit("vit_tiny_patch16_224", {**SHAPE, **option})


def test_a_new_head_stands_on_the_same_encoder_and_depends_on_the_seed_only():
    model = make_nano()
    new, again = (with_classifier(model, 5, "token", seed=1) for _ in range(2))
    assert new(IMAGES).shape == (2, 5)
    torch.testing.assert_close(new.forward_features(IMAGES), model.forward_features(IMAGES))
    assert torch.equal(new.vit.head.weight, again.vit.head.weight)
    assert with_classifier(new, 5, None) is new  # it classifies so already


def test_mean_pooling_normalises_the_mean_of_the_placed_tokens(tmp_path):
    model = make_nano()
    new = with_classifier(model, 5, "avg")
    positions = torch.rand(2, 7, 2, generator=torch.Generator().manual_seed(1))
    last = model.token_features(IMAGES, positions, indices=1)[0]
    mean = last.tokens.mean(1)
    by_hand = (mean - mean.mean(1, keepdim=True)) / (mean.var(1, keepdim=True, unbiased=False) + 1e-6).sqrt()
    pooled = new.forward_head(new.forward_features(IMAGES, positions), pre_logits=True)
    torch.testing.assert_close(pooled, by_hand)
    new.save_pretrained(tmp_path / "model")
    torch.testing.assert_close(spot.load(tmp_path / "model")(IMAGES), new.eval()(IMAGES))


def classes_of(folder, *names):
    for name in names:
        make_images(folder / name, classes=1, each=1)
        (folder / name / "0" / "0.png").rename(folder / name / "0.png")
        (folder / name / "0").rmdir()
    return TrainOptions(data=str(folder), out=folder)


def test_class_names_come_from_the_folders_and_are_saved_with_the_model(tmp_path):
    recipe = small_recipe("finetune-small")
    model = classifier_for_data(make_nano(), recipe, classes_of(tmp_path / "a", "bee", "ant"))
    assert model.class_names == ["ant", "bee"]
    model.save_pretrained(tmp_path / "model")
    model = spot.load(tmp_path / "model")
    assert model.class_names == ["ant", "bee"]
    torch.nn.init.ones_(model.vit.head.weight)  # as if trained
    # Its own classes again: the head stays. As many others: a new one.
    assert classifier_for_data(model, recipe, classes_of(tmp_path / "b", "ant", "bee")) is model
    other = classifier_for_data(model, recipe, classes_of(tmp_path / "c", "cat", "dog"))
    assert other.class_names == ["cat", "dog"]
    assert not torch.equal(other.vit.head.weight, model.vit.head.weight)
    # Some of its classes are data to evaluate on, by its own numbers.
    (tmp_path / "b" / "ant").rename(tmp_path / "ant")
    assert [label for _, label, _ in data_for(model, tmp_path / "b")] == [1]


def test_without_classes_there_is_nothing_to_fine_tune_for(tmp_path):
    flat = make_images(tmp_path / "flat", classes=1, each=1) / "0"
    with pytest.raises(InputError, match="one folder per class is needed"):
        classifier_for_data(make_nano(), small_recipe("finetune-small"), TrainOptions(data=str(flat), out=tmp_path))


def test_an_eva_is_refused():
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 10}
    model = spot.adapt("eva02_tiny_patch14_224", **shape)
    with pytest.raises(InputError, match="VisionTransformer"):
        with_classifier(model, 5, None)
