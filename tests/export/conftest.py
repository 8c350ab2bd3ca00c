"""One exported file for the tests that only run it."""

from types import SimpleNamespace

import pytest

from spot.export.files import export
from spot.export.verify import sample_pictures
from tests.conftest import make_nano


@pytest.fixture(scope="session")
def exported(tmp_path_factory) -> SimpleNamespace:
    """A tiny ViT as an ONNX file that takes bytes and positions, and gives all outputs."""
    model = make_nano()
    path = tmp_path_factory.mktemp("export") / "nano.onnx"
    outputs = ("logits", "pooled", "tokens")
    written = export(model, path, outputs=outputs, pictures=sample_pictures(model, count=2))
    return SimpleNamespace(model=model, path=path, written=written)
