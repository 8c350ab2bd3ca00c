"""One image: every awkward kind of file, and the transform to what a model sees."""

import struct

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from timm.data.transforms import ResizeKeepRatio
from torchvision.transforms import CenterCrop

from spot.data.picture import evaluation_transform, open_image, open_photos, resize_and_crop
from spot.errors import InputError
from tests.data.files import BLUE, GREEN, RED, cut_short, png_of


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


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_sixteen_bits_are_scaled_and_not_clipped(tmp_path, ending):
    values = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / f"a.{ending}")
    assert np.asarray(open_image(tmp_path / f"a.{ending}"))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_sixteen_bits_in_colour_too(tmp_path):
    (tmp_path / "a.png").write_bytes(png_of(1, 16, b"\0" + struct.pack(">HHH", 65535, 32896, 0)))
    assert open_image(tmp_path / "a.png").getpixel((0, 0)) == (255, 128, 0)


@pytest.mark.parametrize("side", [60_000, 12_000])  # Pillow refuses the first one, we the second
def test_a_small_file_that_claims_a_huge_image_is_refused_before_it_is_decoded(tmp_path, monkeypatch, side):
    (tmp_path / "a.png").write_bytes(png_of(side, 8, b""))
    monkeypatch.setattr(Image.Image, "load", lambda image: pytest.fail("it was decoded"))
    with pytest.raises(InputError, match=r"a\.png is too large to decode; scale it below 120 megapixels first"):
        open_image(tmp_path / "a.png")


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


def palette_image() -> Image.Image:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([*RED, *GREEN])
    return image


WHITE = (255, 255, 255)


@pytest.mark.parametrize(
    "image, name, options, expected",
    [
        (palette_image(), "a.png", {}, GREEN),
        (palette_image(), "a.gif", {"transparency": 1}, WHITE),
        (Image.new("RGBA", (4, 4), (255, 0, 0, 0)), "a.png", {}, WHITE),
        (Image.new("LA", (4, 4), (0, 0)), "a.png", {}, WHITE),
        (Image.new("1", (4, 4), 255), "a.png", {}, WHITE),
        (Image.new("L", (4, 4), 255), "a.png", {}, WHITE),
        (Image.new("RGB", (4, 4), GREEN), "a.gif", {"save_all": True, "append_images": [palette_image()]}, GREEN),
    ],
    ids=["palette", "transparent palette", "RGBA", "LA", "black and white", "grey", "animation"],
)
def test_any_mode_becomes_rgb_with_white_where_it_is_transparent(tmp_path, image, name, options, expected):
    image.save(tmp_path / name, **options)
    assert open_image(tmp_path / name).getpixel((0, 0)) == expected


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InputError, match=r"a\.jpg cannot be read: .*truncated"):
        open_image(cut_short(tmp_path / "a.jpg"))
    with pytest.raises(InputError, match=r"nowhere\.png is missing"):
        open_image(tmp_path / "nowhere.png")
    with pytest.raises(InputError, match="is a folder"):
        open_image(tmp_path)
    for content in (b"", b"hello", b"\x89PNG\r\n\x1a\n" + b"\0" * 40):
        (tmp_path / "a.png").write_bytes(content)
        with pytest.raises(InputError, match=r"a\.png (is not an image|cannot be read)"):
            open_image(tmp_path / "a.png")


# The evaluation transform ------------------------------------------------------------------

CONFIG = {"input_size": (3, 224, 224), "mean": (0.5, 0.25, 0.75), "std": (0.5, 0.25, 0.1)}


@pytest.mark.parametrize("size", [(1, 1), (20000, 1), (1, 20000), (20000, 40), (3, 500), (640, 480)])
@pytest.mark.parametrize("wanted", [None, (96, 96), (96, 160)])
def test_every_image_becomes_the_size_that_is_wanted(size, wanted):
    made = evaluation_transform(CONFIG, wanted)(Image.new("RGB", size, GREEN))
    assert made.shape == (3, *(wanted or (224, 224)))


def test_of_an_endless_image_the_middle_is_seen():
    image = Image.new("RGB", (20000, 4), RED)
    image.paste(BLUE, (9990, 0, 10010, 4))
    seen = evaluation_transform({**CONFIG, "mean": (0, 0, 0), "std": (1, 1, 1)})(image)
    torch.testing.assert_close(seen[:, 112, 112], torch.tensor([0.0, 0.0, 1.0]))


@pytest.mark.parametrize("shape", [(500, 375), (375, 500), (224, 224), (33, 500), (300, 20), (257, 255), (3, 3)])
def test_pixels_are_those_of_timms_transforms(shape):
    image = Image.effect_noise(shape, 90).convert("RGB")
    config = {"mean": (0.4, 0.5, 0.6), "std": (0.3, 0.2, 0.1)}
    square = create_transform(224, interpolation="bicubic", crop_pct=0.875, crop_mode="center", **config)
    assert torch.equal(evaluation_transform({**config, "input_size": (3, 224, 224)})(image), square(image))
    wide = CenterCrop((32, 48))(ResizeKeepRatio((int(32 / 0.875), int(48 / 0.875)), interpolation="bicubic")(image))
    assert resize_and_crop(image, (32, 48)).tobytes() == wide.tobytes()


@pytest.mark.parametrize("fit", ["whole", "squash"])
def test_a_line_of_pixels_is_cropped_before_it_is_resized(fit):
    config = {"input_size": (3, 32, 32), "mean": (0,) * 3, "std": (1,) * 3}
    image = Image.new("RGB", (20000, 4), (255, 0, 0))
    image.paste((0, 255, 0), (9968, 0, 10032, 4))  # the middle, 16 times as long as high
    assert evaluation_transform(config, fit=fit)(image)[1].min() > 0.5


def test_photographs_none_of_which_can_be_read_are_refused(tmp_path):
    (tmp_path / "a.png").write_text("no image")
    with pytest.raises(InputError, match="none of the files"):
        list(open_photos([tmp_path / "a.png"], lambda image: image, skip=True))
