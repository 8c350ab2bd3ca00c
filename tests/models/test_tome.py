"""ToMe against a slow reference: a token of size s is s equal tokens, in timm's own blocks, merged by loops."""

import math

import pytest
import torch
from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock

import spot
from spot.errors import InputError
from spot.evaluation.cost import macs
from spot.models.spot_vit import SpotViT
from spot.models.tome import Merging, ToMe, match
from spot.models.tome_schedule import blocks_macs
from spot.models.wrappers import PlainViT
from spot.tokens.authors import AuthorsTokenizer
from tests.conftest import make_nano

SMALL = {"img_size": 48, "depth": 3}  # 36 patches of 8 pixels
KINDS = {
    "plain": SMALL,
    "layer scale and registers": {**SMALL, "init_values": 0.3, "reg_tokens": 4},
    "queries and keys normed": {**SMALL, "qk_norm": True},
    "mean pooling": {**SMALL, "global_pool": "avg"},
    "stochastic depth": {**SMALL, "drop_path_rate": 0.5},
}


def pictures(model: spot.SpotViT, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, *model.img_size, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def slow_tome(model, image, positions, schedule):
    """One image (C, H, W): logits and, for every final token, the set of input tokens in it."""
    vit, prefix = model.vit, model.num_prefix_tokens
    x, _ = model.embed(image[None], positions[None])
    members = [{i} for i in range(len(positions))]
    for block, r in zip(vit.blocks, schedule, strict=True):
        # Every token as often as it counts, and timm's attention knows nothing of sizes.
        first, repeated = list(range(prefix)), list(range(prefix))
        for number, group in enumerate(members):
            first.append(len(repeated))
            repeated += [prefix + number] * len(group)
        kept = []
        hook = block.attn.k_norm.register_forward_hook(lambda module, args, keys, kept=kept: kept.append(keys))
        x = x + block.ls1(block.attn(block.norm1(x)[:, repeated])[:, first])
        hook.remove()
        keys = kept[0].mean(1)[0][first][prefix:]
        pairs = []
        for a in range(0, len(members), 2):
            cosines = {b: float(torch.cosine_similarity(keys[a], keys[b], dim=0)) for b in range(1, len(members), 2)}
            best = max(cosines, key=cosines.get)
            pairs.append((cosines[best], a, best))
        pairs.sort(reverse=True)
        into = {a: b for _, a, b in pairs[:r]}
        vectors = {number: x[0, prefix + number] for number in range(len(members))}
        order = [a for a in range(0, len(members), 2) if a not in into] + list(range(1, len(members), 2))
        groups, means = [], []
        for number in order:
            together = [number, *(a for a, b in into.items() if b == number)]
            count = sum(len(members[each]) for each in together)
            means.append(sum(vectors[each] * len(members[each]) for each in together) / count)
            groups.append(set().union(*(members[each] for each in together)))
        members = groups
        x = torch.cat([x[:, :prefix], torch.stack(means)[None]], 1)
        x = x + block.ls2(block.mlp(block.norm2(x)))
    x = vit.norm(x)
    repeated = list(range(prefix)) + [prefix + number for number, group in enumerate(members) for _ in group]
    return model.forward_head(x[:, repeated])[0], members


@pytest.mark.parametrize("kind", KINDS)
def test_merging_is_attention_over_repeated_tokens(kind):
    model = make_nano(**KINDS[kind]).double()
    images = pictures(model).double()
    positions = model.place(images).double()
    schedule = [5, 7, 4]
    tome = ToMe(model, schedule)
    logits, merged = tome(images, positions), tome.merge(images, positions)
    assert merged.features.shape[1] == model.num_prefix_tokens + 36 - 16
    for number, image in enumerate(images):
        expected, members = slow_tome(model, image, positions[number], schedule)
        torch.testing.assert_close(logits[number], expected, rtol=1e-6, atol=1e-7)
        sources = merged.sources[number].tolist()
        found = [{i for i, token in enumerate(sources) if token == m} for m in range(len(members))]
        assert found == members
        assert merged.sizes[number].tolist() == [len(group) for group in members]
        means = torch.stack([positions[number, sorted(group)].mean(0) for group in members])
        torch.testing.assert_close(merged.positions[number], means)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", {}),
        ("deit3_small_patch16_224", {}),
        ("deit_tiny_distilled_patch16_224", {}),
        ("vit_small_patch14_reg4_dinov2", {"img_size": 112, "num_classes": 10}),
    ],
)
def test_with_nothing_merged_it_is_the_timm_model(name, options):
    torch.manual_seed(0)
    model = spot.adapt(name, depth=2, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # LayerScale, biases and registers must not be invisible
            parameter.add_(torch.randn_like(parameter) * 0.05)
        images = pictures(model)
        expected = model.vit(images)
        torch.testing.assert_close(ToMe(model, 0)(images), expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(ToMe(model, 20)(images), expected, atol=1e-3)


def test_the_most_alike_pairs_merge():
    angles = torch.tensor([0.0, 10.0, 90.0, 95.0, 180.0, 270.0]) * math.pi / 180
    keys = torch.stack([angles.cos(), angles.sin()], -1)[None]
    # Tokens 0, 2, 4 look for a partner among 1, 3, 5: 2 → 3 (5°), 0 → 1 (10°), 4 → 3 (85°).
    assert match(keys, 1).tolist() == [[0, 2, 3, 3, 1, 4]]
    assert match(keys, 2).tolist() == [[1, 1, 2, 2, 0, 3]]
    assert match(keys, 3).tolist() == [[0, 0, 1, 1, 1, 2]]
    assert match(3 * keys, 2).tolist() == match(keys, 2).tolist()  # the angle counts, not the length


def test_placing_then_merging_has_one_budget():
    model = make_nano(**SMALL).at(tokens=20, prior="uniform")
    tome = ToMe(model, [5, 4, 3], own_placement=True)
    assert (tome.starting_tokens, tome.tokens, tome.random) == (20, 8, True)
    images, seeds = pictures(model), [torch.Generator().manual_seed(3) for _ in "ab"]
    placed = model.place(images, generator=seeds[0])
    torch.testing.assert_close(tome(images, generator=seeds[1]), ToMe(model, [5, 4, 3])(images, placed))


def test_gradients_reach_parameters_and_positions():
    model = make_nano(**SMALL).double()
    positions = model.place(pictures(model).double()).double().requires_grad_()
    ToMe(model, 4)(pictures(model).double(), positions).square().sum().backward()
    assert positions.grad.abs().sum() > 0
    assert all(parameter.grad is not None for parameter in model.vit.blocks.parameters())


def test_it_compiles_without_a_graph_break():
    model = make_nano(**SMALL)
    tome, images = ToMe(model, 5), pictures(model)
    compiled = torch.compile(tome, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), tome(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16_stays_close(autocast):
    model = make_nano(**KINDS["queries and keys normed"])
    images, grid = pictures(model), model.grid().expand(2, -1, -1)
    expected = ToMe(model, 4)(images, grid)
    model, images = (model, images) if autocast else (model.bfloat16(), images.bfloat16())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        close = ToMe(model, 4)(images, grid)
    assert close.dtype == torch.bfloat16
    assert (close - expected).abs().mean() < 0.2 * expected.std()


def test_a_tokenizer_of_another_kind_is_used_as_it_is():
    model = SpotViT(make_nano(**SMALL, pos_embed="none").vit, tokenizer=AuthorsTokenizer(8, 32)).eval()
    images = pictures(model)
    expected = model(images, model.grid().expand(2, -1, -1))
    torch.testing.assert_close(ToMe(model, 0)(images), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="no plain ViT"):
        PlainViT(model)


def test_the_wrapper_owns_no_parameters():
    model = make_nano()
    tome = ToMe(model, 1)
    assert {id(p) for p in tome.parameters()} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize(
    ("r", "message"),
    [
        (19, r"half of its tokens: of 36 tokens \[18, 9, 4\], got 19"),
        ([10, 10, 10], r"of 36 tokens \[10, 10, 8\], got"),
        (-1, "at least 0"),
        (1.5, "whole number"),
        ([1, 2], "or 3 of them"),
    ],
)
def test_what_cannot_be_merged_is_refused(r, message):
    with pytest.raises(InputError, match=message):
        ToMe(make_nano(**SMALL), r)


@pytest.mark.parametrize(
    "options",
    [
        {"block_fn": ResPostBlock},
        {"block_fn": ParallelScalingBlock},
        {"attn_layer": "diff"},
        {"global_pool": "map", "class_token": False},
        {"global_pool": "avg", "pool_include_prefix": True},
        {"global_pool": "max"},
    ],
)
def test_other_blocks_and_pools_than_timms_standard_ones_are_refused(options):
    with pytest.raises(InputError, match=r"ToMe (merges in timm's Block with Attention|needs the class token)"):
        ToMe(make_nano(**SMALL, **options), 1)


def test_a_rotary_vit_is_refused_before_it_is_measured():
    model = spot.adapt("eva02_tiny_patch14_224", depth=4)
    for name in ("tome", "tome-cost", "merged"):
        with pytest.raises(InputError, match="not in EvaBlock with"):
            spot.BASELINES[name].build(model, 100)


# More tokens for the same cost: placed, and merged in later blocks


@pytest.fixture(scope="module")
def vit():
    return make_nano(depth=12, img_size=112)  # a grid of 196


@pytest.mark.parametrize("tokens", [16, 25, 49, 100, 150, 195])
def test_it_costs_no_more_than_its_budget_and_one_token_more_would(vit, tokens):
    merging = Merging(vit, tokens)
    given = macs(vit.at(tokens=tokens))
    count, most = merging.starting_tokens, int(0.7 * merging.starting_tokens)
    assert tokens < count <= 196 and 0 < sum(merging.schedule()) <= most
    assert macs(merging) <= given and merging.tokens == tokens
    blocks = [block for block, r in enumerate(merging.schedule()) if r]
    assert blocks == [3, 4, 6, 8] and len(set(merging.schedule())) == 2  # late and even
    if count < 196:
        schedule = [int(0.7 * (count + 1) / 4) * (block in blocks) for block in range(12)]
        saved = blocks_macs(vit, count + 1) - blocks_macs(vit, count + 1, schedule)
        assert macs(vit.at(tokens=count + 1)) - saved > given


def test_with_all_of_the_grid_nothing_is_merged(vit):
    images = torch.rand(2, 3, 112, 112)
    merging = Merging(vit, 196)
    assert (merging.starting_tokens, merging.schedule()) == (196, [0] * 12)
    torch.testing.assert_close(merging(images), vit(images, vit.grid(images)), rtol=1e-4, atol=1e-4)


def test_it_is_tome_on_tokens_that_are_placed():
    model = spot.load("scenes-a")
    images = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    merging = Merging(model, 16, "center")
    count, schedule = merging.starting_tokens, merging.schedule()
    places = model.place(images, tokens=count, prior="center")
    assert count > 16 and sum(schedule) > 0
    torch.testing.assert_close(merging.place(images), places)
    torch.testing.assert_close(merging(images), ToMe(model, schedule)(images, places))
    assert (model.tokens, model.prior) == (64, "isotropic")  # left as they were


def test_another_budget_is_another_model(vit):
    with pytest.raises(InputError, match="is for 25 tokens, got 36; make another"):
        Merging(vit, 25)(torch.rand(1, 3, 112, 112), tokens=36)
    with pytest.raises(InputError, match="at least 1"):
        Merging(vit, 0)
    with pytest.raises(InputError, match="no learned prior"):
        spot.BASELINES["merged-learned"].build(vit, 16)(torch.rand(1, 3, 112, 112))


def test_positions_given_to_tome_are_checked():
    with pytest.raises(InputError, match="finite"):
        ToMe(make_nano(), 1)(torch.randn(1, 3, 32, 32), torch.full((1, 9, 2), torch.nan))
