"""An attribute of a model that may be given as a file: it is read, for that model, when it is first asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from spot.errors import check_kind

T = TypeVar("T")


class FromFile(Generic[T]):
    """A descriptor: `model.policy = "FILE"`, and `model.policy` is the policy, or None where there is none."""

    def __init__(self, kind: type[T], read: Callable[[Path, Any], T]) -> None:
        """read: a file and the model it is for → what is in the file."""
        self.kind, self.read = kind, read

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.kept = name, f"_{name}"

    def __get__(self, model: Any, owner: type | None = None) -> T | None:
        value = getattr(model, self.kept)
        if isinstance(value, Path):
            value = self.read(value, model)
            setattr(model, self.kept, value)
        return value

    def __set__(self, model: Any, value: T | str | Path | None) -> None:
        check_kind(self.name, value, self.kind, str, Path, type(None))
        setattr(model, self.kept, Path(value) if isinstance(value, str) else value)
