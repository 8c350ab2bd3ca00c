"""The files that command lines name: a saved model, pictures, a damaged file and a bomb."""

import struct
import zlib
from pathlib import Path

from PIL import Image

from spot.models.checkpoints import save_folder
from tests.conftest import make_nano
from tests.faults.jobs import images


def prepared(room: Path) -> dict[str, str]:
    """What stands for PICTURE, MODEL and so on."""
    save_folder(make_nano(num_classes=2), room / "saved")
    Image.effect_noise((40, 30), 50).convert("RGB").save(room / "a [b] $c$.png")
    (room / "bad.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    (room / "bomb.png").write_bytes(bomb())
    return {
        "MODEL": str(room / "saved"),
        "DATA": str(images(room / "pictures")),
        "PICTURE": str(room / "a [b] $c$.png"),
        "OUT": str(room / "out"),
        "OUT/d.safetensors": str(room / "out" / "d.safetensors"),
        "BAD": str(room / "bad.safetensors"),
        "BOMB": str(room / "bomb.png"),
    }


def bomb(side: int = 60_000) -> bytes:
    """A PNG of a few kilobytes that claims 3.6 gigapixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 9999))
        + chunk(b"IEND", b"")
    )
