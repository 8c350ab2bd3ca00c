"""Are images of one folder in another, or nearly? `python -m tools.near_duplicates imagenet-train-5k imagenet-val-2k`

Every image becomes 256 bits, whether each of 16 × 16 brightnesses is below its right neighbour's (a difference hash),
and every image of the first folder, as it is and mirrored, is compared with every one of the second. Unrelated
photographs differ in about half of the bits; the same photograph at another size or quality in a few.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 16
NEAR = 26  # bits, a tenth: at most so many differ between near-duplicates


def bits(image: Image.Image) -> np.ndarray:
    """The difference hash of an image: (256,) of −1 and 1."""
    grey = np.asarray(image.convert("L").resize((SIDE + 1, SIDE), Image.Resampling.BOX), dtype=np.int16)
    return np.where(grey[:, :-1] < grey[:, 1:], 1, -1).astype(np.float32).ravel()


def hashes(folder: Path) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Names of a folder's images, their hashes (M, 256), and those of the mirrored images."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    plain, mirrored = [], []
    for path in paths:
        with Image.open(path) as image:
            image.draft("L", (64, 64))
            small = image.convert("L").resize((64, 64), Image.Resampling.BOX)
        plain.append(bits(small))
        mirrored.append(bits(small.transpose(Image.Transpose.FLIP_LEFT_RIGHT)))
    return [str(path.relative_to(folder)) for path in paths], np.stack(plain), np.stack(mirrored)


def distances(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """How many bits differ between every two: (M, 256) and (K, 256) → (M, K)."""
    return (first.shape[1] - first @ second.T) / 2


def main(first: str, second: str) -> None:
    names, plain, mirrored = hashes(Path(first))
    others, wanted, _ = hashes(Path(second))
    apart = np.minimum(distances(plain, wanted), distances(mirrored, wanted))
    nearest = apart.min(0)  # of every image of the second folder
    near, least, middle = int((nearest <= NEAR).sum()), int(nearest.min()), int(np.median(nearest))
    print(f"{len(names)} and {len(others)} images; {near} of the latter have a near-duplicate among the former, in")
    print(
        f"which at most {NEAR} bits of {plain.shape[1]} differ. The nearest differs in {least}, the median in {middle}."
    )
    for column in nearest.argsort()[:10]:
        print(f"{int(nearest[column])} bits: {names[apart[:, column].argmin()]} and {others[column]}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
