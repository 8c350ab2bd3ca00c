import pytest
import torch

from spot.errors import InputError
from spot.hashes import hash_tensors
from spot.models.deltas import apply_delta, read_delta, save_delta
from tests.conftest import make_nano


@pytest.fixture
def base():
    return {name: tensor.clone() for name, tensor in make_nano().vit.state_dict().items()}


def trained(size: float = 0.01):
    """The nano model, moved everywhere except in its head."""
    model = make_nano()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.vit.named_parameters():
            if not name.startswith("head"):
                parameter.add_(size * torch.randn(parameter.shape, generator=draw))
    return model


def test_base_plus_delta_is_the_trained_model(base, tmp_path):
    model = trained()
    save_delta(model, base, tmp_path / "d.safetensors", base="nano")
    state = apply_delta(base, tmp_path / "d.safetensors")
    for name, tensor in model.vit.state_dict().items():
        # half a step of 1/127 of the row's largest change, which is below 0.05 here
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=2.5e-4)
    assert torch.equal(state["head.weight"], base["head.weight"])
    again = make_nano(seed=5)
    again.vit.load_state_dict(state)


def test_int8_takes_a_quarter_of_float32(base, tmp_path):
    save_delta(trained(), base, tmp_path / "d.safetensors", base="nano")
    full = sum(4 * tensor.numel() for tensor in base.values())
    assert (tmp_path / "d.safetensors").stat().st_size < 0.4 * full  # a nano's scales and vectors weigh more


def test_a_delta_says_what_it_stands_on(base, tmp_path):
    save_delta(trained(), base, tmp_path / "d.safetensors", base="nano.tag", config={"tokens": 4, "prior": "center"})
    _, about = read_delta(tmp_path / "d.safetensors")
    assert about["base"] == "nano.tag"
    assert about["config"] == {"tokens": 4, "prior": "center"}
    assert about["hash"] == hash_tensors(base)


def test_another_base_is_refused(base, tmp_path):
    save_delta(trained(), base, tmp_path / "d.safetensors", base="nano.tag")
    other = {**base, "head.bias": base["head.bias"] + 1e-6}
    with pytest.raises(InputError, match=r"delta on nano.tag .*these weights are others"):
        apply_delta(other, tmp_path / "d.safetensors")
    with pytest.raises(InputError, match=r"another architecture: blocks\.2"):
        save_delta(make_nano(depth=3), base, tmp_path / "e.safetensors", base="nano")
    assert not (tmp_path / "e.safetensors").exists()


def test_what_is_no_delta_is_refused(base, tmp_path):
    from safetensors.torch import save_file

    save_file(base, tmp_path / "weights.safetensors")
    with pytest.raises(InputError, match="not a delta"):
        apply_delta(base, tmp_path / "weights.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "weights.safetensors").read_bytes()[:500])
    with pytest.raises(InputError, match="cut short"):
        read_delta(tmp_path / "cut.safetensors")


def test_a_delta_that_was_changed_is_refused(base, tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "d.safetensors"
    save_delta(trained(), base, path, base="nano")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InputError, match="checksum"):
        apply_delta(base, path)
    for header in ('{"format": 1}', '{"format": 1, "base": 3, "hash": "x", "config": {}}', '{"format": 2}', "[]"):
        save_file({"x": torch.ones(1)}, path, metadata={"spot_delta": header})
        with pytest.raises(InputError, match=r"d\.safetensors is .*(damaged|format 2)"):
            read_delta(path)
