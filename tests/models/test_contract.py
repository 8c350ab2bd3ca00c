"""A model is a model: every kind of SpotViT is an ordinary module, as timm's own ViT is.

Each test takes a timm user's habit and compares with timm's ViT doing the same, wherever there is one to compare with.
"""

import copy
import io
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import spot
from spot.hashes import hash_model
from spot.placement.policy import Policy
from tests.conftest import VIT_TINY, make_nano
from tests.models.test_checkpoints import authors_state

RETROFIT = "retrofit"  # the shipped one, with real weights
AUTHORS = "authors"  # windows that are not a ViT's patches: there is no timm model to compare with
KINDS = ["adapted", "built-in", "folder", AUTHORS, "policy", RETROFIT]


@pytest.fixture(scope="module")
def retrofit(shared_data):
    return spot.load("vit-ti", weights=shared_data / "weights" / f"{VIT_TINY}.safetensors", tokens=25)


@pytest.fixture(params=KINDS)
def model(request, tmp_path):
    kind = request.param
    if kind == "adapted":
        made = make_nano()
    elif kind == "built-in":
        made = spot.load("scenes-a")
    elif kind == "folder":
        make_nano(seed=3).save_pretrained(tmp_path / "saved")
        made = spot.load(tmp_path / "saved")
    elif kind == AUTHORS:
        torch.save(authors_state(side=16), tmp_path / "authors.pth")
        made = spot.load(tmp_path / "authors.pth", tokens=16)
    elif kind == "policy":
        made = make_nano()
        torch.manual_seed(0)  # of a map with two equal peaks a cast may take the other one
        made.policy = Policy(8, side=16, width=8, depth=1, min_tokens=2).requires_grad_(False)
        nn.init.normal_(made.policy.look.head.weight)
        made.prior = "learned"
    else:
        made = copy.deepcopy(request.getfixturevalue(RETROFIT))
    made.kind = kind
    return made


def images_for(model, count=2, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, *model.img_size, generator=draw)


def budgets_of(model):
    cells = len(model.grid())
    return sorted({max(2, cells // 8), max(2, cells // 4), max(2, cells // 2)})


def answers(model, images):
    """Logits of all budgets: what must not change where nothing was changed."""
    with torch.no_grad():
        return torch.stack([model(images, tokens=tokens) for tokens in budgets_of(model)])


def timms(model):
    """A copy of the timm ViT inside, with weights of its own."""
    if model.kind == AUTHORS:
        pytest.skip("the authors' windows are not a ViT's patches")
    return copy.deepcopy(model.vit)


def on_grid(model):
    return lambda images: model(images, model.grid(images))


def test_gradients_on_the_grid_are_timms(model):
    vit, images = timms(model).train(), images_for(model)
    labels = torch.tensor([1, 2])
    F.cross_entropy(vit(images), labels).backward()
    F.cross_entropy(on_grid(model.train())(images), labels).backward()
    for name, parameter in vit.named_parameters():
        ours = model.vit.get_parameter(name).grad
        torch.testing.assert_close(ours, parameter.grad, atol=2e-4, rtol=2e-3, msg=name)


def test_steps_of_sgd_on_the_grid_are_timms(model):
    vit, images = timms(model), images_for(model)
    labels = torch.tensor([1, 2])
    for forward, parameters in ((vit, vit.parameters()), (on_grid(model), model.parameters())):
        optimizer = torch.optim.SGD([each for each in parameters if each.requires_grad], lr=1e-3, momentum=0.9)
        for _ in range(3):  # momentum counts from the second
            optimizer.zero_grad()
            F.cross_entropy(forward(images), labels).backward()
            optimizer.step()
    for name, parameter in vit.named_parameters():
        torch.testing.assert_close(model.vit.get_parameter(name), parameter, atol=1e-4, rtol=1e-3, msg=name)


def test_every_weight_that_says_it_learns_gets_a_gradient_at_any_budget(model):
    images = images_for(model)
    for tokens in budgets_of(model):
        model.zero_grad()
        model.train()(images, tokens=tokens).square().sum().backward()
        without = [name for name, each in model.named_parameters() if each.requires_grad and each.grad is None]
        assert not without, f"with {tokens} tokens"


def test_a_head_of_ones_own_trains_the_vit_too(model):
    head = nn.Linear(model.embed_dim, 2)
    before = model.vit.blocks[0].mlp.fc1.weight.clone()
    optimizer = torch.optim.SGD([*model.vit.parameters(), *head.parameters()], lr=0.1)
    head(model.forward_features(images_for(model), tokens=budgets_of(model)[0])[:, 0]).sum().backward()
    optimizer.step()
    assert not torch.equal(model.vit.blocks[0].mlp.fc1.weight, before)


def test_weights_changed_in_place_are_seen(model):
    images = images_for(model)
    before = answers(model, images)
    with torch.no_grad():
        model.vit.head.bias.add_(5)
    torch.testing.assert_close(answers(model, images), before + 5, atol=1e-3, rtol=1e-4)
    with torch.no_grad():
        model.vit.head.weight.zero_()
    assert answers(model, images).std(dim=1).max() == 0  # the same for every image: nothing of it is left


def test_a_state_dict_arrives_whole(model):
    images = images_for(model)
    before = answers(model, images)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["vit.head.bias"] += 16
    model.load_state_dict(state)
    torch.testing.assert_close(answers(model, images), before + 16, atol=1e-3, rtol=1e-4)
    assert [*model.state_dict()] == [*state]


def test_another_head_works_at_every_budget(model):
    images = images_for(model)
    answers(model, images)
    for classes, outputs in ((3, 3), (0, model.embed_dim)):
        model.reset_classifier(classes)
        assert model.num_classes == classes and answers(model, images).shape[-1] == outputs


def test_hooks_fire_whenever_they_are_registered(model):
    images, seen = images_for(model), []
    answers(model, images)
    model.register_forward_hook(lambda *_: seen.append("model"))
    model.vit.blocks[0].register_forward_hook(lambda *_: seen.append("block"))
    model(images, tokens=budgets_of(model)[1])
    assert seen == ["block", "model"]


def test_nothing_is_kept_twice(model):
    images = images_for(model)
    answers(model, images)
    unique = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in model.parameters()}
    assert sum(unique.values()) == sum(each.numel() * each.element_size() for each in model.parameters())
    state = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    pickled = len(pickle.dumps(model))  # whatever hides in an attribute is in it
    assert pickled < 1.15 * state + 400_000
    assert hash_model(model) == hash_model(copy.deepcopy(model))


def test_a_forward_pass_changes_nothing(model):
    before = hash_model(model), {name: id(each) for name, each in model.named_parameters()}, [*vars(model)]
    answers(model, images_for(model))
    assert before == (hash_model(model), {name: id(each) for name, each in model.named_parameters()}, [*vars(model)])


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save_pretrained", "torch.save"])
def test_copies_predict_the_same_and_are_independent(model, way, tmp_path):
    images = images_for(model)
    before = answers(model, images)
    if way == "deepcopy":
        again = copy.deepcopy(model)
    elif way == "pickle":
        again = pickle.loads(pickle.dumps(model))
    elif way == "torch.save":
        torch.save(model, tmp_path / "model.pt")
        again = torch.load(tmp_path / "model.pt", weights_only=False)
    else:
        model.save_pretrained(tmp_path / "model")
        again = spot.SpotViT.from_pretrained(tmp_path / "model").eval()
    torch.testing.assert_close(answers(again, images), before, atol=0, rtol=0)
    assert (again.tokens, again.prior, again.scale) == (model.tokens, model.prior, model.scale)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    torch.testing.assert_close(answers(model, images), before, atol=0, rtol=0)


@pytest.mark.parametrize("dtype, error", [(torch.float64, 1e-4), (torch.bfloat16, 0.2), (torch.float16, 0.03)])
def test_a_cast_model_agrees_within_its_precision(model, dtype, error):
    images = images_for(model)
    before = answers(model, images)
    cast = model.to(dtype)
    assert {each.dtype for each in cast.parameters()} == {dtype}
    after = answers(cast, images.to(dtype)).float()
    assert (after - before).abs().max() < error * before.std() + error * before.abs().max()


def test_inference_mode_then_a_search(model):
    images = images_for(model)
    with torch.inference_mode():
        model(images, tokens=4)
    start = model.place(images, tokens=4, prior="isotropic")
    result = spot.search(model, images, torch.tensor([0, 1]), start)
    assert result.positions.shape == start.shape and not torch.equal(result.positions, start)


def test_threads_that_use_one_model_at_several_budgets_agree(model):
    images, budgets = images_for(model), budgets_of(model) * 4
    expected = dict(zip(budgets_of(model), answers(model, images), strict=True))

    @torch.no_grad()
    def run(tokens):
        return tokens, model(images, tokens=tokens)

    with ThreadPoolExecutor(4) as pool:
        for tokens, logits in pool.map(run, budgets):
            torch.testing.assert_close(logits, expected[tokens], atol=1e-5, rtol=1e-5)


def test_gradient_checkpointing_changes_no_gradient(model):
    images, gradients = images_for(model), []
    for on in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(on)
        model.train()(images, tokens=budgets_of(model)[1]).square().sum().backward()
        gradients.append(model.vit.blocks[0].attn.qkv.weight.grad.clone())
    torch.testing.assert_close(*gradients)


# Without gradients, values that depend only on positions are cached.
@pytest.mark.parametrize(("model", "grad"), [("adapted", False), (AUTHORS, True), ("policy", True)], indirect=["model"])
def test_it_compiles_and_exports(model, grad):
    images = images_for(model)
    positions = model.place(images, tokens=5, prior="isotropic")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(compiled(images, positions), model(images, positions), atol=1e-4, rtol=1e-4)
    batch, tokens = torch.export.Dim("batch", min=2), torch.export.Dim("tokens", min=2)
    shapes = {"images": {0: batch}, "positions": {0: batch, 1: tokens}}
    program = torch.export.export(model, (images, positions), dynamic_shapes=shapes).module()
    images, positions = images_for(model, 3), torch.rand(3, 7, 2)  # another batch, another budget
    torch.testing.assert_close(program(images, positions), model(images, positions), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dynamo", [False, True])
@torch.no_grad()
def test_torch_writes_it_as_onnx(nano, dynamo):
    """By torch's old exporter, which traces, and by its new one; `spot export` has a graph of its own."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    images, positions, file = images_for(nano), torch.rand(2, 2, 5, 2), io.BytesIO()
    options = {"dynamo": dynamo, "verbose": False, "input_names": ["images", "positions"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracers warn of what they take for constants
        torch.onnx.export(nano, (images, positions[0]), file, **options)
    session = onnxruntime.InferenceSession(file.getvalue())
    for each in positions:
        (logits,) = session.run(None, {"images": images.numpy(), "positions": each.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), nano(images, each), rtol=1e-4, atol=1e-4)


def test_it_trains_under_data_parallel(model, tmp_path):
    images = images_for(model)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        DistributedDataParallel(model.train())(images, tokens=4).sum().backward()
    finally:
        dist.destroy_process_group()
    assert model.vit.head.weight.grad.abs().sum() > 0


def test_another_placement_shares_every_weight(model):
    few = model.at(tokens=3, prior="isotropic", scale=None)
    assert [*few.parameters()] == [*model.parameters()] or all(
        mine is theirs for mine, theirs in zip(few.parameters(), model.parameters(), strict=True)
    )
    assert few.tokens == 3 and model.tokens != 3
    few.policy = None
    assert (model.policy is not None) == (model.kind in ("policy", RETROFIT))
