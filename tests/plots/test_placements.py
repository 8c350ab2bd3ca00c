import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from spot.errors import InputError
from spot.plots import save
from spot.plots.placements import (
    ADVERSARIAL_COLORS,
    PATH_COLORS,
    Gallery,
    covered,
    draw_image,
    draw_paths,
    draw_sizes,
    gallery_figure,
    magnification,
    placement_figure,
    windows_figure,
)


def trajectory(*steps):
    """(steps + 1, 1, 2) of one token, from (y, x) pairs."""
    return torch.tensor(steps)[:, None]


def test_the_pixels_a_window_shows_are_those_under_it():
    shown = covered(torch.zeros(3, 10, 20), torch.tensor([[0.5, 0.25], [0.0, 1.0]]), 4)
    expected = torch.zeros(10, 20)
    expected[3:7, 3:7] = 1  # centred at y = 5, x = 5
    expected[:2, 18:] = 1  # what is in the image of a window on its corner
    assert torch.equal(shown, expected)


@pytest.mark.parametrize("colors", [PATH_COLORS, ADVERSARIAL_COLORS])
def test_a_path_has_the_first_colour_at_its_start_and_the_last_at_its_end(tmp_path, colors):
    """One token goes right through the middle: its line is read back from the picture."""
    image = torch.full((3, 50, 100), 0.5)
    figure = Figure(figsize=(4, 2), dpi=100)
    axes = figure.add_axes((0, 0, 1, 1))
    draw_image(axes, image)
    draw_paths(axes, image, trajectory((0.5, 0.1), (0.5, 0.5), (0.5, 0.9)), colors)
    save(figure, tmp_path / "path.png")
    pixels = np.asarray(Image.open(tmp_path / "path.png").convert("RGB")) / 255  # 4 picture pixels per image pixel
    assert pixels[100, 120] == pytest.approx(colors(0.0)[:3], abs=0.02)
    assert pixels[100, 280] == pytest.approx(colors(1.0)[:3], abs=0.02)
    assert pixels[20, 200] == pytest.approx((0.5, 0.5, 0.5), abs=0.01)


def test_moves_of_a_few_pixels_are_magnified_from_where_they_start():
    axes = Figure().subplots()
    draw_paths(axes, torch.zeros(3, 100, 200), trajectory((0.5, 0.25), (0.51, 0.26)), times=5)
    (edge, path) = (each.get_segments()[0].tolist() for each in axes.collections[:2])
    assert edge == path == [pytest.approx([50, 50]), pytest.approx([60, 55])]  # 0.01 of 200 × 100 pixels, five times


@pytest.mark.parametrize("far, times", [(0.0, 1), (0.004, 20), (0.012, 5), (0.04, 2), (0.09, 1), (0.5, 1)])
def test_the_usual_move_is_drawn_up_to_a_tenth_of_the_image(far, times):
    moves = [trajectory((0.5, 0.5), (0.5, 0.5 + far), (0.5, 0.5)) for _ in range(3)]
    assert magnification([*moves, trajectory((0.1, 0.1), (0.9, 0.9), (0.9, 0.9))]) == times


@pytest.mark.parametrize("adversarial", [False, True])
def test_a_figure_has_three_panels_with_their_captions(tmp_path, adversarial):
    path = torch.tensor([0.5, 0.5]) + 0.01 * torch.arange(6).view(6, 1, 1).expand(6, 9, 2)  # 5 steps, 0.07 in all
    figure = placement_figure(
        torch.rand(3, 40, 30), path, 8, start="start: tench 1.0%", end="end: tench 90.0%", title="a.jpg",
        adversarial=adversarial,
    )  # fmt: skip
    assert [axes.get_title() for axes in figure.axes] == ["start: tench 1.0%", "9 tokens, 5 steps", "end: tench 90.0%"]
    colors = ADVERSARIAL_COLORS if adversarial else PATH_COLORS
    edges = [axes.collections[-1].get_edgecolor()[0].tolist() for axes in (figure.axes[0], figure.axes[2])]
    assert edges == [pytest.approx(colors(0.0)), pytest.approx(colors(1.0))]
    short = placement_figure(torch.rand(3, 40, 30), path[:2], 8).axes[1].get_title()
    assert short == "9 tokens, 1 step, moves drawn 5 × as long"


def test_a_gallery_has_a_panel_per_image_and_none_empty():
    trajectories = torch.full((7, 3, 4, 2), 0.5)
    trajectories[:, 1:] += 0.02
    given = Gallery(
        torch.rand(7, 3, 20, 20), trajectories, captions=[str(index) for index in range(7)],
        masks=torch.rand(7, 20, 20), window=4, columns=3, title="searched",
    )  # fmt: skip
    (part,) = gallery_figure([given]).subfigs
    assert [axes.get_title() for axes in part.axes] == ["0", "1", "2", "3", "4", "5", "6"]
    assert all(axes.images for axes in part.axes)
    assert part.get_suptitle() == "searched, moves drawn 3 × as long"


def test_a_gallery_needs_a_trajectory_for_each_image():
    with pytest.raises(InputError, match="one trajectory"):
        Gallery(torch.rand(2, 3, 8, 8), torch.rand(3, 2, 4, 2))


def test_sizes_are_outlined_where_they_change_along_the_path():
    axes = Figure().subplots()
    steps = torch.tensor([[[0.5, 0.5, 1.0]], [[0.5, 0.5, 2.0]], [[0.5, 0.6, 4.0]]])
    draw_sizes(axes, torch.zeros(3, 100, 100), steps, 16, times=2)
    outlines = [each.get_paths()[0].get_extents() for each in axes.collections[1::2]]  # each on a pale edge
    assert [outline.width for outline in outlines] == pytest.approx([16, 32, 64])
    assert outlines[-1].x0 + 32 == pytest.approx(70)  # 10 pixels to the right, drawn twice as far
    draw_sizes(unsized := Figure().subplots(), torch.zeros(3, 100, 100), steps[..., :2], 16)
    assert not unsized.collections


@pytest.mark.parametrize("with_map", [False, True])
def test_windows_pixels_seen_and_classes_have_a_panel_each(with_map):
    image, positions = torch.rand(3, 40, 40), torch.tensor([[0.25, 0.25], [0.75, 0.75]])
    rows = [{"class": "tabby, $tabby$ cat", "probability": 75.0}, {"class": "tiger cat", "probability": 20.5}]
    saliency = torch.rand(40, 40) if with_map else None
    figure = windows_figure(image, positions, 10, rows, saliency=saliency, title="cat.jpg")
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["saliency map"] * with_map + [
        "2 windows of 10 × 10", "the windows cover 12% of the pixels", "",
    ]  # fmt: skip
    assert figure.get_suptitle() == "cat.jpg"
    corners = [path.vertices[0].tolist() for path in figure.axes[-3].collections[-1].get_paths()]
    assert corners == [[5, 5], [25, 25]]  # (x, y) of 10 × 10 windows around (10, 10) and (30, 30)
    assert [bar.get_width() for bar in figure.axes[-1].patches] == [75.0, 20.5]
    assert [text.get_text() for text in figure.axes[-1].texts] == ["tabby, $tabby$ cat, 75.0 %", "tiger cat, 20.5 %"]
    if with_map:
        assert torch.equal(torch.tensor(figure.axes[0].images[-1].get_array()), saliency)
