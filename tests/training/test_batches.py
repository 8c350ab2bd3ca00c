import pytest
import torch

from spot.data.images import open_data
from spot.data.picture import evaluation_transform
from spot.data.scenes import Scenes
from spot.errors import InputError
from spot.training.batches import (
    MicroBatchSampler,
    SceneStream,
    TrainingStream,
    micro_batches,
    training_transform,
)
from tests.conftest import make_nano
from tests.training.small_run import make_images, small_recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images") / "all")  # 10 classes of 3


def stream_of(folder, weights=None, **changes) -> TrainingStream:
    config = make_nano().data_config
    data = open_data(folder, transform=evaluation_transform(config), split="train")
    stream = TrainingStream(data, small_recipe("cls-in1k", **changes), config)
    stream.weights = weights
    return stream


def read(stream, steps, workers=0, **share) -> list:
    return list(micro_batches(stream, MicroBatchSampler(8, steps, **share), workers))


def test_an_epoch_shows_every_image_once_in_an_order_of_its_own(folder):
    shuffled = stream_of(folder)
    orders = [shuffled.order(epoch) for epoch in (0, 1)]
    assert [sorted(order) for order in orders] == [list(range(30))] * 2
    assert orders[0] != orders[1]
    assert stream_of(folder).order(0) == orders[0]
    assert stream_of(folder, seed=1).order(0) != orders[0]


def test_weights_decide_how_often_an_image_is_drawn(folder):
    weights = torch.zeros(30)
    weights[[3, 7]] = torch.tensor([1.0, 3.0])
    drawn = [number for epoch in range(20) for number in stream_of(folder, weights).order(epoch)]
    assert set(drawn) == {3, 7}
    assert 0.65 < drawn.count(7) / len(drawn) < 0.85


def test_steps_walk_on_through_the_epochs(folder):
    shuffled = stream_of(folder)
    labels = torch.cat([part.labels for part in read(shuffled, range(5))])  # 40 places: one epoch and ten more
    numbers = [*shuffled.order(0), *shuffled.order(1)[:10]]
    assert labels.tolist() == [number // 3 for number in numbers]


def test_workers_processes_accumulation_and_resuming_read_the_same_images(folder):
    whole = torch.cat([part.images for part in read(stream_of(folder), range(4))])
    with_worker = torch.cat([part.images for part in read(stream_of(folder), range(4), workers=1)])
    resumed = torch.cat([part.images for part in read(stream_of(folder), range(2, 4))])
    assert torch.equal(whole, with_worker)
    assert torch.equal(whole[16:], resumed)
    pieces: dict[tuple[int, int], torch.Tensor] = {}
    for process in (0, 1):
        for part in read(stream_of(folder), range(4), accumulate=2, process=process, processes=2):
            assert len(part.images) == 2
            pieces[part.step, part.first] = part.images
    assert torch.equal(whole, torch.cat([pieces[key] for key in sorted(pieces)]))


def test_each_epoch_crops_anew(folder):
    first = stream_of(folder)
    number = first.order(0)[0]
    again = 30 + first.order(1).index(number)  # the same image's place in the next epoch
    assert first[0][1] == first[again][1]
    assert not torch.equal(first[0][0], first[again][0])


def test_the_strongest_augmentation_never_fails(folder):
    # RandAugment at magnitude 15 posterizes to no bits at all in timm, which Pillow refuses.
    transform = training_transform(small_recipe("cls-in21k"), make_nano().data_config)
    image = open_data(folder, transform=lambda image: image, split="train").read(0)[0]
    for _ in range(300):
        assert transform(image).shape == (3, 32, 32)


def test_an_unreadable_training_image_is_named(folder, tmp_path):
    broken = make_images(tmp_path / "broken", classes=1, each=2)
    (broken / "0" / "0.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"0\.png"):
        [stream_of(broken)[place] for place in range(2)]


def test_scenes_are_a_stream_that_never_repeats():
    stream = SceneStream(Scenes("train", 16, seed=3), make_nano().data_config)
    assert len(stream) == 16  # an epoch, after which new scenes come
    read_parts = read(stream, range(3))
    expected = torch.stack([image for image, _, _ in (Scenes("train", 24, seed=3)[index] for index in range(24))])
    found = torch.cat([part.images for part in read_parts])
    torch.testing.assert_close(found, expected * 2 - 1)  # the nano's mean and deviation are one half
    assert torch.cat([part.labels for part in read_parts]).tolist() == list(range(24))
    assert torch.equal(read(stream, range(2, 3))[0].images, found[16:])
