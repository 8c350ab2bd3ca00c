"""A policy learns without labels where tokens should go."""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torchvision.transforms.functional import to_pil_image

import spot
from spot.data.images import data_for, open_data
from spot.data.loader import loader
from spot.data.scenes import Scenes
from spot.errors import InputError
from spot.options import LearnOptions
from spot.store import read_tensors
from spot.training import learn as module
from spot.training import optim
from spot.training.learn import Crops, center_targets, class_attention, convert_normalisation, learn
from spot.training.new_weights import random_vit

HOW = LearnOptions(epochs=3, batch=16, side=32, center=0)


@pytest.fixture(scope="module")
def model():
    return spot.load("scenes-a")


@pytest.fixture(scope="module")
def images(model):
    return next(iter(loader(data_for(model, "scenes", limit=8), 8))).images


@pytest.mark.parametrize("kind", ["learned positions", "rotary"])
def test_class_attention_is_what_timm_attends_to(kind, model, images):
    kept = []
    if kind == "rotary":
        options = {"img_size": 64, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2, "init_values": 1.0}
        model = random_vit("vit_small_patch16_rope_224", options)
    blocks = model.vit.blocks
    for block in blocks[-3:]:
        block.attn.fused_attn = False  # the plain way shows its weights to dropout
        block.attn.attn_drop.register_forward_hook(lambda _, given, __: kept.append(given[0]))
    with torch.no_grad():
        model.vit(images)
    expected = torch.stack([each[:, :, 0, model.num_prefix_tokens :].mean(1) for each in kept]).mean(0)
    for block in blocks[-3:]:
        block.attn.attn_drop._forward_hooks.clear()
        block.attn.fused_attn = True
    expected = expected / expected.sum(1, keepdim=True)
    torch.testing.assert_close(class_attention(model, images).flatten(1), expected, rtol=1e-4, atol=1e-6)


def test_a_teacher_sees_images_as_it_wants_them(model, images):
    teacher = copy.deepcopy(model)
    teacher.vit.pretrained_cfg = {**model.vit.pretrained_cfg, "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4)}
    mean, std = (torch.tensor(model.data_config[name]).view(3, 1, 1) for name in ("mean", "std"))
    other_mean, other_std = (torch.tensor(each).view(3, 1, 1) for each in ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)))
    wanted = (images * std + mean - other_mean) / other_std
    torch.testing.assert_close(convert_normalisation(images, model, teacher), wanted)
    assert convert_normalisation(images, model, model) is images


def test_what_all_targets_have_in_common_gives_way_to_the_middle():
    same = torch.rand(1, 5, 5) + 0.1
    bright = torch.ones(2, 5, 5)
    bright[0, 1, 3] = 3.0  # the mean there is 2, so the images have 1.5 and 0.5 of it
    maps = center_targets(torch.cat([same * bright, same]), 0.4, 2)[:2]
    middle = torch.tensor(
        [math.exp(-(((r - 2) / 5) ** 2 + ((c - 2) / 5) ** 2) / 0.32) for r in range(5) for c in range(5)]
    )
    expected = torch.stack([middle, middle]).view(2, 5, 5)
    expected[:, 1, 3] *= torch.tensor([1.5, 0.5])
    torch.testing.assert_close(maps, expected / expected.sum((1, 2), keepdim=True))


def test_crops_follow_the_photographs_and_never_change(model, tmp_path):
    scenes = Scenes("test", 3)
    for number in range(3):
        to_pil_image(scenes[number][0]).save(tmp_path / f"{number}.png")
    images = open_data(tmp_path, transform=model.transform())
    views, again = (Crops(images, 2, HOW.seed, model.data_config) for _ in range(2))
    assert len(views) == 9 and list(views.keys) == 3 * list(images.keys)
    for number in range(3):
        torch.testing.assert_close(views[number][0], images[number][0], rtol=0, atol=0)
        crops = [views[number + 3 * view][0] for view in (0, 1, 2)]
        assert all(not torch.equal(a, b) for a, b in itertools.combinations(crops, 2))
        torch.testing.assert_close(again[number + 6][0], crops[2], rtol=0, atol=0)
    policy = learn(model, tmp_path, tmp_path / "p.safetensors", replace(HOW, epochs=1, views=2))
    assert policy.about["made"]["images"] == 3
    targets = read_tensors(tmp_path / "p.learning" / "00000.safetensors")[0]["targets"]
    expected = class_attention(model, views[7][0][None]).sqrt()
    torch.testing.assert_close(targets[7].float(), (expected / expected.sum())[0], rtol=0.01, atol=1e-4)


def test_what_was_learned_is_nearer_to_the_target_than_the_mean_map(model, tmp_path):
    """On scenes the object is anywhere, so that only a policy that looks can find it."""
    how = replace(HOW, side=32, epochs=6, lr=1e-2)
    policy = learn(model, "scenes", tmp_path / "p.safetensors", how, limit=192)
    batch = next(iter(loader(data_for(model, "scenes", limit=64), 64)))
    target = class_attention(model, batch.images)
    maps = policy.maps(batch.images)
    target = F.interpolate(target[:, None], maps.shape[1:], mode="bilinear")[:, 0]
    target = (target / target.sum((1, 2), keepdim=True)).flatten(1)

    def loss(maps):
        return F.kl_div(maps.flatten(1).log(), target, reduction="batchmean")

    assert loss(maps) < loss(target.mean(0).expand_as(target))
    assert policy.about["made"]["images"] == 192


def test_a_killed_run_goes_on_and_ends_alike(model, tmp_path, monkeypatch):
    whole = learn(model, "scenes", tmp_path / "whole.safetensors", HOW, limit=80)
    calls = []
    real = optim.write_state

    def dies(path, state):
        real(path, state)
        calls.append(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(optim, "write_state", dies)
    with pytest.raises(KeyboardInterrupt):
        learn(model, "scenes", tmp_path / "half.safetensors", HOW, limit=80)
    monkeypatch.setattr(optim, "write_state", real)
    monkeypatch.setattr(module, "attention", None)  # all targets are there
    half = learn(model, "scenes", tmp_path / "half.safetensors", HOW, limit=80)
    assert len(calls) == 1
    for name, weight in whole.look.state_dict().items():
        torch.testing.assert_close(half.look.state_dict()[name], weight, rtol=0, atol=0)
    assert (tmp_path / "half.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_other_settings_do_not_go_on_with_a_run(model, tmp_path):
    learn(model, "scenes", tmp_path / "p.safetensors", replace(HOW, epochs=1), limit=16)
    with pytest.raises(InputError, match="was made with lr="):
        learn(model, "scenes", tmp_path / "p.safetensors", replace(HOW, epochs=1, lr=0.1), limit=16)
    with pytest.raises(InputError, match="no target 'gaze'"):
        learn(model, "scenes", tmp_path / "q.safetensors", replace(HOW, target="gaze"), limit=16)
    with pytest.raises(InputError, match=r"written to a \.safetensors file"):
        learn(model, "scenes", tmp_path / "q.pt", HOW, limit=16)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.jpg").touch()
    with pytest.raises(InputError, match="that names images, one a line"):
        learn(model, tmp_path / "images", tmp_path / "q.safetensors", HOW, leave_out=tmp_path / "none.txt")
