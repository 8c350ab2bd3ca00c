"""Files that the tests of images read: plain pictures, class folders, a JPEG cut short."""

import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image

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


def png_of(side: int, bits: int, pixels: bytes) -> bytes:
    """A PNG file, RGB of side × side pixels, that contains these bytes."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, bits, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
