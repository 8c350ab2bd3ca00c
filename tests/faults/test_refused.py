"""What a campaign of faults found: hostile headers, damaged files, wrong types and threads, each as it was found."""

import threading
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import spot
from spot.data.images import Images
from spot.data.loader import Loader, loader
from spot.errors import InputError
from spot.models.checkpoints import model_config
from spot.models.family import save_delta
from spot.placement.oracle import frozen
from spot.placement.priors import PRIORS
from spot.placement.saliency import read_map
from spot.store import disk_errors, write_tensors
from tests.conftest import make_nano
from tests.faults.jobs import to_tensor

IMAGES, POSITIONS = torch.rand(2, 3, 32, 32), torch.rand(2, 5, 2)
LABELS = torch.tensor([0, 1])


def load_with_header(folder: Path, **changes) -> spot.SpotViT:
    """A saved model whose header says something else."""
    model, path = make_nano(), folder / "model.safetensors"
    config = model_config(model)
    for part, values in changes.items():
        config[part] = {**config[part], **values} if isinstance(values, dict) else values
    write_tensors(path, model.state_dict(), "spot_vit", config)
    return spot.load(path)


# Files of strangers


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "local-dir:/tmp"},
        {"model": "hf-hub:someone/model"},
        {"model": "vit_tiny_patch16_224/../x"},
        *(
            {"options": {name: True}}
            for name in ("pretrained", "checkpoint_path", "url", "cache_dir", "pretrained_cfg")
        ),
        *({"data": {name: "x"}} for name in ("url", "file", "hf_hub_id", "state_dict", "custom_load")),
        {"options": {"depth": 10**9}},
        {"options": {"embed_dim": 10**9}},
        {"options": {"num_classes": 10**12}},
        {"options": {"img_size": [10**6, 10**6]}},
        {"options": {"depth": "x"}},
        {"options": {"num_heads": 0}},
        {"data": {"mean": "x"}},
        {"data": {"std": [0, 0, 0]}},
        {"data": {"input_size": [3, 1]}},
        {"data": {"label_names": 5}},
        {"options": 5},
        {"data": None},
        {"model": 7},
        {"tokens": 10**18},
        {"tokens": "x"},
        {"sigma": "x"},
        {"sigma": float("nan")},
        {"class_names": 5},
        {"saliency": 9},
        {"tokenizer": 3},
    ],
    ids=str,
)
def test_a_header_cannot_steer_timm_nor_fill_the_memory(tmp_path, monkeypatch, changes):
    def opened(*_args, **_options):
        raise AssertionError("a header made something open or fetch")

    for name in ("load_checkpoint", "load_pretrained", "load_model_config_from_path", "load_model_config_from_hf"):
        for module in ("timm.models._builder", "timm.models._factory"):
            monkeypatch.setattr(f"{module}.{name}", opened, raising=False)
    with pytest.raises(InputError) as raised:
        load_with_header(tmp_path, **changes)
    assert "\n" not in str(raised.value)


def test_a_header_with_another_mean_is_still_read(tmp_path):
    assert load_with_header(tmp_path, data={"mean": [0.1, 0.2, 0.3]}).data_config["mean"] == (0.1, 0.2, 0.3)


@pytest.mark.parametrize("base", ["local-dir:/tmp/x", "hf-hub:someone/model", "someone/model", "../model"])
def test_a_delta_stands_on_a_timm_name_and_on_nothing_else(tmp_path, base):
    path = tmp_path / "delta.safetensors"
    save_delta(make_nano(1), make_nano().vit.state_dict(), path, base=base)
    with pytest.raises(InputError, match="refused"):
        spot.load(path)


AUTHORS = {
    "embedder.emb.weight": torch.zeros(32, 4 * 64),
    "embedder.emb.bias": torch.zeros(32),
    "blocks.0.mlp.L1.weight": torch.zeros(64, 32),
    "head.weight": torch.zeros(3, 32),
}


@pytest.mark.parametrize(
    "more",
    [
        {"blocks.99999.z": torch.zeros(1)},
        {"blocks.x.z": torch.zeros(1)},
        {"blocks.": torch.zeros(1)},
        {5: torch.zeros(1)},
        {"embedder.emb.weight": torch.zeros(3)},
        {"head.weight": torch.zeros(1, 32).expand(10**9, 32)},  # 128 bytes that claim 128 GB
    ],
    ids=lambda more: str(next(iter(more))),
)
def test_a_pickle_of_weights_that_makes_no_sense_is_one_sentence(tmp_path, more):
    torch.save({**AUTHORS, **more}, tmp_path / "a.pth")
    with pytest.raises(InputError, match=r"a\.pth"):
        spot.load(tmp_path / "a.pth")


def test_a_map_of_a_damaged_image_is_one_sentence(tmp_path):
    for folder in ("maps", "images"):
        (tmp_path / folder).mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "maps" / "a.png")
    (tmp_path / "images" / "a.jpg").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"a\.jpg cannot be read"):
        read_map(tmp_path / "maps", "a.jpg", tmp_path / "images")


# Types and values

WRONG = [None, 5, 2.5, "x", [1], (), {}, IMAGES.numpy(), torch.rand(3), torch.rand(2, 3, 0, 5), IMAGES.long()]
WRONG += [IMAGES > 0.5, IMAGES + 0j, torch.tensor(1.0)]
CALLS = {
    "windows: images": lambda value: spot.windows(value, POSITIONS, 8),
    "windows: positions": lambda value: spot.windows(IMAGES, value, 8),
    "model: images": lambda value: make_nano()(value),
    "place: images": lambda value: make_nano().place(value, prior="uniform", keys=["a", "b"]),
    "search: images": lambda value: spot.search(make_nano(), value, LABELS, POSITIONS),
    "search: positions": lambda value: spot.search(make_nano(), IMAGES, LABELS, value),
    "search: labels": lambda value: spot.search(make_nano(), IMAGES, value, POSITIONS),
    "search: model": lambda value: spot.search(value, IMAGES, LABELS, POSITIONS),
    "placements: positions": lambda value: spot.Placements(["a", "b"], value),
    "placements: keys": lambda value: spot.Placements(value, POSITIONS),
    "load": lambda value: spot.load(value),
    "adapt": lambda value: spot.adapt(value),
    "evaluate: data": lambda value: spot.evaluate(make_nano(), value),
    "sigma": lambda value: spot.SpotViT(make_nano().vit, sigma=value),
    "steps": lambda value: spot.SearchSettings(steps=value),
    "objective": lambda value: spot.SearchSettings(objective=value),
    "mixed_precision": lambda value: spot.SearchSettings(mixed_precision=value),
}
FINE = {("sigma", 5), ("sigma", 2.5), ("steps", 5)}  # as far as the above are right


@pytest.mark.parametrize("call", CALLS)
def test_wrong_types_get_the_sentence_that_wrong_shapes_get(call):
    for value in WRONG:
        if isinstance(value, (int, float)) and (call, value) in FINE:
            continue
        if call == "place: images" and isinstance(value, torch.Tensor) and value.shape == IMAGES.shape:
            continue  # a place depends on the shape alone
        with pytest.raises(InputError):
            CALLS[call](value)


def test_a_budget_has_a_limit():
    for prior in PRIORS.values():
        with pytest.raises(InputError, match="tokens must be a whole number"):
            prior(IMAGES, 99999999999999999999, maps=torch.rand(2, 32, 32))


@pytest.mark.parametrize("name", PRIORS)
def test_priors_need_pixels(name):
    for shape in ((2, 3, 0, 5), (2, 3, 0, 0), (2, 0, 4, 4), (3, 8, 8)):
        with pytest.raises(InputError, match="at least one pixel"):
            PRIORS[name](torch.rand(shape), 4, maps=torch.rand(shape[0], *shape[-2:]))


@pytest.mark.parametrize("name", ["salient", "focus", "background"])
def test_a_mask_of_true_and_false_is_a_map(name):
    mask = torch.rand(2, 32, 32) > 0.5
    places = [PRIORS[name](IMAGES, 9, torch.Generator().manual_seed(0), maps=maps) for maps in (mask, mask.float())]
    assert torch.equal(*places)


def test_empty_placements_come_back_empty(tmp_path):
    spot.Placements([], torch.zeros(0, 4, 2)).save(tmp_path / "p.safetensors")
    assert len(spot.Placements.load(tmp_path / "p.safetensors")) == 0
    for trouble in ((["a\0"], torch.zeros(1, 4, 2)), ([""], torch.zeros(1, 4, 2)), (["a"], torch.zeros(1, 0, 2))):
        with pytest.raises(InputError):
            spot.Placements(*trouble)


def test_images_of_another_type_than_the_weights_are_one_sentence():
    with pytest.raises(InputError, match=r"torch\.float32 weights"):
        make_nano()(IMAGES.half())
    with torch.autocast("cpu", torch.bfloat16):
        assert make_nano()(IMAGES).isfinite().all()


# Threads


def in_threads(work, count: int = 4) -> list:
    results, troubles = [None] * count, []
    together = threading.Barrier(count)

    def run(index: int) -> None:
        try:
            together.wait()
            results[index] = work(index)
        except BaseException as error:
            troubles.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not troubles, troubles
    return results


def test_a_model_in_train_mode_may_be_searched_by_several_threads():
    """Drop path would be heard if one thread's end put the model back into train mode under another."""
    model = make_nano(drop_path_rate=0.9).train()
    expected = spot.search(model, IMAGES, LABELS, POSITIONS).losses
    results = in_threads(lambda index: [spot.search(model, IMAGES, LABELS, POSITIONS, steps=5 + index) for _ in "ab"])
    for losses in (each.losses[:, :6] for twice in results for each in twice):
        torch.testing.assert_close(losses[:, :5], expected[:, :5], rtol=0, atol=0)
    assert model.training
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_last_to_leave_gives_a_model_back():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).train()
    model[0].bias.requires_grad_(False)
    first, second = frozen(model), frozen(model[1], model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not model.training
    assert not model[0].weight.requires_grad
    second.__exit__(None, None, None)
    assert model.training
    assert model[1].training
    assert [each.requires_grad for each in model.parameters()] == [True, False]


def small_loader() -> Loader:
    pictures = [(Image.new("RGB", (32, 32), (9 * index, 99, 30)), index % 10) for index in range(8)]
    data = Images(pictures, [f"{index}.png" for index in range(8)], [str(n) for n in range(10)], transform=to_tensor)
    return loader(data, 4)


@pytest.mark.parametrize("placement", ["isotropic", "tome", "plain"])
def test_features_are_the_same_from_several_threads(placement):
    model = make_nano(global_pool="avg", drop_path_rate=0.5).train()
    settings = [spot.Setting(placement, None if placement == "plain" else 9)]
    expected = spot.evaluate(model, small_loader(), settings, features=True)
    results = in_threads(lambda _: spot.evaluate(model, small_loader(), settings, features=True))
    for result in results:
        torch.testing.assert_close(result.features[0], expected.features[0], rtol=0, atol=0)
        assert torch.equal(result.predictions, expected.predictions)
    assert not model.vit.head._forward_pre_hooks
    logits = expected.features[0] @ model.vit.head.weight.T + model.vit.head.bias
    assert torch.equal(logits.argmax(1), expected.predictions[0])
    assert model.training


def test_a_full_disk_as_torch_says_it_is_one_sentence():
    """Found by the long form with a tmpfs of 8 KiB."""
    with pytest.raises(InputError, match="the disk is full"), disk_errors("c.pt"):
        raise RuntimeError("basic_ios::clear: iostream error")


def test_what_the_first_long_form_found():
    with pytest.raises(InputError, match="positions must have shape"):
        make_nano()(IMAGES, torch.tensor(0.5))
    model = make_nano()
    assert model.place(IMAGES[:0], prior="focus").shape == (0, 16, 2)
    model.saliency = lambda images: torch.stack([image[0] for image in images])  # which refuses no images
    assert model.place(IMAGES[:0], prior="focus").shape == (0, 16, 2)
    with pytest.raises(InputError, match="real numbers"):
        make_nano().place(IMAGES + 0j, prior="background")
