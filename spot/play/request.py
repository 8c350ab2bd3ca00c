"""Validation of the page's requests: the type and range of every field."""

import json
from typing import Any, Literal

import torch
from torch import Tensor

from spot.errors import InputError

MAX_TOKENS = 1024
MAX_SCALE = 8
MAX_STEPS = 1000
MAX_OUTSIDE = 1.0  # maximum distance of a token outside the image, as a fraction of its size


class Request:
    """A JSON object from the page. Absent fields are None; invalid ones raise InputError."""

    def __init__(self, fields: Any) -> None:
        if not isinstance(fields, dict):
            raise InputError("a request is a JSON object")
        self.fields: dict[str, Any] = fields

    @classmethod
    def parse(cls, text: str | bytes) -> "Request":
        """Parse JSON text."""
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"this is not JSON: {error}") from None
        return cls(fields)

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self.fields.get(name, default)
        if not isinstance(value, str):
            raise InputError(f"{name} must be text, got {value!r}")
        return value

    def number(self, name: str, low: int = 0, high: int = 2**31 - 1) -> int:
        """A whole number from low to high."""
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InputError(f"{name} must be a whole number from {low} to {high}, got {value!r}")
        return value

    def optional(self, name: str, low: int, high: int) -> int | None:
        """A whole number from low to high, or None."""
        return None if self.fields.get(name) is None else self.number(name, low, high)

    def scale(self) -> float | Literal["auto"] | None:
        """The size of windows to place: a number, "auto", or None for the model's own."""
        value = self.fields.get("scale")
        if value is None or value == "auto":
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_SCALE:
            raise InputError(f'scale must be "auto" or a number above 0 and at most {MAX_SCALE}, got {value!r}')
        return float(value)

    def positions(self) -> Tensor:
        """Positions (1, N, 2 or 3) of one image."""
        return checked_positions(self.fields.get("positions"))[None]

    def trajectory(self) -> Tensor:
        """Positions of every step (steps + 1, N, 2 or 3)."""
        value = self.fields.get("trajectory")
        if not isinstance(value, list) or not 0 < len(value) <= MAX_STEPS:
            raise InputError(f"trajectory must be a list of at most {MAX_STEPS} placements")
        placements = [checked_positions(step) for step in value]
        if len({placement.shape for placement in placements}) != 1:
            raise InputError("all steps of a trajectory have the same tokens")
        return torch.stack(placements)


def checked_positions(value: Any) -> Tensor:
    """Positions (N, 2 or 3) from lists of (y, x), as fractions of height and width, and optionally a scale."""
    if not isinstance(value, list) or not value:
        raise InputError("positions must be a list of at least one [y, x]")
    if len(value) > MAX_TOKENS:
        raise InputError(f"the page takes up to {MAX_TOKENS} tokens, got {len(value)}")
    try:
        positions = torch.tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # not numbers, or of different lengths
        positions = torch.empty(0)
    if positions.ndim != 2 or positions.shape[1] not in (2, 3) or not bool(positions.isfinite().all()):
        raise InputError("each position must be two finite numbers [y, x], or each three with a scale")
    places, scales = positions[:, :2], positions[:, 2:]
    if not bool(((scales > 0) & (scales <= MAX_SCALE)).all()):
        raise InputError(f"a position's third number is its window's scale, above 0 and at most {MAX_SCALE}")
    outside = places[(places < -MAX_OUTSIDE) | (places > 1 + MAX_OUTSIDE)]
    if len(outside):
        raise InputError(
            f"positions are fractions of height and width, from 0 to 1, got {outside[0]:g}; "
            "divide pixels by the image's size"
        )
    return positions.float()
