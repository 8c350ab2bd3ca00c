import pytest

from spot.errors import InputError
from spot.plots.training import training_logs


def test_training_and_validation_accuracy_by_epoch():
    rows = [
        {"epoch": 1.0, "loss": 2.0, "train_top1": 50.0, "val_25": 10.0},
        {"epoch": 2.0, "loss": 1.0, "train_top1": 60.0, "val_25": 30.0},
    ]
    (axes,) = training_logs({"distil": rows}).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines == {"train": [[1, 50], [2, 60]], "val, 25 tokens": [[1, 10], [2, 30]]}
    assert (axes.get_title(), axes.get_ylabel()) == ("distil", "Accuracy (%)")


def test_without_accuracy_the_loss_is_drawn():
    (axes,) = training_logs({"": [{"epoch": 1.0, "loss": 2.0, "train_top1": None}]}).axes
    assert axes.get_ylabel() == "Loss"
    assert axes.lines[0].get_xydata().tolist() == [[1, 2]]


def test_several_runs_have_a_panel_each_and_intervals_are_bands():
    rows = [
        {"epoch": 1.0, "loss": 2.0, "val_9": 10.0, "val_9_low": 8.0, "val_9_high": 13.0},
        {"epoch": 2.0, "loss": 1.0, "val_9": 30.0, "val_9_low": 27.0, "val_9_high": 34.0},
    ]
    first, second = training_logs({"one": rows, "two": [{"epoch": 1.0, "loss": 2.0}]}, "runs").axes
    assert (first.get_title(), second.get_title()) == ("one", "two")
    assert [line.get_label() for line in first.lines] == ["val, 9 tokens"]  # the ends of intervals are no curves
    (band,) = first.collections
    assert {tuple(point) for point in band.get_paths()[0].vertices} >= {(1, 8), (1, 13), (2, 27), (2, 34)}
    assert second.get_ylabel() == "Loss"
    with pytest.raises(InputError, match="at least one row"):
        training_logs({})
