from torchvision.datasets.folder import IMG_EXTENSIONS

from spot.data.files import EXTENSIONS


def test_all_that_torchvision_takes_for_an_image_is_one():
    assert set(IMG_EXTENSIONS) < set(EXTENSIONS)
