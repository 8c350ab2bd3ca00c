"""The teacher's predictions before training: shared out over processes, kept as they are made, the same for all."""

import threading
from types import SimpleNamespace

import pytest
import torch

from spot.data.loader import loader
from spot.data.picture import evaluation_transform
from spot.errors import InputError
from spot.options import TrainOptions
from spot.training import run as module
from spot.training.recipes import override
from spot.training.run import predict, sampling_weights, training_images
from spot.training.run_folder import RunFolder
from tests.conftest import make_nano
from tests.training.small_run import make_images, small_recipe


@pytest.fixture
def images(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 4)
    data = make_images(tmp_path / "images", classes=5, each=2)
    return training_images(make_nano(), small_recipe("distil"), TrainOptions(data=str(data), out=tmp_path / "out"))


def alone(model, images):
    """The same without any sharing."""
    images.transform = evaluation_transform(model.data_config)
    return torch.cat([model(batch.images, model.grid(batch.images)).argmax(1) for batch in loader(images, 3)])


def test_two_processes_predict_every_image_once_and_both_know_all(images, tmp_path, monkeypatch):
    """Two threads stand for two processes; each has the chunks that are its own."""
    model, here, barrier, said = make_nano(), threading.local(), threading.Barrier(2), [[""], [""]]
    parts: list[int] = []

    def gathered(own):
        said[here.number] = own
        barrier.wait(60)
        both = said[0] + said[1]
        barrier.wait(60)
        return both

    def this_process():
        state = {"process_index": here.number, "num_processes": 2, "is_main_process": here.number == 0}
        return SimpleNamespace(**state, device=torch.device("cpu"), wait_for_everyone=lambda: barrier.wait(60))

    whole = module.predict_part
    monkeypatch.setattr(module, "predict_part", lambda *given: parts.append(given[2][0]) or whole(*given))
    monkeypatch.setattr(module, "this_process", this_process)
    monkeypatch.setattr(module, "gather_object", gathered)
    made = {}

    def work(number):
        here.number = number
        made[number] = predict(model, images, tmp_path / "parts", 0)

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(parts) == [0, 4, 8]
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], alone(model, images))


def test_a_run_that_was_killed_predicts_only_what_is_missing(images, tmp_path, monkeypatch):
    model, whole, parts = make_nano(), module.predict_part, []

    def counted(*given):
        parts.append(given[2][0])
        if len(parts) == 2:
            raise KeyboardInterrupt
        return whole(*given)

    monkeypatch.setattr(module, "predict_part", counted)
    with pytest.raises(KeyboardInterrupt):
        predict(model, images, tmp_path / "parts", 0)
    made = predict(model, images, tmp_path / "parts", 0)
    assert parts == [0, 4, 4, 8] and torch.equal(made, alone(model, images))


def test_weights_are_by_how_often_the_teacher_says_a_class_and_are_kept(images, tmp_path):
    model, recipe = make_nano(), override(small_recipe("distil"), {"balance": 0.5})
    folder = RunFolder(tmp_path / "run", {"a": 1})
    weights = sampling_weights(model, recipe, images, folder, 0)
    said = alone(model, images)
    expected = torch.tensor([1 / (said == each).sum().sqrt() for each in said], dtype=torch.float64)
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-6)
    assert (folder.path / "predictions.pt").is_file() and not (folder.path / "predictions").exists()


def test_an_image_that_cannot_be_read_is_named(images, tmp_path):
    (tmp_path / "images" / "3" / "1.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"3/1\.png"):
        predict(make_nano(), images, tmp_path / "parts", 0)
