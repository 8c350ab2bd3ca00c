import matplotlib.figure
import pytest
from PIL import Image

from spot.plots.training import plot_log


@pytest.fixture
def drawn(monkeypatch):
    """The axes of figures as they are saved."""
    axes = []
    save = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, *a, **k: (axes.append(self.axes[0]), save(self, *a, **k))
    )
    return axes


def test_training_and_validation_accuracy_by_epoch(tmp_path, drawn):
    rows = [
        {"epoch": 1.0, "loss": 2.0, "train_top1": 50.0, "val_25": 10.0},
        {"epoch": 2.0, "loss": 1.0, "train_top1": 60.0, "val_25": 30.0},
    ]
    plot_log(rows, tmp_path / "log.png", "distil")
    assert Image.open(tmp_path / "log.png").size[0] > 500
    lines = {line.get_label(): line.get_xydata().tolist() for line in drawn[0].lines}
    assert lines == {"train": [[1, 50], [2, 60]], "val, 25 tokens": [[1, 10], [2, 30]]}
    assert drawn[0].get_ylabel() == "Accuracy (%)"


def test_without_accuracy_the_loss_is_drawn(tmp_path, drawn):
    plot_log([{"epoch": 1.0, "loss": 2.0, "train_top1": None}], tmp_path / "log.png")
    assert drawn[0].get_ylabel() == "Loss"
    assert drawn[0].lines[0].get_xydata().tolist() == [[1, 2]]
