import math

import pytest
import torch

from spot.training.objectives import Masked, Supervised
from spot.training.optim import build_optimizer, learning_rate, parameter_groups, set_rate
from spot.training.recipes import find_recipe, override
from tests.conftest import make_nano


def scales(model, recipe) -> dict[str, tuple[float, float]]:
    groups = parameter_groups(model, recipe)
    return {name: (group["scale"], group["weight_decay"]) for group in groups for name in group["names"]}


@pytest.mark.parametrize(
    "name, powers",
    [
        ("cls-in1k", (0, 0, 1, 2, 0, 0)),  # retrofitting: early layers learn faster
        ("mae-finetune", (4, 3, 2, 1, 0, 0)),  # fine-tuning: late ones
    ],
)
def test_layers_learn_at_powers_of_the_decay(name, powers):
    found = scales(make_nano(depth=3), find_recipe(name))
    layers = ("patch_embed.proj", "blocks.0.attn.qkv", "blocks.1.attn.qkv", "blocks.2.mlp.fc2", "norm", "head")
    assert [found[f"vit.{layer}.weight"][0] for layer in layers] == pytest.approx([0.65**power for power in powers])


def test_vectors_do_not_decay():
    model = make_nano()
    found = scales(model, find_recipe("cls-in1k"))
    for name, parameter in model.named_parameters():
        vector = parameter.ndim == 1 or name in ("vit.cls_token", "vit.pos_embed")
        assert found[name][1] == (0 if vector else 0.05), name


def test_the_decoder_learns_at_the_full_rate_and_each_parameter_is_in_one_group():
    recipe = override(find_recipe("mae-in1k"), {"decoder_width": 32, "decoder_depth": 1, "decoder_heads": 2})
    objective = Masked(make_nano(), recipe)
    found = scales(objective, recipe)
    assert found["autoencoder.decoder.blocks.0.attn.qkv.weight"] == (1, 0.05)
    assert found["autoencoder.decoder.mask_token"] == (1, 0)
    assert found["autoencoder.encoder.vit.blocks.1.attn.qkv.weight"] == (0.75, 0.05)
    trainable = [name for name, parameter in objective.named_parameters() if parameter.requires_grad]
    assert sorted(found) == sorted(trainable)


def test_set_rate_keeps_the_groups_shares():
    recipe = find_recipe("cls-in1k")
    optimizer = build_optimizer(Supervised(make_nano(), recipe), recipe)
    set_rate(optimizer, 0.5)
    assert {group["eps"] for group in optimizer.param_groups} == {1e-8}  # as in the paper's table
    assert {round(group["lr"], 6) for group in optimizer.param_groups} == {0.5, 0.325}


def test_the_rate_warms_up_then_follows_a_cosine():
    recipe = override(find_recipe("cls-in1k"), {"lr": 1.0})
    rates = [learning_rate(recipe, step, 14, 4) for step in range(14)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[9] == pytest.approx(0.5)  # half way down
    assert rates[13] == pytest.approx((1 + math.cos(math.pi * 0.9)) / 2)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_fine_tuning_warms_up_along_a_cosine_from_1e7():
    recipe = find_recipe("mae-finetune")
    rates = [learning_rate(recipe, step, 100, 10) for step in range(10)]
    assert rates[4] == pytest.approx((1e-7 + 1e-3) / 2)  # half way up
    assert rates[9] == pytest.approx(1e-3)
    assert rates[0] == pytest.approx(1e-7 + (1e-3 - 1e-7) * (1 - math.cos(math.pi / 10)) / 2)


def test_muon_is_for_the_matrices_of_blocks_and_adamw_for_the_rest():
    model = make_nano()
    optimizer = build_optimizer(model, find_recipe("scenes"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {names[id(each)]: group["use_muon"] for group in optimizer.param_groups for each in group["params"]}
    assert set(groups) == set(names.values())
    for name, used in groups.items():
        assert used == (name.startswith("vit.blocks") and name.endswith("weight") and "norm" not in name), name
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    head, matrix = model.vit.head.bias.detach().clone(), model.vit.blocks[0].mlp.fc1.weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(head - model.vit.head.bias, torch.full((10,), 3e-3))  # AdamW's first step is the rate
    # A gradient of ones has one singular value. Made 1, all of its 128 × 32 entries are 1 / √(128 · 32), and a step
    # has 0.2 · √128 of that. Newton–Schulz brings it to 0.7 to 1.2, and weights decay.
    moved = (1 - 3e-3 * 0.05) * matrix - model.vit.blocks[0].mlp.fc1.weight.detach()
    share = moved / (3e-3 * 0.2 * 128**0.5 / (128 * 32) ** 0.5)
    assert (share > 0.6).all() and (share < 1.3).all()
