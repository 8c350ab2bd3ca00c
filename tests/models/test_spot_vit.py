"""SpotViT: a timm ViT that reads tokens anywhere, and is that ViT on its grid."""

import warnings

import pytest
import timm
import torch
from PIL import Image
from timm.models._manipulate import group_parameters

import spot
from spot.errors import InputError
from spot.models.spot_vit import adapt
from spot.placement.priors import focus
from spot.placement.saliency import spectral_residual
from spot.tokens import positions as positions_module
from spot.tokens.positions import check_positions
from tests.conftest import make_nano

MODELS = [
    "vit_tiny_patch16_224",
    "vit_base_patch16_224",
    "vit_base_patch32_384",
    "vit_base_patch8_224",
    "deit_tiny_distilled_patch16_224",
    "deit3_small_patch16_224",
    "vit_small_patch16_224.dino",
    "vit_small_patch14_dinov2",
    "vit_small_patch14_reg4_dinov2",
    "vit_base_patch16_224.mae",
    "vit_base_patch16_siglip_224",  # attention pooling, no class token
    "vit_base_patch16_clip_224",  # norm before the blocks
    "eva02_tiny_patch14_224",
    "vit_small_patch16_dinov3",
    "vit_small_patch16_rope_mixed_ape_224",
]
NARROW = {"depth": 2, "embed_dim": 64, "num_heads": 2}


def perturbed(name, **options):
    """A timm model in which every parameter counts, zero-initialised ones too."""
    torch.manual_seed(0)
    vit = timm.create_model(name, **options).eval()
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return vit


def wide_size(name):
    """Six rows of nine patches: neither the default size nor square."""
    patch = timm.create_model(name, **NARROW).patch_embed.patch_size[0]
    return 6 * patch, 9 * patch


@pytest.mark.parametrize("shape", ["default", "wide"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_on_its_grid_a_model_is_the_timm_model(name, shape, request):
    everything = request.config.getoption("--all-models")
    if shape == "default" and name != "vit_tiny_patch16_224" and not everything:
        pytest.skip("large: with --all-models")
    options = {"img_size": wide_size(name)} if shape == "wide" else {}
    vit = perturbed(name, **options, **({} if everything else NARROW))
    model = adapt(vit).eval()
    images = torch.randn(2, 3, *model.img_size)
    grid, logits, features = model.grid().expand(2, -1, -1), vit(images), vit.forward_features(images)
    torch.testing.assert_close(model(images, grid), logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model(images), logits, atol=1e-4, rtol=1e-4)  # isotropic, as many as the grid has
    torch.testing.assert_close(model.forward_features(images, grid), features, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_token_order_does_not_matter(nano):
    images = torch.randn(2, 3, 32, 32)
    positions = torch.rand(2, 9, 2)
    torch.testing.assert_close(nano(images, positions), nano(images, positions[:, torch.randperm(9)]))


def test_gradients_reach_positions_and_agree_with_finite_differences(nano):
    model = nano.double()
    images = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    inside = torch.rand(1, 3, 2, dtype=torch.float64) * 0.6 + 0.2  # within a pixel: bilinear has kinks between
    positions = (torch.randint(4, 28, (1, 3, 2)) + inside) / 32
    leaf = positions.clone().requires_grad_()
    model(images, leaf).logsumexp(1).sum().backward()
    step = 1e-4
    for n, axis in [(0, 0), (1, 1), (2, 0)]:
        moved = positions.clone()
        moved[0, n, axis] += step
        back = positions.clone()
        back[0, n, axis] -= step
        slope = (model(images, moved).logsumexp(1) - model(images, back).logsumexp(1)) / (2 * step)
        assert float(leaf.grad[0, n, axis]) == pytest.approx(float(slope.detach()), rel=2e-2, abs=1e-4)


def test_prior_and_tokens_can_be_changed_at_any_time(nano):
    images = torch.randn(2, 3, 32, 32)
    nano.tokens, nano.prior = 5, "uniform"
    first = nano.place(images, generator=torch.Generator().manual_seed(0))
    assert first.shape == (2, 5, 2)
    torch.testing.assert_close(nano(images, generator=torch.Generator().manual_seed(0)), nano(images, first))
    nano.prior = lambda images, tokens, generator: torch.full((len(images), tokens, 2), 0.5)
    assert nano.place(images).unique().tolist() == [0.5]


def test_a_call_may_have_its_own_budget_and_prior(nano):
    images = torch.randn(2, 3, 32, 32)
    assert nano.forward_features(images, tokens=5).shape == (2, 1 + 5, 32)
    expected = nano(images, nano.place(images, tokens=5, prior="center"))
    torch.testing.assert_close(nano(images, tokens=5, prior="center"), expected)
    assert (nano.tokens, nano.prior) == (16, "isotropic")
    torch.testing.assert_close(nano.place(images, prior="center")[0], nano.grid())  # 16 tokens: its full grid
    assert nano.token_features(images, tokens=3)[-1].positions.shape == (2, 3, 2)
    with pytest.raises(InputError, match="positions are given, so tokens would change nothing"):
        nano(images, torch.rand(2, 4, 2), tokens=5)
    with pytest.raises(TypeError):
        nano(images, tokns=5)


class Even(torch.nn.Conv2d):
    """A saliency network whose maps are constant."""

    def __init__(self):
        super().__init__(3, 1, 1)

    def forward(self, pictures):
        return torch.ones_like(pictures[:, 0])


def test_a_prior_that_needs_a_map_works_by_itself(nano):
    """The maps are of the picture's own colours, so the model takes the normalisation back."""
    pictures = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(nano.data_config[key])[:, None, None] for key in ("mean", "std"))
    images = (pictures - mean) / std
    expected = focus(images, 5, maps=spectral_residual(pictures))
    nano.prior = "focus"
    torch.testing.assert_close(nano.place(images, tokens=5), expected, atol=1e-5, rtol=0)
    names = [*nano.state_dict()]
    nano.saliency = Even()
    torch.testing.assert_close(nano.place(images, tokens=5), nano.place(images, tokens=5, prior="isotropic"))
    assert [*nano.state_dict()] == names  # a saliency network is no part of the model
    nano.saliency = torch.zeros(2, 32, 32)
    nano.saliency[:, :8, :8] = 1
    assert (nano.place(images, tokens=5, prior="salient") <= 0.25).all()
    nano.saliency = "spectra"
    with pytest.raises(InputError, match="did you mean 'spectral'"):
        nano(images)


@torch.no_grad()
@pytest.mark.parametrize("output_fmt", ["NCHW", "NLC"])
@pytest.mark.parametrize("norm", [True, False])
def test_forward_intermediates_on_the_grid_is_timms(nano, output_fmt, norm):
    images = torch.randn(2, 3, 32, 32)
    how = {"norm": norm, "output_fmt": output_fmt, "return_prefix_tokens": True}
    for more in ({}, {"output_dict": True}, {"intermediates_only": True}, {"indices": [0], "stop_early": True}):
        ours, theirs = (model.forward_intermediates(images, **how, **more) for model in (nano, nano.vit))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_forward_intermediates_of_few_tokens_is_a_sequence_or_an_interpolated_map(nano):
    images, positions = torch.randn(2, 3, 32, 48), torch.rand(2, 5, 2)
    last, (sequence,) = nano.forward_intermediates(images, 1, output_fmt="NLC", positions=positions)
    torch.testing.assert_close(last, nano.forward_features(images, positions))
    (features,) = nano.token_features(images, positions, indices=1)
    assert torch.equal(sequence, features.tokens) and features.positions is positions
    (made,) = nano.forward_intermediates(images, 1, intermediates_only=True, positions=positions)
    assert torch.equal(made, nano.to_map(features, (4, 6)))
    assert nano.forward_intermediates(images, 1, output_fmt="NLC", tokens=7)[1][0].shape == (2, 7, 32)
    with pytest.raises(InputError, match="2 blocks"):
        nano.token_features(images, indices=[5])
    with pytest.raises(InputError, match="NCHW or NLC"):
        nano.forward_intermediates(images, output_fmt="NHWC")


def test_per_image_gradients_through_function_transforms(nano):
    images, positions = torch.randn(3, 3, 32, 32), torch.rand(3, 5, 2)

    def energy(image, position):
        return nano(image[None], position[None]).square().sum()

    per_image = torch.func.vmap(torch.func.grad(energy, argnums=1))(images, positions)
    leaf = positions.clone().requires_grad_()
    nano(images, leaf).square().sum().backward()
    torch.testing.assert_close(per_image, leaf.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("fixture", ["vit_tiny", "deit_tiny"])
@torch.no_grad()
def test_real_weights_predict_the_same_class_through_spot_and_timm(fixture, request, shared_data):
    model = request.getfixturevalue(fixture)
    from spot.data.picture import evaluation_transform, open_image

    transform = evaluation_transform(model.data_config)
    folders = sorted((shared_data / "imagenet-val-2k").iterdir())[::63]
    images = torch.stack([transform(open_image(sorted(folder.iterdir())[0])) for folder in folders])
    ours, theirs = model(images, model.grid().expand(len(images), -1, -1)), model.vit(images)
    assert torch.equal(ours.argmax(1), theirs.argmax(1))
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    correct = ours.argmax(1) == torch.arange(1000)[::63]
    assert correct.float().mean() > 0.5  # real weights, real images


@pytest.mark.parametrize(
    "name, reason",
    [
        ("swin_tiny_patch4_window7_224", "neither a timm VisionTransformer nor an Eva"),
        ("vit_relpos_small_patch16_224", "neither a timm VisionTransformer nor an Eva"),
        ("beit_base_patch16_224", "neither a timm VisionTransformer nor an Eva"),
        ("vit_small_r26_s32_224", "convolutional stem"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(name, reason):
    with torch.device("meta"), pytest.raises(InputError, match=reason):
        adapt(name)


def test_a_vit_without_pretrained_weights_does_not_bear_their_name():
    tiny = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
    assert spot.adapt("vit_tiny_patch16_224", **tiny).name == "vit_tiny_patch16_224"
    assert spot.adapt("vit_tiny_patch16_224.augreg_in21k", **tiny).name == "vit_tiny_patch16_224.augreg_in21k"


def test_bad_input_is_named(nano):
    images, positions = torch.randn(2, 3, 32, 32), torch.rand(3, 5, 2)
    for call, sentence in (
        (lambda: adapt(nano.vit, img_size=64), "not with a built model"),
        (lambda: adapt("vit_tiny_patch16_224", patch_drop_rate=0.5, depth=1), "drops patches"),
        (lambda: nano(images[:, :1]), r"\(B, 3, H, W\), got \(2, 1, 32, 32\)"),
        (lambda: nano(images, positions[:2] / 0), "finite"),
        (lambda: nano(images, positions[:2, :0]), "at least one token"),
        (lambda: nano(images, positions), "3 images, but there are 2"),
        (lambda: nano.to_map(positions), r"features must be Features, got Tensor; model.token_features"),
        (lambda: setattr(nano, "tokens", 0), "at least 1"),
        (lambda: setattr(nano, "prior", "sobel"), "did you mean 'sobol'"),
    ):
        with pytest.raises(InputError, match=sentence):
            call()


def test_intermediates_under_gradient_checkpointing_are_computed_again(nano):
    """With checkpointing on, a block runs once forward and once more backward, also for intermediate features."""
    images, calls = torch.randn(2, 3, 32, 32), []
    nano.train()
    nano.vit.blocks[0].norm1.register_forward_hook(lambda *_: calls.append(1))
    taken = {}
    for enabled in (False, True):
        nano.set_grad_checkpointing(enabled)
        calls.clear()
        nano.zero_grad()
        nano.token_features(images, indices=1)[0].tokens.square().sum().backward()
        taken[enabled] = len(calls), nano.vit.patch_embed.proj.weight.grad.clone()
    assert (taken[False][0], taken[True][0]) == (1, 2)
    torch.testing.assert_close(taken[True][1], taken[False][1])


def test_positions_in_pixels_are_warned_of_once(nano):
    images = torch.randn(2, 3, 32, 32)
    positions_module._warn_of_pixels.cache_clear()
    with pytest.warns(UserWarning, match="pixels are to be divided by"):
        nano(images, torch.rand(2, 5, 2) * 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nano(images, torch.rand(2, 5, 2) * 32)
        positions_module._warn_of_pixels.cache_clear()
        # A third outside, as a search without projection leaves them.
        nano(images, torch.linspace(-0.25, 1.25, 20).view(2, 5, 2))


def test_positions_on_another_device_are_not_read_back():
    """On a device whose values are not at hand (here: none) the check does not ask for them."""
    check_positions(torch.empty(2, 5, 2, device="meta"))


# What timm asks


def test_timm_resolves_the_vits_own_preprocessing(vit_tiny):
    config = timm.data.resolve_model_data_config(vit_tiny)
    assert (config["mean"], config["std"]) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert config == {**timm.data.resolve_model_data_config(vit_tiny.vit)}
    assert "0.5000" in str(timm.data.create_transform(**config).transforms[-1])
    assert vit_tiny.default_cfg["num_classes"] == vit_tiny.pretrained_cfg["num_classes"] == 1000


def test_preprocessing_follows_the_size_the_model_was_built_for():
    model = spot.adapt("vit_tiny_patch16_224.augreg_in21k_ft_in1k", img_size=96, depth=1)
    config = timm.data.resolve_model_data_config(model)
    assert (config["input_size"], config["mean"]) == ((3, 96, 96), (0.5, 0.5, 0.5))
    picture = Image.new("RGB", (120, 100), "white")
    for training in (False, True):
        assert model.transform(training)(picture).shape == (3, 96, 96)
    torch.testing.assert_close(model.transform()(picture), torch.ones(3, 96, 96))  # (1 − 0.5) / 0.5


def test_timms_questions_have_the_vits_answers(nano):
    vit = nano.vit
    assert (nano.num_features, nano.head_hidden_size) == (vit.num_features, vit.head_hidden_size)
    assert nano.get_classifier() is vit.get_classifier()
    own = dict(nano.named_parameters())
    assert {name.removeprefix("vit.") for name in nano.no_weight_decay()} == vit.no_weight_decay()
    assert {"vit.pos_embed", "vit.cls_token"} <= nano.no_weight_decay() & own.keys()
    for info, theirs in zip(nano.feature_info, vit.feature_info, strict=True):
        assert info["num_chs"] == theirs["num_chs"]
        assert nano.get_submodule(info["module"]) is vit.get_submodule(theirs["module"])
    ours = {
        name.removeprefix("vit."): group
        for group, names in group_parameters(nano, nano.group_matcher()).items()
        for name in names
    }
    theirs = group_parameters(vit, vit.group_matcher())
    assert ours == {name: group for group, names in theirs.items() for name in names}


def test_class_names_stay_with_the_model(nano, tmp_path):
    assert nano.class_names is None
    nano.class_names = [f"kind {index}" for index in range(10)]
    nano.save_pretrained(tmp_path)
    assert spot.load(tmp_path).class_names == nano.class_names
    with pytest.raises(InputError, match="each of the 10 classes needs a name, got 2"):
        nano.class_names = ["a", "b"]
    nano.reset_classifier(3)
    assert nano.class_names is None


@torch.no_grad()
def test_under_bfloat16_autocast_it_is_as_near_to_float32_as_timms_model(vit_tiny):
    """The position embedding and the stream of tokens stay float32, as in timm."""
    images = torch.randn(8, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    grid, exact = vit_tiny.grid(images), vit_tiny.vit(images)
    with torch.autocast("cpu", torch.bfloat16):
        assert vit_tiny.embed(images, grid)[0].dtype == torch.float32
        logits = vit_tiny(images, grid), vit_tiny.vit(images)
    ours, theirs = ((each.float() - exact).square().mean().sqrt() for each in logits)
    assert ours < 1.2 * theirs  # 1.02 on photographs, and 1.43 where autocast rounds the position embedding


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("shape", [(), (2,), (5, 2), (2, 5), (2, 5, 4), (1, 5, 2)])
def test_positions_of_another_shape_are_refused_in_one_sentence(shape, gradients):
    """Without gradients the cache of placements reads them first."""
    with torch.set_grad_enabled(gradients), pytest.raises(InputError, match="positions"):
        make_nano()(torch.randn(2, 3, 32, 32), torch.rand(shape))


def test_a_cast_model_keeps_the_position_kernels_in_float32():
    model = make_nano()
    before = model.tokenizer.kernels.inverse.clone()
    model.bfloat16()
    assert torch.equal(model.tokenizer.kernels.inverse, before) and before.dtype == torch.float32
