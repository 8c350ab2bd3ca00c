import matplotlib.figure
import pytest
from PIL import Image

from spot.errors import InputError
from spot.plots.training import logs_figure, plot_log


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


def test_several_runs_have_a_panel_each_and_intervals_are_bands():
    rows = [
        {"epoch": 1.0, "loss": 2.0, "val_9": 10.0, "val_9_low": 8.0, "val_9_high": 13.0},
        {"epoch": 2.0, "loss": 1.0, "val_9": 30.0, "val_9_low": 27.0, "val_9_high": 34.0},
    ]
    first, second = logs_figure({"one": rows, "two": [{"epoch": 1.0, "loss": 2.0}]}, "runs").axes
    assert (first.get_title(), second.get_title()) == ("one", "two")
    assert [line.get_label() for line in first.lines] == ["val, 9 tokens"]  # the ends of intervals are no curves
    (band,) = first.collections
    assert {tuple(point) for point in band.get_paths()[0].vertices} >= {(1, 8), (1, 13), (2, 27), (2, 34)}
    assert second.get_ylabel() == "Loss"
    with pytest.raises(InputError, match="at least one row"):
        logs_figure({})
