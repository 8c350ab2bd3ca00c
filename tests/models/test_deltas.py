import pytest
import torch
from safetensors.torch import save_file

from spot.errors import InputError
from spot.hashes import hash_tensors
from spot.models.family import apply_delta, read_delta, save_delta
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


@pytest.fixture
def delta(base, tmp_path):
    path = tmp_path / "d.safetensors"
    save_delta(trained(), base, path, base="nano.tag", config={"tokens": 4, "prior": "center"})
    return path


def test_base_plus_delta_is_the_trained_model(base, delta):
    model, state = trained(), apply_delta(base, delta)
    for name, tensor in model.vit.state_dict().items():
        # half a step of 1/127 of the row's largest change, which is below 0.05 here
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=2.5e-4)
    assert torch.equal(state["head.weight"], base["head.weight"])
    assert read_delta(delta)[1] == {
        "format": 1, "base": "nano.tag", "hash": hash_tensors(base), "config": {"tokens": 4, "prior": "center"}
    }  # fmt: skip


def test_another_base_is_refused(base, delta):
    other = {**base, "head.bias": base["head.bias"] + 1e-6}
    with pytest.raises(InputError, match=r"delta on nano.tag .*these weights are others"):
        apply_delta(other, delta)
    with pytest.raises(InputError, match=r"another architecture: blocks\.2"):
        save_delta(make_nano(depth=3), base, delta.with_name("e.safetensors"), base="nano")
    assert not delta.with_name("e.safetensors").exists()


def test_other_and_damaged_files_are_refused(base, delta):
    content = delta.read_bytes()
    delta.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InputError, match="checksum"):
        apply_delta(base, delta)
    delta.write_bytes(content[:500])
    with pytest.raises(InputError, match="cut short"):
        read_delta(delta)
    save_file(base, delta)
    with pytest.raises(InputError, match="not a delta"):
        apply_delta(base, delta)
    for header in ('{"format": 1}', '{"format": 1, "base": 3, "hash": "x", "config": {}}', '{"format": 2}', "[]"):
        save_file({"x": torch.ones(1)}, delta, metadata={"spot_delta": header})
        with pytest.raises(InputError, match=r"d\.safetensors is .*(damaged|format 2)"):
            read_delta(delta)
