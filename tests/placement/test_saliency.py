import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from spot.data.picture import evaluation_transform
from spot.errors import InputError
from spot.placement.saliency import (
    ABOUT,
    ClipSeg,
    OnnxSaliency,
    map_macs,
    method_and_prompt,
    open_saliency,
    read_map,
    record_method,
    resolve_saliency,
    rgb,
    spectral_residual,
)

HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "input_size": (3, 32, 32)}
MODEL = SimpleNamespace(data_config=HALF, transform=lambda: evaluation_transform(HALF))


def odd_one_out(height=60, width=90, at=(40, 20), side=8):
    """Stripes everywhere, but for one small checked square with its centre at (y, x)."""
    image = torch.zeros(3, height, width)
    image[:, :, ::6] = image[:, :, 1::6] = image[:, :, 2::6] = 0.5
    y, x = (centre - side // 2 for centre in at)
    image[:, y : y + side, x : x + side] = (torch.arange(side)[:, None] + torch.arange(side)) % 2
    return image[None]


def centroid(maps):
    """The mean (y, x) of the salient pixels, those above a half."""
    return (maps[0] > 0.5).nonzero().float().mean(0)


# Spectral residual


@pytest.mark.parametrize("at", [(40, 20), (15, 70), (30, 45)])
def test_the_odd_one_out_stands_out(at):
    maps = spectral_residual(odd_one_out(at=at))
    assert maps.shape == (1, 60, 90)
    torch.testing.assert_close(centroid(maps), torch.tensor(at).float(), atol=5, rtol=0)


def test_maps_of_images_do_not_depend_on_each_other_and_span_zero_to_one_unless_they_are_constant():
    images = torch.cat([odd_one_out(at=(40, 20)), odd_one_out(at=(15, 70))])
    maps = spectral_residual(images)
    torch.testing.assert_close(maps[1:], spectral_residual(images[1:]), atol=1e-5, rtol=1e-4)
    assert maps.amin((1, 2)).tolist() == [0, 0]
    assert maps.amax((1, 2)).tolist() == [1, 1]
    assert (spectral_residual(torch.full((1, 3, 40, 50), 0.3)) == 1).all()


@pytest.mark.parametrize("shape", [(1, 1), (3, 200), (200, 3), (64, 64), (65, 33)])
def test_any_size_has_a_map(shape):
    image = torch.rand(1, 3, *shape, generator=torch.Generator().manual_seed(0))
    maps = spectral_residual(image)
    assert maps.shape == (1, *shape) and maps.min() >= 0 and maps.max() == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(spectral_residual(image), maps)


# Networks


def test_u2net_finds_an_object_of_known_outline(shared_data):
    """A red disc on grey: the real network's map covers it and not the rest."""
    network = OnnxSaliency(shared_data / "weights" / "u2netp.onnx")
    image = torch.full((1, 3, 120, 160), 0.55)
    y, x = torch.meshgrid(torch.arange(120.0), torch.arange(160.0), indexing="ij")
    disc = ((y - 60) ** 2 + (x - 100) ** 2).sqrt() < 30
    image[:, 0][disc[None]], image[:, 1][disc[None]], image[:, 2][disc[None]] = 0.9, 0.2, 0.1
    found, wanted = network(torch.cat([image, image.flip(-1)])) > 0.5, torch.stack([disc, disc.flip(-1)])
    overlap = (found & wanted).sum((1, 2)) / (found | wanted).sum((1, 2))
    assert (overlap > 0.8).all()


@pytest.fixture(scope="module")
def tiny_clipseg(tmp_path_factory):
    """A random CLIPSeg of eight-wide layers with a tokenizer of letters, saved as from_pretrained reads it."""
    import transformers

    folder = tmp_path_factory.mktemp("clipseg")
    letters = [*"abcdefghijklmnopqrstuvwxyz"]
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = transformers.CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer.save_pretrained(folder)
    layer = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.CLIPSegConfig(
        text_config={**layer, "vocab_size": len(words), "max_position_embeddings": 77, "eos_token_id": len(words) - 1},
        vision_config={**layer, "image_size": 32, "patch_size": 8},
        projection_dim=8,
        reduce_dim=8,
        extract_layers=[0, 1],
        decoder_num_attention_heads=2,
        decoder_intermediate_size=16,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.CLIPSegForImageSegmentation(config)
        for parameter in model.parameters():
            parameter.data.add_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(folder)
    return folder


def test_clipseg_reads_as_transformers_does(tiny_clipseg):
    """The map is the sigmoid of transformers' own logits for the same pixels and prompt, rescaled."""
    import transformers

    network = ClipSeg("dog", tiny_clipseg, side=64)
    image, other = torch.rand(2, 1, 3, 64, 64, generator=torch.Generator().manual_seed(0))  # of the network's size
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_clipseg)
    model = transformers.CLIPSegForImageSegmentation.from_pretrained(tiny_clipseg).eval()
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None]
    pixels = (image[0] - mean) / std
    with torch.no_grad():
        logits = model(pixel_values=pixels[None], **tokenizer("dog", return_tensors="pt")).logits.reshape(64, 64)
    chances = logits.sigmoid()
    expected = (chances - chances.min()) / (chances.max() - chances.min())
    torch.testing.assert_close(network(image)[0], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(network(torch.cat([other, image]))[1], expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(network(image, "a cat")[0], expected, atol=1e-3)


# Masks and maps on disk


def test_maps_on_disk_are_found_by_name_and_cropped_as_their_image(tmp_path):
    """A photograph and its map show the same: what the model sees of both must coincide."""
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 255, (60, 100), dtype=np.uint8)
    for file in ("images/class/a.bmp", "maps/class/a.png"):
        (tmp_path / file).parent.mkdir(parents=True)
        Image.fromarray(picture).save(tmp_path / file)
    image = MODEL.transform()(Image.open(tmp_path / "images/class/a.bmp").convert("RGB"))[None]
    maps = resolve_saliency(tmp_path / "maps", MODEL, tmp_path / "images")(image, ["class/a.bmp"])
    torch.testing.assert_close(maps[0], image[0, 0] * 0.5 + 0.5, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "trouble, message",
    [
        ("missing", "no saliency map for image 'a.jpg'"),
        ("size", r"is 40 × 40, but its image is 50 × 40 \(width × height\)"),
        ("zero", "map of image 'a.jpg' is zero everywhere"),
        ("broken", "cannot be read"),
    ],
)
def test_a_bad_map_on_disk_is_named(tmp_path, trouble, message):
    Image.new("RGB", (50, 40)).save(tmp_path / "a.jpg")
    (tmp_path / "maps").mkdir()
    file = tmp_path / "maps" / "a.png"
    if trouble != "missing":
        size = (40, 40) if trouble == "size" else (50, 40)
        Image.new("L", size, 0 if trouble == "zero" else 100).save(file)
    if trouble == "broken":
        file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(InputError, match=message):
        resolve_saliency(tmp_path / "maps", MODEL, tmp_path)(torch.zeros(1, 3, 32, 32), ["a.jpg"])


# What models see


def test_a_saliency_is_shown_the_original_colours():
    config = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    original = torch.rand(2, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(config[name])[:, None, None] for name in ("mean", "std"))
    normalised = (original - mean) / std
    torch.testing.assert_close(rgb(normalised, config), original)
    red = resolve_saliency(lambda images: images[:, 0], SimpleNamespace(data_config=config))
    torch.testing.assert_close(red(normalised), original[:, 0])


# Bad input


@pytest.mark.parametrize(
    "maps, message",
    [
        (torch.ones(1, 8, 9), r"the images' size \(1, 8, 8\), got \(1, 8, 9\)"),
        (torch.full((1, 8, 8), 1.5), r"leaves \[0, 1\]"),
        (torch.full((1, 8, 8), torch.nan), r"leaves \[0, 1\]"),
    ],
)
def test_bad_maps_are_refused(maps, message):
    with pytest.raises(InputError, match=message):
        resolve_saliency(maps, MODEL)(torch.zeros(1, 3, 8, 8))


def test_bad_images_and_names_are_refused(tmp_path):
    with pytest.raises(InputError, match="RGB images"):
        spectral_residual(torch.zeros(1, 1, 8, 8))
    with pytest.raises(InputError, match="use resolve_saliency"):
        spectral_residual(torch.full((1, 3, 8, 8), -1.0))
    with pytest.raises(InputError, match="did you mean 'spectral'"):
        open_saliency("spectra")
    with pytest.raises(InputError, match="an ONNX model was expected"):
        open_saliency(tmp_path / "u2net.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"not a model")
    with pytest.raises(InputError, match=r"bad\.onnx is not an ONNX model"):
        open_saliency(tmp_path / "bad.onnx")
    with pytest.raises(InputError, match="could not be loaded"):
        ClipSeg(checkpoint=tmp_path / "nowhere")


# The cost of a map


def small_graph(path):
    """Conv 3 → 8, 3 × 3, stride 2, on 32 × 32; a depthwise conv; a product with 8 × 5."""
    onnx = pytest.importorskip("onnx")
    make, kind = onnx.helper, onnx.TensorProto.FLOAT
    shapes = {"w": (8, 3, 3, 3), "d": (8, 1, 3, 3), "m": (16, 5)}
    weights = [make.make_tensor(name, kind, dims, [0.0] * math.prod(dims)) for name, dims in shapes.items()]
    nodes = [
        make.make_node("Conv", ["x", "w"], ["a"], strides=[2, 2], pads=[1, 1, 1, 1]),
        make.make_node("Conv", ["a", "d"], ["b"], group=8, pads=[1, 1, 1, 1]),
        make.make_node("MatMul", ["b", "m"], ["y"]),
    ]
    entry = make.make_tensor_value_info("x", kind, ["batch", 3, 32, 32])
    graph = make.make_graph(nodes, "small", [entry], [make.make_tensor_value_info("y", kind, None)], weights)
    onnx.save(make.make_model(graph), str(path))


def test_multiply_adds_of_a_graph_are_those_counted_by_hand(tmp_path):
    small_graph(tmp_path / "small.onnx")
    by_hand = 16 * 16 * 8 * 3 * 9 + 16 * 16 * 8 * 9 + 8 * 16 * 16 * 5
    assert map_macs(tmp_path / "small.onnx") == by_hand


def test_a_folder_of_maps_remembers_what_one_cost(tmp_path):
    assert map_macs("clipseg") is None and map_macs(tmp_path) is None
    record_method(tmp_path, "spectral")
    assert map_macs(tmp_path) == map_macs("spectral") < 2_000_000  # a thousandth of a ViT-Ti
    record_method(tmp_path, "spectral")  # more maps of the same kind
    assert method_and_prompt("clipseg:class") == {"method": "clipseg", "prompt": "class"}
    assert method_and_prompt("nets/u2netp.onnx") == {"method": "u2netp.onnx", "prompt": None}
    (tmp_path / ABOUT).write_text(json.dumps({"method": "spectral", "prompt": None}))  # as older versions wrote it
    assert map_macs(tmp_path) is None
    record_method(tmp_path, "spectral")
    assert map_macs(tmp_path) == map_macs("spectral")


def test_a_map_of_a_rotated_photograph_has_its_upright_size(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (8, 6)).save(tmp_path / "a.jpg", exif=exif)
    (tmp_path / "maps").mkdir()
    Image.new("L", (6, 8)).save(tmp_path / "maps" / "a.png")
    assert read_map(tmp_path / "maps", "a.jpg", tmp_path).size == (6, 8)


def test_an_empty_batch_needs_no_map():
    def fails(images):
        raise AssertionError

    assert resolve_saliency(fails, MODEL)(torch.zeros(0, 3, 8, 8)).shape == (0, 8, 8)
