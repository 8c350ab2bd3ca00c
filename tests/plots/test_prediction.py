import pytest
import torch

from spot.plots.placements import prediction

ROWS = [{"class": "tabby, $tabby$ cat", "probability": 75.0}, {"class": "tiger cat", "probability": 20.5}]


@pytest.mark.parametrize("with_map", [False, True])
def test_windows_pixels_seen_and_classes_have_a_panel_each(with_map):
    image, positions = torch.rand(3, 40, 40), torch.tensor([[0.25, 0.25], [0.75, 0.75]])
    saliency = torch.rand(40, 40) if with_map else None
    figure = prediction(image, positions, 10, ROWS, saliency=saliency, title="cat.jpg")
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["the map that places them"] * with_map + [
        "2 windows of 10 × 10", "the model saw 12% of the pixels", "",
    ]  # fmt: skip
    assert figure.get_suptitle() == "cat.jpg"
    corners = [path.vertices[0].tolist() for path in figure.axes[-3].collections[-1].get_paths()]
    assert corners == [[5, 5], [25, 25]]  # (x, y) of 10 × 10 windows around (10, 10) and (30, 30)
    assert [bar.get_width() for bar in figure.axes[-1].patches] == [75.0, 20.5]
    assert [text.get_text() for text in figure.axes[-1].texts] == ["tabby, $tabby$ cat, 75.0 %", "tiger cat, 20.5 %"]
    if with_map:
        assert torch.equal(torch.tensor(figure.axes[0].images[-1].get_array()), saliency)
