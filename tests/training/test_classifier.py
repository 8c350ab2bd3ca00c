import pytest
import torch

import spot
from spot.errors import InputError
from spot.training.classifier import with_classifier
from tests.conftest import make_nano

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_a_new_head_stands_on_the_same_encoder():
    model = make_nano()
    new = with_classifier(model, 5, "token")
    assert new(IMAGES).shape == (2, 5)
    torch.testing.assert_close(new.forward_features(IMAGES), model.forward_features(IMAGES))


def test_mean_pooling_normalises_the_mean_of_the_placed_tokens():
    model = make_nano()
    new = with_classifier(model, 5, "avg")
    positions = torch.rand(2, 7, 2, generator=torch.Generator().manual_seed(1))
    last = model.forward_intermediates(IMAGES, positions, indices=1)[0]
    mean = last.tokens.mean(1)
    by_hand = (mean - mean.mean(1, keepdim=True)) / (mean.var(1, keepdim=True, unbiased=False) + 1e-6).sqrt()
    pooled = new.forward_head(new.forward_features(IMAGES, positions), pre_logits=True)
    torch.testing.assert_close(pooled, by_hand)


def test_the_same_seed_gives_the_same_head_and_saving_keeps_it(tmp_path):
    first, again, other = (with_classifier(make_nano(), 5, "avg", seed) for seed in (1, 1, 2))
    assert torch.equal(first.vit.head.weight, again.vit.head.weight)
    assert first.vit.head.weight.shape == other.vit.head.weight.shape
    first.save_pretrained(tmp_path / "model")
    torch.testing.assert_close(spot.load(tmp_path / "model")(IMAGES), first.eval()(IMAGES))


def test_a_model_that_classifies_so_already_is_kept():
    model = make_nano()
    assert with_classifier(model, 10, None) is model


def test_an_eva_is_refused():
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 10}
    model = spot.adapt("eva02_tiny_patch14_224", **shape)
    with pytest.raises(InputError, match="VisionTransformer"):
        with_classifier(model, 5, None)
