"""Exported files: what they take, what they say of themselves, and that they are whole or absent."""

import json

import numpy as np
import onnx
import pytest
import torch

import spot
from spot.cli import main
from spot.errors import InputError
from spot.export import files
from spot.export.files import export, export_cascade
from spot.export.runtime import KEY, Exported, ExportedCascade
from spot.hashes import hash_model
from spot.models.cascade import Cascade, Stage
from spot.models.checkpoints import save_folder
from spot.models.tome import ToMe
from tests.conftest import make_nano, random_policy
from tests.export.test_graph import bytes_and_positions, normalised, with_sizes


@pytest.mark.parametrize(
    "batch, size, tokens", [(1, (32, 32), 2), (7, (32, 32), 256), (2, (57, 40), 49), (1, (8, 200), 3)]
)
@torch.no_grad()
def test_one_file_takes_any_batch_image_size_and_number_of_tokens(exported, batch, size, tokens):
    pixels, positions = bytes_and_positions(batch=batch, size=size, tokens=tokens)
    result = Exported(exported.path)(pixels.numpy(), positions.numpy())
    images = normalised(exported.model, pixels)
    features = exported.model.forward_features(images, positions)
    np.testing.assert_allclose(result["logits"], exported.model(images, positions), atol=2e-5)
    np.testing.assert_allclose(result["tokens"], features, atol=2e-5)
    np.testing.assert_allclose(result["pooled"], exported.model.forward_head(features, pre_logits=True), atol=2e-5)


def nodes(path):
    """The kinds of all nodes, those of branches among them."""

    def kinds(graph):
        for node in graph.node:
            yield node.op_type
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    yield from kinds(attribute.g)

    return list(kinds(onnx.load(path).graph))


def test_there_is_no_grid_sampler_and_no_copy_of_the_image_per_token(exported):
    kinds = nodes(exported.path)
    assert "GridSample" not in kinds
    assert kinds.count("Attention") == 2  # one node per block
    assert kinds.count("Gather") + kinds.count("GatherND") + kinds.count("GatherElements") < 6
    domains = {node.domain for node in onnx.load(exported.path).graph.node}
    assert domains == {""}  # standard operators alone


def test_the_file_says_what_it_is_and_the_largest_difference_is_said(exported):
    about = json.loads({entry.key: entry.value for entry in onnx.load(exported.path).metadata_props}[KEY])
    assert about["version"] == spot.__version__
    assert about["model_hash"] == hash_model(exported.model)
    assert about["classes"] == [f"class {number}" for number in range(10)]
    assert about["preprocessing"]["size"] == [32, 32]
    assert about["preprocessing"]["mean"] == [0.5, 0.5, 0.5]
    assert about["positions"] == exported.model.place(torch.zeros(1, 3, 32, 32))[0].tolist()
    assert set(exported.written.difference) == {"logits", "pooled", "tokens"}
    assert 0 < max(exported.written.difference.values()) < 1e-4
    assert "logits by at most" in exported.written.summary


def placed(**how):
    """A model of 9 tokens, with a policy."""
    model = make_nano()
    model.policy = random_policy(model, side=8, width=8, depth=1)
    return model.at(tokens=9, **how)


def merging_after_a_policy():
    """torch.export wraps the blocks of a model that holds a module twice; they are timm's all the same."""
    model = placed(prior="learned")
    model.vit.again = model.vit.head
    return ToMe(model, [3, 2], own_placement=True)


BUILT_IN = {
    "a prior": (placed, {}),
    "a prior for older runtimes": (placed, {"opset": 20}),
    "a prior with scales": (lambda: placed(prior="center", scale="auto"), {"image": "float"}),
    "a policy": (lambda: placed(prior="learned"), {"image": "float"}),
    "a policy and merging": (merging_after_a_policy, {}),
}


@pytest.mark.parametrize("name", BUILT_IN)
@torch.no_grad()
def test_a_file_with_a_placement_gives_what_the_model_gives(tmp_path, name):
    make, options = BUILT_IN[name]
    model = make()
    written = export(model, tmp_path / "m.onnx", built_in=True, **options)
    run = Exported(tmp_path / "m.onnx")
    assert len(run.session.get_inputs()) == 1 and "GridSample" not in nodes(run.path)
    assert nodes(run.path).count("Attention") == (0 if "older" in name else 2)
    assert written.about["learned"] == (written.about["positions"] is None) == ("policy" in name)
    assert written.about["merged"] == (model.schedule() if "merging" in name else None)
    pixels, _ = bytes_and_positions(batch=3)
    images = normalised(model.spot_vit, pixels)
    given = (images if "image" in options else pixels).numpy()
    np.testing.assert_allclose(run(given)["logits"], model(images), atol=5e-5)
    with pytest.raises(InputError, match="placement built in"):
        run(given, np.zeros((3, 5, 2)))
    with pytest.raises(InputError, match="has a placement for images of 32 × 32 pixels built in, got 16 × 32"):
        run(given[:, :, 16:] if "image" in options else given[:, 16:])


@torch.no_grad()
def test_a_torch_program_with_a_placement(tmp_path):
    model = placed(scale="auto")
    export(model, tmp_path / "m.pt2", to="torch", built_in=True)
    pixels, _ = bytes_and_positions(batch=3)
    result = torch.export.load(tmp_path / "m.pt2").module()(pixels)[0]
    torch.testing.assert_close(result, model(normalised(model, pixels)), atol=5e-5, rtol=1e-5)


@torch.no_grad()
def test_a_cascade_of_files_stops_where_the_cascade_stops(tmp_path):
    model = make_nano(depth=3)
    pixels, _ = bytes_and_positions(batch=6)
    first = Cascade(model, [Stage(4, 1, 2.0, 0.9), Stage(16, 2)])
    confidence = next(iter(first(normalised(model, pixels)))).confidence
    threshold = confidence.sort().values[2:4].mean().item()  # between two images: the runtimes round differently
    stages = [Stage(4, 1, threshold, 0.9), Stage(16, 2, 0.0, 0.7, 0.4, (0, 3, 0))]
    cascade = Cascade(model, stages)
    *_, last = cascade(normalised(model, pixels))
    export_cascade(cascade, tmp_path / "files")
    result = ExportedCascade(tmp_path / "files")(pixels.numpy())
    assert set(result["stages"].tolist()) == {1, 2}
    np.testing.assert_array_equal(result["stages"] == 1, last.tokens.numpy() == 4)
    np.testing.assert_allclose(result["confidence"], last.confidence, atol=2e-5)
    np.testing.assert_array_equal(result["logits"].argmax(1), last.logits.argmax(1).numpy())


@torch.no_grad()
def test_a_torch_program_runs_on_any_batch_and_tokens_without_spot(tmp_path):
    model = make_nano().bfloat16().float()  # what bfloat16 weights are in float32
    training = make_nano().bfloat16().train()
    export(training, tmp_path / "m.pt2", to="torch")
    assert training.training and training.vit.cls_token.dtype == torch.bfloat16  # left as it was
    extra = {f"{KEY}.json": ""}
    program = torch.export.load(tmp_path / "m.pt2", extra_files=extra).module()
    assert json.loads(extra[f"{KEY}.json"])["model_hash"] == hash_model(model)
    for batch, tokens in ((1, 2), (3, 256), (2, 49)):
        pixels, positions = bytes_and_positions(batch=batch, tokens=tokens)
        expected = model(normalised(model, pixels), positions)
        torch.testing.assert_close(program(pixels, positions)[0], expected, atol=2e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("wrong", "row"), [(1e-3, 0), (torch.nan, 1)])
def test_a_file_that_differs_is_not_kept_and_the_old_one_is(tmp_path, monkeypatch, wrong, row):
    """By a little, or by a NaN for the second image of a batch."""
    model = make_nano()

    def run(pixels, positions):
        logits = model(normalised(model, pixels), positions)
        logits[row : row + 1, 3] += wrong
        return [logits]

    monkeypatch.setattr(files, "write_onnx", lambda graph, about, path, opset: path.write_bytes(b"wrong"))
    monkeypatch.setattr(files, "run_onnx", lambda path: run)
    (tmp_path / "m.onnx").write_bytes(b"old")
    with pytest.raises(InputError, match="differ from the model's by"):
        export(model, tmp_path / "m.onnx")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("m.onnx", b"old")]


@pytest.mark.parametrize(
    "prior, options, sentence",
    [
        ("isotropic", {"to": "torch"}, "a file for torch ends in .pt2"),
        ("uniform", {"built_in": True}, "draws at random and cannot be built in"),
        ("focus", {"built_in": True}, "looks at the image and cannot be built in"),
        ("learned", {"built_in": True}, "has no learned prior"),
        ("isotropic", {"outputs": ()}, "at least one output is needed"),
        ("isotropic", {"opset": 9, "built_in": True}, "cannot be written in opset 9; use opset 18 or a later one"),
    ],
)
def test_what_cannot_be_exported_is_one_sentence(tmp_path, prior, options, sentence):
    with pytest.raises(InputError, match=sentence):
        export(make_nano(depth=1).at(prior=prior), tmp_path / "m.onnx", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options, sentence",
    [({"num_classes": 0}, "no classifier"), ({"in_chans": 1}, "1 channels; export it with a float")],
)
def test_a_model_without_classes_or_colours_is_refused(tmp_path, options, sentence):
    with pytest.raises(InputError, match=sentence):
        export(make_nano(**options), tmp_path / "m.onnx")


@pytest.fixture(scope="module")
def with_scales(tmp_path_factory):
    """An ONNX file that takes (B, N, 3), of a model whose own placement has scales."""
    model = make_nano(depth=1)
    model.scale, model.tokens = "auto", 5
    path = tmp_path_factory.mktemp("sizes") / "m.onnx"
    return model, path, export(model, path)


@pytest.mark.parametrize("tokens, largest", [(2, 4.0), (16, 2.0), (256, 4.0)])
@torch.no_grad()
def test_a_file_with_sizes_takes_any_scale_and_number_of_tokens(with_scales, tokens, largest):
    model, path, written = with_scales
    pixels, positions = bytes_and_positions(batch=2, size=(32, 41), tokens=tokens)
    placed = with_sizes(positions, largest)
    result = Exported(path)(pixels.numpy(), placed.numpy())["logits"]
    np.testing.assert_allclose(result, model(normalised(model, pixels), placed), atol=2e-5)
    assert "GridSample" not in nodes(path) and 0 < written.difference["logits"] < 1e-4


@torch.no_grad()
def test_a_file_with_sizes_has_the_model_s_own_scale_and_takes_two_columns_too(with_scales):
    model, path, _ = with_scales
    run = Exported(path)
    pixels, positions = bytes_and_positions()
    images = normalised(model, pixels)
    np.testing.assert_allclose(run(pixels.numpy())["logits"], model(images), atol=2e-5)
    assert np.shape(run.about["positions"]) == (5, 3)
    np.testing.assert_allclose(run(pixels.numpy(), positions.numpy())["logits"], model(images, positions), atol=2e-5)


@pytest.mark.parametrize("scale", [0.0, -1.0, 4.1, np.inf])
def test_a_scale_that_no_window_has_is_one_sentence(with_scales, scale):
    pixels, positions = bytes_and_positions()
    placed = torch.cat([positions, torch.full((2, 7, 1), scale)], -1)
    with pytest.raises(InputError, match=r"scales must be above 0 and at most 4|finite"):
        Exported(with_scales[1])(pixels.numpy(), placed.numpy())


def test_a_missing_extra_is_named_with_its_command(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(InputError, match=r"needs onnxscript; pip install 'spot-vit\[export\]'"):
        export(make_nano(), tmp_path / "m.onnx")


def test_the_command_writes_and_says_the_difference(tmp_path, capsys):
    save_folder(make_nano(depth=1), tmp_path / "model")
    out = tmp_path / "m.onnx"
    words = ["--prior", "center", "--tokens", "4", "--scale", "auto", "--features", "pooled"]
    main(["export", str(tmp_path / "model"), "--out", str(out), *words])
    assert "m.onnx" in capsys.readouterr().out
    result = Exported(out)(np.zeros((1, 32, 32, 3), np.uint8))
    assert result["logits"].shape == (1, 10) and result["pooled"].shape == (1, 32)
