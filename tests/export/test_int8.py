"""Eight bits: equalising changes nothing, ranges cover all budgets, and layers that cannot be quantised are left."""

import copy

import numpy as np
import onnx
import pytest
import torch

from spot.cli import main
from spot.errors import InputError
from spot.export import int8
from spot.export.files import export
from spot.export.runtime import Exported
from spot.export.verify import sample_pictures
from spot.models.checkpoints import save_folder
from tests.conftest import make_nano
from tests.export.test_graph import bytes_and_positions, normalised, random_model, with_sizes


def images(count=12, size=32):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def with_outlier():
    """A model with one layer whose input is far larger for one channel than for the others."""
    model = make_nano()
    with torch.no_grad():
        model.vit.blocks[1].mlp.fc1.bias[3] = 3000.0  # passes GELU as it is
        model.vit.blocks[1].mlp.fc2.weight[:, 3] = 0.001
    return model


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"init_values": 0.1}, {"qkv_bias": False}, {"qk_norm": True}])
def test_equalising_changes_nothing_but_the_sizes_of_channels(options):
    model = make_nano(**options)
    trials = int8.trials(model, images())
    before, expected = int8.largest_inputs(model, trials), model(*trials[3])
    int8.equalise(model, trials)
    torch.testing.assert_close(model(*trials[3]), expected, atol=2e-5, rtol=1e-4)
    after = int8.largest_inputs(model, trials)
    for name in ("vit.blocks.0.attn.qkv", "vit.blocks.1.mlp.fc1", "vit.blocks.0.attn.proj"):
        spread = [sizes[name].log().std() for sizes in (before, after)]
        assert spread[1] < spread[0]


def test_calibration_sees_every_budget_both_even_and_at_random():
    model = make_nano()
    trials = int8.trials(model, images())
    assert {positions.shape[1] for _, positions in trials} == {9, 16, 25, 49, 100, 196}
    assert len(trials) == 12
    first = int8.trials(model, images())[1][1]
    assert torch.equal(first, trials[1][1])


def test_ranges_hold_zero_and_the_extremes():
    model = make_nano()
    trials = int8.trials(model, images())
    seen = []
    hook = model.vit.blocks[0].mlp.fc2.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    low, high = int8.input_ranges(model, trials)["vit.blocks.0.mlp.fc2"]
    hook.remove()
    assert low == pytest.approx(min(float(x.min()) for x in seen))
    assert high == pytest.approx(max(float(x.max()) for x in seen))
    scale, zero = int8.input_scale(low, high)
    assert (0 - zero) * scale == pytest.approx(low, abs=scale)
    assert (255 - zero) * scale == pytest.approx(high, abs=scale)


def test_the_layer_that_eight_bits_would_spoil_is_found():
    model = with_outlier()
    _, left = int8.plan(model, images())
    assert next(iter(left)) == "vit.blocks.1.mlp.fc2"
    assert left["vit.blocks.1.mlp.fc2"] > 4 * int8.LIMIT
    assert len(left) < 4  # of 8


@torch.no_grad()
def test_what_is_quantised_changes_the_output_by_no_more_than_the_limit():
    model = make_nano()
    ranges, left = int8.plan(model, images())
    trials = [(part[:4], positions[:4]) for part, positions in int8.trials(model, images())[2:8]]
    expected = int8.outcomes(model, trials)
    with int8.rounded(model, ranges):
        change = (int8.outcomes(model, trials) - expected).norm() / (expected - expected.mean(1, keepdim=True)).norm()
    assert 0 < change <= int8.LIMIT
    assert len(ranges) + len(left) == 8


def test_measuring_layers_leaves_the_model_as_it_was():
    model = make_nano()
    before = copy.deepcopy(model.state_dict())
    trials = int8.trials(model, images())
    int8.unfit(model, int8.input_ranges(model, trials), trials[:2])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@torch.no_grad()
def test_an_int8_file_is_close_to_the_model_and_keeps_unfit_layers_in_float(tmp_path):
    model = with_outlier()
    pictures = sample_pictures(model, count=16)
    written = export(model, tmp_path / "m.onnx", int8=pictures[::2], pictures=pictures[1::2])
    file = onnx.load(tmp_path / "m.onnx")
    weights = {each.name: each.data_type for each in file.graph.initializer}
    quantised = {name: kind for name, kind in weights.items() if name.endswith("weight8")}
    assert len(quantised) == written.about["int8"]["layers"] > 4
    assert set(quantised.values()) == {onnx.TensorProto.INT8}
    assert weights["model.vit.blocks.1.mlp.fc2.weight"] == onnx.TensorProto.FLOAT
    assert not any(f"model.{name.removesuffix('8')}" in weights for name in quantised)  # replaced, not kept beside
    assert written.agreement is not None and "vit.blocks.1.mlp.fc2" in written.summary
    run = Exported(tmp_path / "m.onnx")
    for tokens in (4, 25, 200):
        pixels, positions = bytes_and_positions(batch=16, tokens=tokens)
        expected = model(normalised(model, pixels), positions)
        error = np.linalg.norm(run(pixels.numpy(), positions.numpy())["logits"] - expected.numpy())
        assert error < 0.1 * float((expected - expected.mean(1, keepdim=True)).norm())
    assert run.about["int8"]["images"] == 8


@torch.no_grad()
def test_an_int8_file_of_a_model_with_sizes_reads_windows_of_every_size(tmp_path):
    """Its branches have constants of their own, which must outlive the weights that eight bits replace."""
    model = make_nano()
    model.scale = "auto"
    pictures = sample_pictures(model, count=16)
    export(model, tmp_path / "m.onnx", int8=pictures[:8], pictures=pictures[8:])
    pixels, positions = bytes_and_positions()
    for largest in (1.0, 2.0, 4.0):
        placed = with_sizes(positions, largest)
        expected = model(normalised(model, pixels), placed)
        error = (
            torch.from_numpy(Exported(tmp_path / "m.onnx")(pixels.numpy(), placed.numpy())["logits"]) - expected
        ).std()
        assert error < 0.2 * expected.std()


def test_what_cannot_be_had_is_one_sentence(tmp_path, capsys):
    model = make_nano()
    with pytest.raises(InputError, match="at least 8 images, got 0"):
        export(model, tmp_path / "m.onnx", int8=[])
    with pytest.raises(InputError, match="int8 is for ONNX files"):
        export(model, tmp_path / "m.pt2", to="torch", int8=[])
    rotary = random_model("vit_small_patch16_rope_mixed_224")
    with pytest.raises(InputError, match="needs timm's standard blocks"):
        export(rotary, tmp_path / "m.onnx", int8=sample_pictures(rotary))
    save_folder(model, tmp_path / "model")
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "model"), "--out", str(tmp_path / "m.onnx"), "--int8"])
    assert "--calibrate FOLDER go together" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
