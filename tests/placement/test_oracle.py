import math

import pytest
import torch
from torch import nn

from spot.errors import InputError
from spot.placement.oracle import (
    OBJECTIVES,
    OPTIMIZERS,
    PRESETS,
    SearchSettings,
    entropy,
    search,
    snapped,
    wrong_labels,
)
from spot.placement.priors import uniform


class Bowl(nn.Module):
    """Two classes; class 0 is the more probable the nearer every token is to `best` of its image.

    The margin is m = −8 · Σ |position − best|², so its cross-entropy log(1 + exp(−m)) is lowest, and
    log 2, exactly at best.
    """

    def __init__(self, best):
        super().__init__()
        self.best = nn.Parameter(torch.tensor(best))  # (2,)
        self.drop = nn.Dropout(0.5)

    def forward(self, images, positions):
        best = self.best + images.mean((1, 2, 3))[:, None, None]
        margin = -8 * (positions - best).square().sum((1, 2))
        return self.drop(torch.stack([margin, torch.zeros_like(margin)], 1))


def start(count=3, tokens=4):
    images = torch.zeros(count, 3, 32, 32)
    return images, torch.zeros(count, dtype=torch.int64), uniform(images, tokens, torch.Generator().manual_seed(1))


# The optimum of a toy problem is known in closed form


@pytest.mark.parametrize("optimizer, lr", [("adam", 0.01), ("adamw", 0.01), ("sgd", 0.05)])
def test_descent_finds_the_best_positions_of_a_quadratic_model(optimizer, lr):
    images, labels, positions = start()
    found = search(Bowl([0.3, 0.6]), images, labels, positions, steps=300, lr=lr, optimizer=optimizer)
    torch.testing.assert_close(found.positions, torch.tensor([0.3, 0.6]).expand(3, 4, 2), atol=2e-3, rtol=0)
    torch.testing.assert_close(found.losses[:, -1], torch.full((3,), math.log(2)), atol=1e-4, rtol=0)


def test_an_optimum_outside_the_image_is_approached_up_to_the_last_pixel_centre():
    images, labels, positions = start()
    options = {"steps": 100, "lr": 0.05, "optimizer": "sgd"}
    found = search(Bowl([1.4, 0.5]), images, labels, positions, **options)
    torch.testing.assert_close(found.positions[..., 0], torch.full((3, 4), 1 - 0.5 / 32))
    torch.testing.assert_close(found.positions[..., 1], torch.full((3, 4), 0.5), atol=1e-4, rtol=0)
    free = search(Bowl([1.4, 0.5]), images, labels, positions, project=False, **options)
    torch.testing.assert_close(free.positions[..., 0], torch.full((3, 4), 1.4), atol=1e-4, rtol=0)


def test_the_authors_settings_pull_to_the_upper_left_corner_and_ours_do_not():
    images, labels, positions = start()

    def indifferent(images, positions):  # no gradient to speak of, so only decay moves anything
        return positions.sum((1, 2))[:, None] * torch.zeros(2)

    ours = search(indifferent, images, labels, positions, PRESETS["paper"])
    theirs = search(indifferent, images, labels, positions, PRESETS["authors"])
    torch.testing.assert_close(ours.positions, positions)
    torch.testing.assert_close(theirs.positions, positions * (1 - 3e-3 * 1e-2) ** 5)


def test_what_a_search_returns_is_the_start_and_every_step():
    images, labels, positions = start()
    model = Bowl([0.2, 0.2]).eval()
    found = search(model, images, labels, positions, steps=4, lr=0.1)
    assert found.trajectory.shape == (3, 5, 4, 2)
    assert found.logits.shape == (3, 5, 2)
    assert found.losses.shape == (3, 5)
    torch.testing.assert_close(found.trajectory[:, 0], positions.clamp(0.5 / 32, 1 - 0.5 / 32))
    for step in range(5):  # each step's logits and losses belong to that step's positions
        logits = model(images, found.trajectory[:, step])
        torch.testing.assert_close(found.logits[:, step], logits)
        torch.testing.assert_close(found.losses[:, step], -logits.log_softmax(1)[:, 0])


def test_the_best_step_need_not_be_the_last():
    images, labels, positions = start(2, 1)
    positions[:] = 0.5  # steps of 0.3 jump over the optimum at 0.45, further every time
    found = search(Bowl([0.45, 0.45]), images, labels, positions, steps=2, lr=0.3)
    assert found.best_step.tolist() == [0, 0]
    torch.testing.assert_close(found.best, found.trajectory[:, 0])


@pytest.mark.parametrize("objective, sign", [("descent", 1), ("ascent", -1)])
def test_descent_raises_and_ascent_lowers_the_probability_of_the_label(nano, objective, sign):
    images, labels, positions = batch(4)
    logits = search(nano, images, labels, positions, objective=objective).logits
    chances = logits.softmax(-1)[torch.arange(4), :, labels]
    assert (sign * chances.diff() > 0).all()


def test_agreement_needs_no_label_and_brings_the_dense_prediction_nearer(nano):
    images, _, positions = batch(4)
    found = search(nano, images, None, positions, objective="agree")
    with torch.no_grad():
        dense = nano.vit(images).log_softmax(1)
    by_hand = (dense.exp() * (dense - found.logits[:, -1].log_softmax(1))).sum(1)
    torch.testing.assert_close(found.losses[:, -1], by_hand, atol=1e-4, rtol=1e-3)
    assert (found.losses[:, -1] < found.losses[:, 0]).all()


# No image feels its neighbours


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_image_is_searched_alone_as_in_any_batch(nano, optimizer):
    nano = nano.double()  # rounding aside
    images, labels, positions = batch(5)
    images = images.double()
    together = search(nano, images, labels, positions, optimizer=optimizer)
    for index in range(5):
        one = slice(index, index + 1)
        alone = search(nano, images[one], labels[one], positions[one], optimizer=optimizer)
        torch.testing.assert_close(alone.trajectory[0], together.trajectory[index], atol=1e-6, rtol=0)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_micro_batches_change_nothing(nano, objective):
    images, labels, positions = batch(5)
    options = {"objective": objective, "keys": [*"abcde"], "seed": 3}
    whole, parts = (search(nano, images, labels, positions, max_batch=size, **options) for size in (None, 2))
    torch.testing.assert_close(parts.trajectory, whole.trajectory, atol=1e-5, rtol=0)
    torch.testing.assert_close(parts.losses, whole.losses, atol=1e-5, rtol=1e-4)
    assert parts.best_step.tolist() == whole.best_step.tolist()


# The model is only read


def test_the_model_is_as_before_and_no_parameter_has_a_gradient(nano):
    nano.train()
    nano.vit.blocks[0].eval()
    nano.vit.head.requires_grad_(False)
    modes = {name: module.training for name, module in nano.named_modules()}
    flags = {name: parameter.requires_grad for name, parameter in nano.named_parameters()}
    images, labels, positions = batch(2)
    images.requires_grad_()
    search(nano, images, labels, positions, steps=2)
    assert modes == {name: module.training for name, module in nano.named_modules()}
    assert flags == {name: parameter.requires_grad for name, parameter in nano.named_parameters()}
    assert all(parameter.grad is None for parameter in nano.parameters())
    assert images.grad is None
    assert not positions.requires_grad


def test_during_the_search_the_model_is_frozen_and_does_not_drop_out():
    seen = []

    class Watched(Bowl):
        def forward(self, images, positions):
            parameters = any(parameter.requires_grad for parameter in self.parameters())
            seen.append((self.training, self.drop.training, parameters, images.requires_grad))
            return super().forward(images, positions)

    images, labels, positions = start()
    search(Watched([0.5, 0.5]).train(), images.requires_grad_(), labels, positions, steps=3)
    assert seen == [(False, False, False, False)] * 4  # steps + 1 calls


def test_a_search_inside_no_grad_and_inference_mode_works(nano):
    images, labels, positions = batch(2)
    expected = search(nano, images, labels, positions).trajectory
    with torch.no_grad():
        torch.testing.assert_close(search(nano, images, labels, positions).trajectory, expected)
    with torch.inference_mode():
        inside = search(nano, images.clone(), labels.clone(), positions.clone()).trajectory
    torch.testing.assert_close(inside, expected)


def test_mixed_precision_follows_the_full_one(nano):
    images, labels, positions = batch(4)
    full = search(nano, images, labels, positions)
    mixed = search(nano, images, labels, positions, mixed_precision=True)
    assert mixed.trajectory.dtype == mixed.logits.dtype == torch.float32
    torch.testing.assert_close(mixed.logits[:, 0], full.logits[:, 0], atol=0.05, rtol=0.05)
    assert (mixed.losses[:, -1] < mixed.losses[:, 0]).all()


# Grids


def test_positions_snap_to_the_nearest_cell():
    cells = [0.125, 0.375, 0.625, 0.875]
    places = torch.tensor([[0.0, 0.25 + 1e-4], [0.24, 0.51], [1.0, 0.99]])
    expected = [[cells[0], cells[1]], [cells[0], cells[2]], [cells[3], cells[3]]]
    assert snapped(places, (4, 4)).tolist() == expected
    assert snapped(torch.tensor([[0.9, 0.9]]), (1, 2)).tolist() == [[0.5, 0.75]]


def test_snapping_at_the_end_leaves_the_way_free():
    images, labels, positions = start()
    model = Bowl([0.3, 0.6]).eval()
    free = search(model, images, labels, positions, steps=10, lr=0.05)
    found = search(model, images, labels, positions, steps=10, lr=0.05, grid=(4, 4))
    torch.testing.assert_close(found.trajectory[:, :-1], free.trajectory[:, :-1])
    torch.testing.assert_close(found.positions, snapped(free.positions, (4, 4)))
    torch.testing.assert_close(found.logits[:, -1], model(images, found.positions))
    assert found.best_step.tolist() == [10] * 3  # the only step on the grid


def test_at_every_step_the_model_reads_only_cells_and_still_gets_there():
    images, labels, positions = start()
    options = {"grid": (4, 4), "snap": "every-step", "lr": 0.02}
    found = search(Bowl([0.3, 0.6]), images, labels, positions, steps=60, **options)
    torch.testing.assert_close(found.trajectory, snapped(found.trajectory, (4, 4)))
    # The cell nearest to (0.3, 0.6) is (0.375, 0.625); steps are far shorter than a cell.
    assert found.best.tolist() == [[[0.375, 0.625]] * 4] * 3


# Objectives


def test_the_entropy_of_known_distributions():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(entropy(logits), torch.tensor([math.log(4), 0.0]))


def test_wrong_labels_are_seeded_never_right_and_equally_likely():
    labels = torch.tensor([0, 1, 2, 3]).repeat(5000)
    wrong = wrong_labels(labels, 4, torch.Generator().manual_seed(0))
    assert torch.equal(wrong, wrong_labels(labels, 4, torch.Generator().manual_seed(0)))
    assert (wrong != labels).all()
    shares = torch.stack([torch.bincount(wrong[labels == label], minlength=4) for label in range(4)]) / 5000
    torch.testing.assert_close(shares, (1 - torch.eye(4)) / 3, atol=0.03, rtol=0)


def test_obfuscation_descends_on_wrong_labels(nano):
    images, labels, positions = batch(6)
    found = search(nano, images, labels, positions, objective="obfuscate", generator=torch.Generator().manual_seed(0))
    assert (found.target != labels).all()
    same = search(nano, images, found.target, positions)
    torch.testing.assert_close(found.trajectory, same.trajectory)


def test_a_function_is_an_objective(nano):
    images, labels, positions = batch(3)

    def margin(logits, labels):
        return -logits.gather(1, labels[:, None])[:, 0]

    found = search(nano, images, labels, positions, objective=margin)
    torch.testing.assert_close(found.losses[:, 0], margin(nano(images, positions), labels), atol=1e-5, rtol=1e-5)
    assert (found.losses[:, -1] < found.losses[:, 0]).all()


def test_settings_can_be_changed_one_by_one(nano):
    images, labels, positions = batch(2)
    long = search(nano, images, labels, positions, PRESETS["paper-long"], steps=3, objective="entropy")
    same = search(nano, images, labels, positions, steps=3, lr=1e-2, objective="entropy")
    assert torch.equal(long.trajectory, same.trajectory)
    assert PRESETS["paper-long"].changed(lr=None) == PRESETS["paper-long"]
    with pytest.raises(InputError, match="no setting of a search 'step'; did you mean 'steps'"):
        search(nano, images, labels, positions, step=3)
    with pytest.raises(InputError, match="no optimizer 'adm'"):
        SearchSettings(optimizer="adm")


# Bad input


@pytest.mark.parametrize(
    "change, message",
    [
        ({"labels": torch.tensor([0, 10])}, "between 0 and 9.*got 10"),
        ({"labels": torch.tensor([0.5, 1.0])}, "one integer per image, got .*float32"),
        ({"labels": None}, "needs labels; without them use 'agree' or 'entropy'"),
        ({"steps": 0}, "at least 1 step, got 0"),
        ({"lr": 0.0}, "positive"),
        ({"max_batch": 0}, "at least 1 image"),
        ({"objective": "decent"}, "did you mean 'descent'"),
        ({"positions": torch.rand(3, 5, 2)}, r"shape \(2, N, 2\), got \(3, 5, 2\)"),
        ({"positions": torch.full((2, 5, 2), torch.nan)}, "NaN"),
        ({"images": torch.full((2, 3, 32, 32), torch.nan)}, "not finite"),
        ({"objective": "agree", "dense": torch.zeros(3, 10)}, r"logits of shape \(2, classes\), got \(3, 10\)"),
        ({"objective": "agree", "dense": torch.zeros(2, 7)}, r"logits of shape \(2, 10\), got \(2, 7\)"),
        ({"objective": lambda logits, labels: logits.mean()}, r"one value per image, \(2,\), got \(\)"),
        ({"model": lambda images, positions: torch.zeros(2, 10)}, "no gradient to positions"),
        ({"model": lambda images, positions: positions.sum()}, r"logits of shape \(2, classes\), got \(\)"),
        ({"model": lambda images, positions: positions.mean(1), "objective": "agree"}, "pass dense="),
        ({"objective": "obfuscate", "model": lambda images, positions: positions.sum(1)[:, :1]}, "least two classes"),
    ],
)
def test_bad_input_is_one_sentence(nano, change, message):
    images, labels, positions = batch(2)
    labels = labels if change.get("objective") != "obfuscate" else labels * 0
    given = {"model": nano, "images": images, "labels": labels, "positions": positions, **change}
    with pytest.raises(InputError, match=message):
        search(**given)
    assert all(parameter.requires_grad for parameter in nano.parameters())


def batch(count, tokens=5):
    generator = torch.Generator().manual_seed(count)
    images = torch.rand(count, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (count,), generator=generator)
    return images, labels, 0.1 + 0.8 * torch.rand(count, tokens, 2, generator=generator)
