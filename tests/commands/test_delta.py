"""spot delta: from a trained folder to a file that gives the model back on its base, and on no other."""

import pytest
import torch
from safetensors.torch import save_file

import spot
from spot.cli import main
from spot.errors import InputError

NAME = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"


@pytest.fixture
def retrofitted(tmp_path):
    """A real architecture with drawn weights: base file, model moved a little from it, and its folder."""
    torch.manual_seed(0)
    model = spot.adapt(NAME)
    save_file(model.vit.state_dict(), tmp_path / "base.safetensors")
    with torch.no_grad():
        for tensor in model.vit.parameters():
            tensor.add_(0.01 * torch.randn_like(tensor))
    model.tokens, model.prior = 49, "center"
    model.save_pretrained(tmp_path / "model")
    return model


def test_a_delta_and_its_base_give_the_model_back(retrofitted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["delta", "model", "--weights", "base.safetensors"])
    again = spot.load(tmp_path / f"{NAME}+spot.safetensors", weights=tmp_path / "base.safetensors")
    assert (again.tokens, again.prior) == (49, "center")
    for name, tensor in retrofitted.vit.state_dict().items():
        rows = tensor.flatten(1) if tensor.ndim > 1 else tensor[None]
        step = 0.01 * 6 / 127  # int8: half a step of the largest of a row, drawn with deviation 0.01
        assert (again.vit.state_dict()[name].view_as(rows) - rows).abs().max() < step, name
    full, kept = (
        (tmp_path / "model/model.safetensors").stat().st_size,
        len((tmp_path / f"{NAME}+spot.safetensors").read_bytes()),
    )
    assert kept < 0.27 * full
    assert "int8" in capsys.readouterr().out


def test_another_base_is_refused_in_one_sentence(retrofitted, tmp_path):
    main(
        [
            "delta",
            str(tmp_path / "model"),
            "--weights",
            str(tmp_path / "base.safetensors"),
            "--out",
            str(tmp_path / "d.safetensors"),
        ]
    )
    torch.manual_seed(1)
    save_file(spot.adapt(NAME).vit.state_dict(), tmp_path / "other.safetensors")
    with pytest.raises(InputError, match="these weights are others") as refused:
        spot.load(tmp_path / "d.safetensors", weights=tmp_path / "other.safetensors")
    assert "\n" not in str(refused.value)


def test_a_base_of_another_shape_is_refused(nano, tmp_path, capsys):
    nano.save_pretrained(tmp_path / "nano")
    save_file(spot.adapt(NAME).vit.state_dict(), tmp_path / "base.safetensors")
    with pytest.raises(SystemExit) as stopped:
        main(
            [
                "delta",
                str(tmp_path / "nano"),
                "--base",
                NAME,
                "--weights",
                str(tmp_path / "base.safetensors"),
                "--out",
                str(tmp_path / "x"),
            ]
        )
    assert stopped.value.code == 2
    assert "another architecture" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
