import numpy as np
import pytest
import torch
from PIL import Image

from spot.placement.saliency import class_prompt, spectral_residual
from tests.commands.conftest import command


@pytest.fixture
def folder(tmp_path):
    """Two classes of two images, of different sizes."""
    rng = np.random.default_rng(0)
    for name, size in {"a/0.jpg": (40, 50), "a/1.png": (30, 30), "b/2.jpg": (20, 60), "b/3.jpg": (33, 17)}.items():
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)).save(tmp_path / "data" / name)
    return tmp_path / "data"


def test_a_data_set_gets_a_map_of_its_size_for_every_image(folder, tmp_path):
    out = tmp_path / "maps"
    command("saliency", "--data", folder, "--out", out)
    sizes = {file.relative_to(out).as_posix(): Image.open(file).size for file in out.rglob("*.png")}
    assert sizes == {"a/0.png": (50, 40), "a/1.png": (30, 30), "b/2.png": (60, 20), "b/3.png": (17, 33)}
    pixels = np.asarray(Image.open(folder / "a" / "1.png").convert("RGB")).copy()
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255
    kept = torch.from_numpy(np.asarray(Image.open(out / "a" / "1.png")).copy()) / 255
    torch.testing.assert_close(kept, spectral_residual(image)[0], atol=0.5 / 255 + 1e-4, rtol=0)


def test_what_is_there_is_not_made_again(folder, tmp_path, results):
    out = tmp_path / "maps"
    command("saliency", "--data", folder, "--out", out)
    (out / "a" / "0.png").unlink()
    kept = (out / "b" / "3.png").stat().st_mtime_ns
    rows, _ = results("saliency", "--data", folder, "--out", out)
    assert [row["image"] for row in rows] == ["a/0.jpg"]
    assert (out / "a" / "0.png").exists()
    assert (out / "b" / "3.png").stat().st_mtime_ns == kept


def test_single_images_and_a_network(folder, tmp_path, shared_data):
    network = shared_data / "weights" / "u2netp.onnx"
    command("saliency", folder / "a" / "0.jpg", "--method", network, "--out", tmp_path / "maps")
    assert Image.open(tmp_path / "maps" / "0.png").size == (50, 40)


def test_an_unreadable_image_stops_or_is_skipped(folder, tmp_path, refused):
    (folder / "b" / "4.jpg").write_bytes(b"no image")
    assert "4.jpg" in refused("saliency", "--data", folder, "--out", tmp_path / "maps")
    command("saliency", "--data", folder, "--out", tmp_path / "maps", "--skip-unreadable")
    assert len(list((tmp_path / "maps").rglob("*.png"))) == 4


def test_a_prompt_can_be_the_images_class():
    assert class_prompt("val/n02099601/x.jpg") == "golden retriever"
    assert class_prompt("fire_engine/x.jpg") == "fire engine"


def test_bad_input_is_one_sentence(folder, tmp_path, refused):
    out = tmp_path / "maps"
    assert "either images or --data" in refused("saliency", "--out", out)
    assert "did you mean 'spectral'" in refused("saliency", "--data", folder, "--method", "spectrl", "--out", out)
    assert "missing" in refused("saliency", "--data", tmp_path / "nowhere", "--out", out)
    assert not out.exists()
    command("saliency", "--data", folder, "--out", out)
    (out / "saliency.json").write_text('{"method": "u2netp.onnx", "prompt": null}')
    assert "choose another" in refused("saliency", "--data", folder, "--out", out)
    Image.new("RGB", (9, 9)).save(folder / "a" / "0.png")
    assert "would have the same map" in refused("saliency", "--data", folder, "--out", tmp_path / "other")
