"""Models on disk: what is saved comes back, and what cannot be read is named."""

import json
import math
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from safetensors.torch import load_file, save_file

import spot
from spot.errors import InputError
from spot.hashes import hash_model
from spot.models.checkpoints import build, load_authors, model_config, save_model, with_options
from tests.conftest import VIT_TINY, make_nano

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
POSITIONS = torch.rand(2, 5, 2, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"init_values": 0.1, "reg_tokens": 2, "no_embed_class": True},
        {"global_pool": "avg"},
        {"class_token": False, "global_pool": "map"},
    ],
)
def test_save_and_load_round_trips_exactly(options, tmp_path):
    model = make_nano(**options)
    model.tokens, model.prior = 7, "sobol"
    model.save_pretrained(tmp_path / "model")
    for again in (spot.SpotViT.from_pretrained(tmp_path / "model"), spot.load(tmp_path / "model")):
        assert (again.tokens, again.prior, again.name, again.data_config) == (7, "sobol", model.name, model.data_config)
        assert torch.equal(again(IMAGES, POSITIONS), model(IMAGES, POSITIONS))
    assert spot.load(tmp_path / "model", tokens=3, prior="center").tokens == 3
    assert spot.SpotViT.from_pretrained(tmp_path / "model", tokens=4).tokens == 4


def test_a_model_built_by_the_caller_is_saved_if_timm_can_rebuild_it(tmp_path):
    import timm

    vit = timm.create_model("vit_tiny_patch16_224", img_size=(32, 48), depth=12, num_classes=5)
    spot.adapt(vit).save_pretrained(tmp_path)
    assert spot.load(tmp_path).img_size == (32, 48)
    with pytest.raises(InputError, match="timm cannot rebuild"):
        spot.adapt(timm.create_model("vit_tiny_patch16_224", depth=3)).save_pretrained(tmp_path / "other")


def test_weights_are_safetensors_under_timms_names(nano, tmp_path):
    nano.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert set(state) == {f"vit.{name}" for name in nano.vit.state_dict()}
    config = json.loads((tmp_path / "config.json").read_text())["spot_vit"]
    assert config["options"]["embed_dim"] == 32


def test_a_single_file_can_be_half_precision(nano, tmp_path):
    save_model(nano, tmp_path / "nano.safetensors", dtype=torch.float16)
    again = spot.load(tmp_path / "nano.safetensors")
    assert next(again.parameters()).dtype == torch.float32
    torch.testing.assert_close(again(IMAGES, POSITIONS), nano(IMAGES, POSITIONS), atol=0.02, rtol=0.02)


def test_timm_weights_from_a_file_are_the_timm_model(shared_data):
    file = shared_data / "weights" / f"{VIT_TINY}.safetensors"
    model = spot.load(VIT_TINY, weights=file, tokens=25, prior="center")
    state = load_file(file)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.vit.state_dict().items())
    assert (model.tokens, model.prior, model.name) == (25, "center", VIT_TINY)
    assert model.data_config["mean"] == (0.5, 0.5, 0.5)


def test_push_to_hub_sends_weights_settings_and_the_card(monkeypatch, tmp_path):
    def upload_folder(self, *, repo_id, folder_path, **options):
        for path in Path(folder_path).iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())

    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **options: SimpleNamespace(repo_id=repo_id))
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    model = make_nano()
    model.vit.pretrained_cfg |= {"license": "cc-by-4.0", "hf_hub_id": "timm/nano"}
    model.push_to_hub("me/nano")
    assert {path.name for path in tmp_path.iterdir()} >= {"README.md", "config.json", "model.safetensors"}
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.library_name, card.data.license, card.data.base_model) == ("spot-vit", "cc-by-4.0", "timm/nano")
    assert hash_model(model) in card.text and "isotropic with 16 tokens" in card.text


# The authors' checkpoints, against a slow reference written from the description of their geometry


def authors_state(width=64, depth=2, side=4, classes=6, pooled=False):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator) * 0.2

    state = {
        "embedder.emb.weight": random(width, 4 * side**2),
        "embedder.emb.bias": random(width),
        "embedder.cls_token": random(1, 1, width),
        "tokenizer._n_sigma": torch.tensor(0.3),
        "head.weight": random(classes, width),
        "head.bias": random(classes),
    }
    norms = ["fc_norm" if pooled else "norm"]
    for block in (f"blocks.{index}" for index in range(depth)):
        norms += [f"{block}.norm1", f"{block}.norm2"]
        state |= {f"{block}.ls1.lambda_": random(width), f"{block}.ls2.lambda_": random(width)}
        linear = {"att.qkv": (3 * width, width), "att.proj": (width, width), "mlp.L1": (2 * width, width)}
        for name, shape in {**linear, "mlp.L2": (width, 2 * width)}.items():
            state |= {f"{block}.{name}.weight": random(*shape), f"{block}.{name}.bias": random(shape[0])}
    for norm in norms:
        state |= {f"{norm}.weight": 1 + random(width), f"{norm}.bias": random(width)}
    return state


def authors_tokens(state, images, positions, side):
    """Loops over tokens and samples; pixel i is at coordinate i."""
    batch, _, height, width = images.shape
    reach = side / (height + width)
    steps = [-reach + 2 * reach * j / (side - 1) for j in range(side)]
    cells = [j / (side - 1) for j in range(side)]
    sigma = math.log1p(math.exp(float(state["tokenizer._n_sigma"]))) * reach
    features = torch.zeros(batch, positions.shape[1], 4, side, side)
    for b in range(batch):
        for n, (mu_y, mu_x) in enumerate(positions[b].tolist()):
            for i in range(side):
                for j in range(side):
                    y, x = (mu_y + steps[i]) * height, (mu_x + steps[j]) * width
                    y0, y1 = (min(max(math.floor(y) + k, 0), height - 1) for k in (0, 1))
                    x0, x1 = (min(max(math.floor(x) + k, 0), width - 1) for k in (0, 1))
                    features[b, n, :3, i, j] = (
                        images[b, :, y0, x0] * (y1 - y) * (x1 - x)
                        + images[b, :, y0, x1] * (y1 - y) * (x - x0)
                        + images[b, :, y1, x0] * (y - y0) * (x1 - x)
                        + images[b, :, y1, x1] * (y - y0) * (x - x0)
                    )
                    square = (cells[i] - mu_y) ** 2 + (cells[j] - mu_x) ** 2
                    features[b, n, 3, i, j] = math.exp(-square / (2 * sigma**2))
    features[:, :, 3] /= features[:, :, 3].max()
    return features.flatten(2) @ state["embedder.emb.weight"].T + state["embedder.emb.bias"]


def authors_logits(state, images, positions, side, heads, pooled):
    def linear(x, name):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        spread = (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return centred / spread * state[f"{name}.weight"] + state[f"{name}.bias"]

    x = authors_tokens(state, images, positions, side)
    x = torch.cat([state["embedder.cls_token"].expand(len(x), -1, -1), x], 1)
    depth = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
    for i in range(depth):
        q, k, v = linear(norm(x, f"blocks.{i}.norm1"), f"blocks.{i}.att.qkv").chunk(3, -1)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (q, k, v))
        attention = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        mixed = linear((attention @ v).transpose(1, 2).flatten(2), f"blocks.{i}.att.proj")
        x = x + state[f"blocks.{i}.ls1.lambda_"] * mixed
        hidden = linear(norm(x, f"blocks.{i}.norm2"), f"blocks.{i}.mlp.L1")
        hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
        x = x + state[f"blocks.{i}.ls2.lambda_"] * linear(hidden, f"blocks.{i}.mlp.L2")
    return linear(norm(x[:, 1:].mean(1), "fc_norm") if pooled else norm(x, "norm")[:, 0], "head")


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("width, depth, side, wrapped", [(64, 2, 4, False), (128, 3, 5, True)])
@torch.no_grad()
def test_the_authors_checkpoints_give_the_authors_logits(pooled, width, depth, side, wrapped, tmp_path):
    state = authors_state(width, depth, side, pooled=pooled)
    torch.save({"model": state} if wrapped else state, tmp_path / "theirs.pth")
    model = spot.load(tmp_path / "theirs.pth")
    images = torch.randn(2, 3, 20, 24)
    positions = torch.rand(2, 4, 2)
    positions[0, 0] = torch.tensor([0.0, 1.0])  # half outside
    expected = authors_logits(state, images, positions, side, width // 64, pooled)
    torch.testing.assert_close(model(images, positions), expected, atol=1e-4, rtol=1e-4)
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(spot.load(tmp_path / "again")(images, positions), model(images, positions))


def test_the_authors_geometry_under_bfloat16_autocast_is_near_that_in_float32(tmp_path):
    torch.save(authors_state(), tmp_path / "theirs.pth")
    model = load_authors(tmp_path / "theirs.pth")
    images, positions = torch.randn(2, 3, 20, 20), torch.rand(2, 5, 2)
    with torch.no_grad():
        exact = model(images, positions)
        with torch.autocast("cpu", torch.bfloat16):
            coarse = model(images, positions)
    assert coarse.dtype == torch.bfloat16
    assert (coarse.float() - exact).abs().max() < 0.05 * exact.abs().max()


# Bad input


class Dangerous:
    def __reduce__(self):
        return (print, ("this must never run",))


def test_a_pickle_that_is_not_weights_is_refused_without_running(tmp_path, capsys):
    (tmp_path / "bad.pth").write_bytes(pickle.dumps({"weight": Dangerous()}))
    torch.save({"weight": Dangerous()}, tmp_path / "worse.pth")
    for name in ("bad.pth", "worse.pth"):
        with pytest.raises(InputError, match=r"refused|not a readable"):
            spot.load(tmp_path / name)
    assert capsys.readouterr().out == ""


def test_truncated_and_foreign_files_are_named(nano, tmp_path):
    nano.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="cut short"):
        spot.load(tmp_path / "model")
    save_file({"a": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    with pytest.raises(InputError, match="weights="):
        spot.load(tmp_path / "foreign.safetensors")
    for content, sentence in (({"a": torch.zeros(1)}, r"embedder\.emb\.weight"), ([1, 2], "weights by name")):
        torch.save(content, tmp_path / "foreign.pth")
        with pytest.raises(InputError, match=sentence):
            spot.load(tmp_path / "foreign.pth")


def test_weights_of_another_architecture_are_refused(nano, tmp_path):
    nano.save_pretrained(tmp_path)
    state, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    state["vit.head.weight"] = torch.zeros(3, 32)
    save_file(state, tmp_path / "model.safetensors", metadata={"spot_vit": json.dumps(config["spot_vit"])})
    with pytest.raises(InputError, match=r"vit\.head\.weight has shape \(3, 32\), the model needs \(10, 32\)"):
        spot.load(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match="timm cannot build"):
        spot.load("vit_tiny_patch16_224", weights=tmp_path / "a.safetensors")


def test_missing_files_and_unknown_names_are_named(nano, tmp_path):
    with pytest.raises(InputError, match="no file"):
        spot.load(tmp_path / "nothing.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"a SPoT model was expected, but .* is missing"):
        spot.load(tmp_path / "empty")
    with pytest.raises(InputError, match="did you mean 'vit_tiny_patch16_224'"):
        spot.load("vit_tinny_patch16_224")
    with pytest.raises(InputError, match="no file"):
        spot.load("vit_tiny_patch16_224", weights=tmp_path / "nothing.safetensors")
    nano.prior = lambda images, tokens, generator: None
    with pytest.raises(InputError, match="function cannot be saved"):
        nano.save_pretrained(tmp_path / "x")


def test_other_options_keep_the_classes_names_and_the_hash_of_the_weights():
    model = make_nano()
    model.class_names = names = [str(index) for index in range(10)]
    model.weights_hash = "0123"  # by which policies and cascades know a family's weights
    assert with_options(model, {"img_size": 64}).class_names == names
    other = with_options(model, {"num_classes": 4})
    assert other.class_names is None and other.weights_hash == "0123"
    model.reset_classifier(10)
    assert model.class_names == names
    model.reset_classifier(4)
    assert model.class_names is None


def test_random_weights_of_a_hub_model_are_refused_without_a_request(monkeypatch):
    monkeypatch.setattr("timm.models._hub.hf_hub_download", None)
    with pytest.raises(InputError, match="there is no model 'hf-hub:timm/vit_tiny_patch16_224'"):
        spot.load("hf-hub:timm/vit_tiny_patch16_224", pretrained=False)


def test_a_configuration_with_a_model_from_elsewhere_is_refused():
    with pytest.raises(InputError, match="refused"):
        build({**model_config(make_nano()), "model": "local-dir:x"})
