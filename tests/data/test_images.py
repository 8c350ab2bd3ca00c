"""Images as a person sees them, labels as the model counts them, and no image lost in silence."""

import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import ImageNetInfo, resolve_model_data_config

from spot.data.images import (
    Stream,
    class_folders,
    class_indices,
    class_names,
    evaluation_transform,
    loader,
    open_data,
    open_image,
)
from spot.errors import InputError

WNIDS = ImageNetInfo().label_names()
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def plain(image: Image.Image) -> torch.Tensor:
    """A transform that keeps only the mean colour, so that images of any size can share a batch."""
    return torch.tensor(np.asarray(image).mean((0, 1)), dtype=torch.float32)[:, None, None]


def picture(path: Path, colour=RED, size=(8, 6)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def folders(root: Path, *names: str, images: int = 1) -> Path:
    for name in names:
        for index in range(images):
            picture(root / name / f"{index}.png")
    return root


def cut_short(path: Path) -> Path:
    """A JPEG of which the second half is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path, format="JPEG")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


# One image ------------------------------------------------------------------------------


def test_an_exif_rotated_image_stands_upright(tmp_path):
    lying = Image.new("RGB", (20, 10), BLUE)
    lying.paste(RED, (0, 0, 10, 10))  # the left half is red
    exif = Image.Exif()
    exif[0x0112] = 6  # "rotate by 90 degrees clockwise to show"
    lying.save(tmp_path / "a.png", exif=exif)
    image = open_image(tmp_path / "a.png")
    assert image.size == (10, 20)
    assert image.getpixel((5, 2)) == RED  # left has become the top
    assert image.getpixel((5, 17)) == BLUE


def test_a_damaged_exif_block_does_not_spoil_the_image(tmp_path, recwarn):
    Image.new("RGB", (8, 6), RED).save(tmp_path / "a.jpg", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff")
    assert open_image(tmp_path / "a.jpg").size == (8, 6)
    assert not recwarn.list


def test_sixteen_bits_are_scaled_and_not_clipped(tmp_path):
    values = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "a.png")
    assert np.asarray(open_image(tmp_path / "a.png"))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_sixteen_bits_in_colour_too(tmp_path):
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)  # 1 × 1 pixel, RGB of 16 bits each
    pixel = zlib.compress(b"\0" + struct.pack(">HHH", 65535, 32896, 0))
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixel) + chunk(b"IEND", b"")
    (tmp_path / "a.png").write_bytes(file)
    assert open_image(tmp_path / "a.png").getpixel((0, 0)) == (255, 128, 0)


def test_a_sixteen_bit_tiff_is_read_too(tmp_path):
    Image.fromarray(np.full((3, 2), 65535 // 5, dtype=np.uint16)).save(tmp_path / "a.tif")
    image = open_image(tmp_path / "a.tif")
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (2, 3), (51, 51, 51))


def test_floating_point_pixels_from_zero_to_one_are_brightness(tmp_path):
    Image.fromarray(np.array([[0.0, 0.2, 1.0]], dtype=np.float32)).save(tmp_path / "a.tif")
    assert np.asarray(open_image(tmp_path / "a.tif"))[0, :, 1].tolist() == [0, 51, 255]


def test_floating_point_pixels_without_a_scale_are_refused(tmp_path):
    Image.fromarray(np.array([[-3.0, 2.0]], dtype=np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(InputError, match=r"a\.tif has pixels from -3 to 2"):
        open_image(tmp_path / "a.tif")


def test_cmyk_is_shown_in_its_colours(tmp_path):
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "a.jpg", quality=100)  # magenta + yellow ink: red
    red, green, blue = open_image(tmp_path / "a.jpg").getpixel((4, 4))
    assert (red > 240, green < 15, blue < 15) == (True, True, True)


def test_a_palette_image_is_shown_in_its_colours(tmp_path):
    image = Image.new("P", (4, 4), 1)
    image.putpalette([*RED, *GREEN])
    image.save(tmp_path / "a.png")
    assert open_image(tmp_path / "a.png").getpixel((0, 0)) == GREEN


@pytest.mark.parametrize("mode, hidden", [("RGBA", (255, 0, 0, 0)), ("LA", (0, 0))])
def test_what_is_transparent_is_white_whatever_colour_hides_there(tmp_path, mode, hidden):
    Image.new(mode, (4, 4), hidden).save(tmp_path / "a.png")
    assert open_image(tmp_path / "a.png").getpixel((0, 0)) == (255, 255, 255)


def test_a_transparent_palette_entry_is_white(tmp_path):
    image = Image.new("P", (4, 4), 1)
    image.putpalette([*RED, *GREEN])
    image.save(tmp_path / "a.gif", transparency=1)
    assert open_image(tmp_path / "a.gif").getpixel((0, 0)) == (255, 255, 255)


def test_of_an_animation_the_first_frame_is_taken(tmp_path):
    frames = [Image.new("RGB", (4, 4), colour) for colour in (GREEN, RED, BLUE)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert open_image(tmp_path / "a.gif").getpixel((0, 0)) == GREEN


@pytest.mark.parametrize("mode", ["1", "L"])
def test_grey_and_black_and_white_become_rgb(tmp_path, mode):
    Image.new(mode, (4, 4), 255).save(tmp_path / "a.png")
    assert open_image(tmp_path / "a.png").getpixel((0, 0)) == (255, 255, 255)


def test_a_truncated_jpeg_is_named(tmp_path):
    with pytest.raises(InputError, match=r"a\.jpg cannot be read: .*truncated"):
        open_image(cut_short(tmp_path / "a.jpg"))


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89PNG\r\n\x1a\n" + b"\0" * 40], ids=["empty", "text", "broken"])
def test_a_file_that_is_no_image_is_named(tmp_path, content):
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(InputError, match=r"a\.png (is not an image|cannot be read)"):
        open_image(tmp_path / "a.png")


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.png is missing"):
        open_image(tmp_path / "nowhere.png")
    with pytest.raises(InputError, match="is a folder"):
        open_image(tmp_path)


def test_an_image_too_large_for_memory_is_refused_before_it_is_decoded(tmp_path):
    header = b"IHDR" + struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT")
    with pytest.raises(InputError, match="too large"):
        open_image(tmp_path / "a.png")


# The evaluation transform ------------------------------------------------------------------

CONFIG = {"input_size": (3, 224, 224), "mean": (0.5, 0.25, 0.75), "std": (0.5, 0.25, 0.1)}


@pytest.mark.parametrize("size", [(500, 375), (300, 640), (256, 256), (100, 90)])
def test_the_transform_is_bicubic_256_then_centre_224_then_the_models_statistics(size):
    pixels = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    # The same by hand, with Pillow and numpy alone.
    width, height = size
    short = min(size)
    resized = image.resize((int(width * 256 / short), int(height * 256 / short)), Image.Resampling.BICUBIC)
    left, top = round((resized.width - 224) / 2), round((resized.height - 224) / 2)
    crop = np.asarray(resized.crop((left, top, left + 224, top + 224))) / 255
    expected = (crop - CONFIG["mean"]) / CONFIG["std"]
    got = evaluation_transform(CONFIG)(image)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.permute(1, 2, 0).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("size", [(1, 1), (20000, 1), (1, 20000), (20000, 40), (3, 500)])
def test_every_size_of_image_becomes_the_models_size(size):
    assert evaluation_transform(CONFIG)(Image.new("RGB", size, GREEN)).shape == (3, 224, 224)


def test_of_an_endless_image_the_middle_is_seen():
    image = Image.new("RGB", (20000, 4), RED)
    image.paste(BLUE, (9990, 0, 10010, 4))
    seen = evaluation_transform({**CONFIG, "mean": (0, 0, 0), "std": (1, 1, 1)})(image)
    torch.testing.assert_close(seen[:, 112, 112], torch.tensor([0.0, 0.0, 1.0]))


def test_a_model_may_see_images_of_another_size_or_shape():
    image = Image.new("RGB", (640, 480), RED)
    assert evaluation_transform(CONFIG, 96)(image).shape == (3, 96, 96)
    assert evaluation_transform(CONFIG, (96, 160))(image).shape == (3, 96, 160)


def test_a_wide_crop_is_bicubic_as_well():
    pixels = np.random.default_rng(2).integers(0, 256, (60, 160, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    # 56 × 112 is cut from 64 × 128: of 60 × 160 the height binds, 160 becomes 170.67.
    crop = image.resize((171, 64), Image.Resampling.BICUBIC).crop((30, 4, 142, 60))
    seen = evaluation_transform({**CONFIG, "mean": (0, 0, 0), "std": (1, 1, 1)}, (56, 112))(image)
    np.testing.assert_allclose(seen.permute(1, 2, 0).numpy(), np.asarray(crop) / 255, atol=1e-5)


def test_a_real_model_gives_its_own_mean_and_std():
    config = resolve_model_data_config(timm.create_model("vit_tiny_patch16_224"))
    grey = evaluation_transform(config)(Image.new("RGB", (300, 300), (255, 255, 255)))
    torch.testing.assert_close(grey, torch.ones(3, 224, 224))  # (1 − 0.5) / 0.5


# Folders --------------------------------------------------------------------------------------


def test_sorted_class_folders_are_counted_from_zero(tmp_path):
    data = open_data(folders(tmp_path, "dog", "ant", "cat", images=2), transform=plain)
    assert data.classes == ["ant", "cat", "dog"]
    assert [(label, key) for _, label, key in data][:3] == [
        (0, "ant/0.png"),
        (0, "ant/1.png"),
        (1, "cat/0.png"),
    ]
    assert len(data) == 6


def test_some_wnids_get_the_models_index_and_not_their_place_in_the_folder(tmp_path):
    data = open_data(folders(tmp_path, WNIDS[7], WNIDS[999]), transform=plain, classes=WNIDS)
    assert [label for _, label, _ in data] == [7, 999]
    assert data.classes == WNIDS


def test_a_class_folder_the_model_does_not_know_is_refused(tmp_path):
    with pytest.raises(InputError, match="no class 'unicorn'"):
        open_data(folders(tmp_path, WNIDS[0], "unicorn"), transform=plain, classes=WNIDS)


def test_folders_named_by_number_are_indices_in_numeric_order(tmp_path):
    data = open_data(folders(tmp_path, "10", "9"), transform=plain, classes=WNIDS)
    assert {key: label for _, label, key in data} == {"10/0.png": 10, "9/0.png": 9}


def test_unnamed_classes_need_one_folder_each(tmp_path):
    assert class_indices(["a", "b"], 2) == {"a": 0, "b": 1}
    with pytest.raises(InputError, match="10 unnamed classes, the data 2 class folders"):
        open_data(folders(tmp_path, "a", "b"), transform=plain, classes=10)


def test_a_flat_folder_has_no_labels(tmp_path):
    for name in ("b.png", "a.jpg"):
        picture(tmp_path / name)
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / "._a.jpg").write_text("macOS")
    assert [(label, key) for _, label, key in open_data(tmp_path, transform=plain)] == [
        (-1, "a.jpg"),
        (-1, "b.png"),
    ]


def test_images_beside_class_folders_are_not_left_out_in_silence(tmp_path):
    picture(folders(tmp_path, "ant", "cat") / "stray.png")
    with pytest.raises(InputError, match=r"images beside folders, such as stray\.png"):
        open_data(tmp_path, transform=plain)


def test_imagenet_with_train_and_val_gives_the_split_asked_for(tmp_path):
    folders(tmp_path / "val", WNIDS[3])
    folders(tmp_path / "train", WNIDS[3], WNIDS[4])
    options = {"transform": plain, "classes": WNIDS}
    assert [key for _, _, key in open_data(tmp_path, **options)] == [f"val/{WNIDS[3]}/0.png"]
    assert [label for _, label, _ in open_data(tmp_path, split="train", **options)] == [3, 4]
    with pytest.raises(InputError, match="holds val, train, but no test"):
        open_data(tmp_path, split="test", **options)


def test_a_class_may_be_called_train(tmp_path):
    assert open_data(folders(tmp_path, "bus", "train"), transform=plain).classes == ["bus", "train"]


def test_imagenet_from_kaggle_takes_labels_from_its_table(tmp_path):
    base = tmp_path / "ILSVRC" / "Data" / "CLS-LOC"
    picture(base / "val" / "ILSVRC2012_val_00000001.png")
    picture(base / "val" / "ILSVRC2012_val_00000002.png")
    folders(base / "train", WNIDS[5])
    (tmp_path / "LOC_val_solution.csv").write_text(
        "ImageId,PredictionString\n"
        f"ILSVRC2012_val_00000002,{WNIDS[65]} 1 2 3 4 {WNIDS[65]} 5 6 7 8 \n"
        f"ILSVRC2012_val_00000001,{WNIDS[970]} 85 1 499 272 \n"
    )
    options = {"transform": plain, "classes": WNIDS}
    assert [label for _, label, _ in open_data(tmp_path, **options)] == [970, 65]
    assert [label for _, label, _ in open_data(tmp_path, split="train", **options)] == [5]


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="there is no image in"):
        open_data(tmp_path, transform=plain)
    (tmp_path / "class").mkdir()
    with pytest.raises(InputError, match="there is no image in"):
        open_data(tmp_path, transform=plain)


def test_a_missing_folder_and_a_file_are_refused(tmp_path):
    with pytest.raises(InputError, match="is missing"):
        open_data(tmp_path / "nowhere", transform=plain)
    with pytest.raises(InputError, match="is a file"):
        open_data(picture(tmp_path / "a.png"), transform=plain)


def test_a_limit_spreads_over_the_classes(tmp_path):
    data = open_data(folders(tmp_path, *"abcdef", images=3), transform=plain, limit=6)
    assert [key for _, _, key in data] == [f"{name}/0.png" for name in "abcdef"]
    assert len(open_data(tmp_path, transform=plain, limit=1000)) == 18
    with pytest.raises(InputError, match="limit of 0"):
        open_data(tmp_path, transform=plain, limit=0)


# Unreadable images, batches, waiting -----------------------------------------------------------


@pytest.fixture
def damaged(tmp_path) -> Path:
    """Five images, of which a/1.jpg is cut short and b/0.png is text."""
    folders(tmp_path, "a", "b", "c")
    cut_short(tmp_path / "a" / "1.jpg")
    (tmp_path / "b" / "0.png").write_text("not an image")
    return folders(tmp_path, "c", images=2)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_stops_the_run_with_one_sentence(damaged, workers):
    with pytest.raises(InputError, match=r"a/1\.jpg cannot be read") as caught:
        list(loader(open_data(damaged, transform=plain), 2, workers))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_or_is_left_out_and_counted(damaged, workers, batch_size):
    data = open_data(damaged, transform=plain, unreadable="skip")
    batches = list(loader(data, batch_size, workers))
    assert [key for batch in batches for key in batch.keys] == ["a/0.png", "c/0.png", "c/1.png"]
    assert torch.cat([batch.labels for batch in batches]).tolist() == [0, 2, 2]
    assert all(len(batch.images) == len(batch.keys) for batch in batches)
    assert data.skipped == ["a/1.jpg", "b/0.png"]


def test_reading_without_a_loader_keeps_the_same_list(damaged):
    data = open_data(damaged, transform=plain, unreadable="skip")
    assert [sample is None for sample in data] == [False, True, True, False, False]
    assert data.skipped == ["a/1.jpg", "b/0.png"]


def test_there_is_no_third_way(tmp_path):
    with pytest.raises(InputError, match="'stop'"):
        open_data(folders(tmp_path, "a"), transform=plain, unreadable="stopp")


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_share_the_images_without_repeating_any(tmp_path, processes):
    folders(tmp_path, "a", images=7)
    shares = [
        [
            key
            for batch in loader(open_data(tmp_path, transform=plain), 2, process=p, processes=processes)
            for key in batch.keys
        ]
        for p in range(processes)
    ]
    assert sorted(key for share in shares for key in share) == [f"a/{index}.png" for index in range(7)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_waiting_is_the_readers_time_and_not_the_consumers(tmp_path):
    def slow(image):
        time.sleep(0.02)
        return plain(image)

    batches = loader(open_data(folders(tmp_path, "a", images=6), transform=slow), 2)
    for _ in batches:
        time.sleep(0.05)
    assert 0.12 <= batches.waited < batches.seconds - 0.14  # 6 images of 20 ms; 3 batches of 50 ms


def test_a_batch_has_at_least_one_image(tmp_path):
    with pytest.raises(InputError, match="batch size of 0"):
        loader(open_data(folders(tmp_path, "a"), transform=plain), 0)


# timm's data sets and class names ----------------------------------------------------------------


@pytest.fixture
def mnist(tmp_path) -> Path:
    """Three digits of 28 × 28 in MNIST's own files."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    pixels = np.zeros((3, 28, 28), dtype=np.uint8)
    pixels[1] = 255
    for part, labels in (("t10k", [7, 2, 1]), ("train", [5, 0, 4])):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 0x803, 3, 28, 28) + pixels.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, 3) + bytes(labels))
    return tmp_path


def test_a_torchvision_data_set_is_opened_by_timms_name(mnist):
    data = open_data("torch/mnist", transform=plain, root=mnist)
    samples = list(data)
    assert [(label, key) for _, label, key in samples] == [(7, "00000000"), (2, "00000001"), (1, "00000002")]
    assert samples[1][0].flatten().tolist() == [255, 255, 255]  # grey became RGB
    assert [label for _, label, _ in open_data("torch/mnist", transform=plain, root=mnist, split="train")] == [5, 0, 4]
    assert len(open_data("torch/mnist", transform=plain, root=mnist, limit=2)) == 2


def test_ten_digits_are_not_the_first_ten_of_a_thousand_classes(mnist):
    with pytest.raises(InputError, match="torch/mnist has 10 classes, the model 1000"):
        open_data("torch/mnist", transform=plain, root=mnist, classes=WNIDS)
    assert len(open_data("torch/mnist", transform=plain, root=mnist, classes=10)) == 3


def test_a_timm_name_that_cannot_be_opened_says_why(tmp_path):
    with pytest.raises(InputError, match="give the data root"):
        open_data("torch/mnist", transform=plain)
    with pytest.raises(InputError, match=r"torch/nothing: Unknown torchvision dataset"):
        open_data("torch/nothing", transform=plain, root=".")
    for name in ("wds/anything", "hfds/nobody/anything"):  # no such data, and here no such package either
        with pytest.raises(InputError, match=name):
            open_data(name, transform=plain, root=tmp_path)


def test_a_stream_is_numbered_and_read_by_one_process():
    images = [(Image.new("RGB", (4, 4), colour), label) for label, colour in enumerate((RED, GREEN, BLUE))]
    stream = Stream(images, [], transform=plain)
    batches = list(loader(stream, 2, workers=2))
    assert [key for batch in batches for key in batch.keys] == ["00000000", "00000001", "00000002"]
    assert batches[1].labels.tolist() == [2]
    with pytest.raises(InputError, match="one process"):
        loader(stream, 2, process=0, processes=2)


def test_a_1000_class_model_knows_imagenets_folders_and_names():
    model = timm.create_model("vit_tiny_patch16_224")
    assert class_folders(model)[:2] == ["n01440764", "n01443537"]
    assert class_names(model)[1] == "goldfish, Carassius auratus"


def test_a_model_with_its_own_names_is_asked_first_and_another_admits_it_has_none():
    model = timm.create_model("vit_tiny_patch16_224", num_classes=2)
    assert class_folders(model) == 2
    assert class_names(model) is None
    model.pretrained_cfg = {"label_names": ["c", "d"], "label_descriptions": {"d": "dog"}}
    assert class_folders(model) == ["c", "d"]
    assert class_names(model) == ["c", "dog"]


def test_the_shared_validation_images_carry_imagenets_labels(shared_data):
    data = open_data(shared_data / "imagenet-val-2k", transform=plain, classes=WNIDS)
    assert len(data) == 2000
    assert data[1998][1:] == (999, data.keys[1998])
    assert data.keys[0].startswith("n01440764/ILSVRC2012_val_")
