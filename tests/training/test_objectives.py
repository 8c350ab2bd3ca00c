import copy
import math

import pytest
import torch
from torch.nn import functional as F

from spot.draws import Draw, generator
from spot.errors import InputError
from spot.training.batches import MicroBatch
from spot.training.objectives import OBJECTIVES, Distil, Masked, Supervised, sample_map
from spot.training.recipes import RECIPES
from tests.conftest import make_nano, random_policy
from tests.training.small_run import small_recipe

IMAGES = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8)
WHOLE = MicroBatch(step=3, first=0, batch_size=8, images=IMAGES, labels=LABELS)
STILL = WHOLE._replace(step=2)  # a step in which distillation does not move tokens at random
PLAIN = {"mixup": 0.0, "cutmix": 0.0, "drop_path": 0.0}


def one_pass(tokens: int) -> dict:
    """Changes to a recipe for distillation: one forward pass with this many tokens."""
    return {"budgets": ((tokens,),), "shares": (1.0,), "weights": (1.0,)}


def halves() -> list[MicroBatch]:
    return [MicroBatch(3, first, 8, IMAGES[first : first + 4], LABELS[first : first + 4]) for first in (0, 4)]


# Supervised


def test_supervised_on_the_grid_is_the_cross_entropy_of_the_timm_model():
    model = make_nano()
    grid = {"priors": ("isotropic",), **PLAIN}  # with 16 tokens: the grid of 4 × 4
    recipe = small_recipe("cls-in1k", smoothing=0.0, **grid)
    loss, correct = Supervised(model, recipe)(WHOLE)
    logits = model.vit(IMAGES)
    torch.testing.assert_close(loss, F.cross_entropy(logits, LABELS))
    assert correct == (logits.argmax(1) == LABELS).sum()
    smooth = Supervised(model, small_recipe("cls-in1k", smoothing=0.1, **grid))(WHOLE).loss
    torch.testing.assert_close(smooth, F.cross_entropy(logits, LABELS, label_smoothing=0.1))


def test_mixing_changes_images_the_same_way_every_time():
    objective = Supervised(make_nano(), small_recipe("cls-in1k", drop_path=0.0))
    first, again = objective(WHOLE).loss, objective(WHOLE).loss
    assert torch.equal(first, again)
    assert not torch.equal(first, Supervised(make_nano(), small_recipe("cls-in1k", **PLAIN))(WHOLE).loss)
    seven = WHOLE._replace(images=IMAGES[:7], labels=LABELS[:7])
    with pytest.raises(InputError, match="even number of images per pass, got 7"):
        objective(seven)
    assert Supervised(make_nano(), small_recipe("cls-in1k", mix_share=0.0))(seven).loss > 0  # nothing to pair


@pytest.mark.parametrize("name", [name for name in RECIPES if not name.startswith("scenes")])
def test_a_step_of_every_recipe_sees_windows_off_the_grid(name):
    """isotropic with as many tokens as the grid, as the paper's table has it, is the grid: plain fine-tuning."""
    model = make_nano()
    model.prior = "center"  # a recipe says itself where tokens go
    recipe = small_recipe(name)
    positions = []
    objective = OBJECTIVES[type(recipe)](model, recipe)
    objective.trained().tokenizer.register_forward_pre_hook(lambda _, given: positions.append(given[1]))
    for step in range(4):
        objective(WHOLE._replace(step=step)).loss.backward()
    # Whole numbers on the grid of 4 × 4.
    cells = torch.cat([each[..., :2].flatten(0, 1) for each in positions]) * 4 - 0.5
    off = ((cells - cells.round()).abs() > 0.02).any(1).float().mean()
    assert off > 0.3


@pytest.mark.parametrize("prior, sentence", [("unifrom", "uniform"), ("salient", "needs maps")])
@pytest.mark.parametrize("name", ["cls-in1k", "distil", "mae-in1k"])
def test_a_prior_that_cannot_be_trained_with_is_refused_before_training(name, prior, sentence):
    recipe = small_recipe(name, priors=(prior,))
    with pytest.raises(InputError, match=sentence):
        OBJECTIVES[type(recipe)](make_nano(), recipe)


def positions_of(objective, part: MicroBatch = WHOLE) -> torch.Tensor:
    """Where an objective puts the tokens of its model."""
    seen = []
    hook = objective.trained().tokenizer.register_forward_pre_hook(lambda _, given: seen.append(given[1]))
    objective(part)
    hook.remove()
    return seen[-1]


@pytest.mark.parametrize("tokens", [4, 9])
def test_training_places_tokens_where_the_model_does(tokens):
    """`center` fades to the model's own grid, here 4 × 4, in training as in evaluation."""
    model = make_nano(prior="center", tokens=tokens)
    expected = model.place(IMAGES)
    for objective in (
        Supervised(model, small_recipe("cls-in1k", priors=("center",), budgets=(tokens,), **PLAIN)),
        Distil(model, small_recipe("distil", priors=("center",), **one_pass(tokens), **PLAIN)),
    ):
        assert torch.equal(positions_of(objective, STILL), expected)


def test_supervised_draws_a_budget_and_a_prior_for_each_step():
    recipe = small_recipe("cls-in1k", budgets=(4, 9), priors=("center", "isotropic"), **PLAIN)
    objective = Supervised(make_nano(), recipe)
    placed = [positions_of(objective, WHOLE._replace(step=step)) for step in range(20)]
    assert {positions.shape[1] for positions in placed} == {4, 9}
    assert len({positions.numpy().tobytes() for positions in placed}) == 4


def test_the_draws_of_a_step_do_not_follow_those_of_another_draw():
    """Step 13 placed tokens with the numbers that chose the budget of step 11, its own name and step exchanged."""
    model, tokens = make_nano(), 5
    objective = Supervised(model, small_recipe("cls-in1k", priors=("uniform",), budgets=(tokens,), **PLAIN))
    for name in Draw:
        theirs = model.place(IMAGES, tokens=tokens, prior="uniform", generator=generator(0, name, Draw.PLACE))
        ours = positions_of(objective, WHOLE._replace(step=int(name)))
        assert torch.equal(ours, theirs) == (name is Draw.PLACE)


# Distil


def distil(**changes) -> Distil:
    return Distil(make_nano(), small_recipe("distil", **changes))


def test_only_off_the_grid_has_the_student_to_learn_and_the_teacher_stays_as_it_was():
    assert abs(distil(**one_pass(16))(WHOLE).loss) < 1e-5
    objective = distil()
    before = [parameter.clone() for parameter in objective._teacher[0].parameters()]
    loss = objective(WHOLE).loss
    loss.backward()
    assert loss > 0.01
    assert all(parameter.grad is None for parameter in objective._teacher[0].parameters())
    with torch.no_grad():
        for parameter in objective.model.parameters():
            parameter.sub_(0.01 * parameter.grad)
    after = list(objective._teacher[0].parameters())
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert objective(WHOLE).loss < loss
    assert not any(name.startswith("_teacher") for name in objective.state_dict())


def test_the_loss_is_the_divergence_of_classes_and_the_cosine_distance_of_features():
    objective = distil(**one_pass(9), priors=("isotropic",), features=0.0, **PLAIN)
    model = objective.model
    columns = (torch.arange(3) + 0.5) / 3
    positions = torch.cartesian_prod(columns, columns).expand(8, -1, -1)
    teacher, student = model.vit(IMAGES).softmax(1), model(IMAGES, positions).softmax(1)
    by_hand = sum(
        teacher[image, label] * (teacher[image, label].log() - student[image, label].log())
        for image in range(8)
        for label in range(10)
    )
    pooled = [
        model.forward_head(model.forward_features(IMAGES, at), pre_logits=True)
        for at in (model.grid(IMAGES), positions)
    ]
    apart = 1 - F.cosine_similarity(*pooled)
    torch.testing.assert_close(objective(STILL).loss, by_hand / 8 + apart.mean())


@pytest.mark.parametrize("name", ["distil", "mae-in1k"])
def test_the_loss_of_a_batch_is_the_mean_of_its_halves(name):
    recipe = small_recipe(name, **PLAIN)
    objective = OBJECTIVES[type(recipe)](make_nano(), recipe)
    torch.testing.assert_close(sum(objective(half).loss for half in halves()) / 2, objective(WHOLE).loss)


@pytest.mark.parametrize("share, taken", [(1.0, 8), (0.5, 4), (0.25, 2), (0.01, 1)])
def test_a_reading_takes_its_share_of_the_batch(share, taken):
    objective = distil()
    whole = objective.rows(share, 0, WHOLE)
    assert len(whole) == taken
    pieces = torch.cat([objective.rows(share, 0, part) + part.first for part in halves()])
    assert torch.equal(whole, pieces)


def test_budgets_and_priors_are_drawn_anew_at_every_step_and_stay_inside():
    objective = distil(budgets=((4, 9), (5,)))
    places = [objective.place(IMAGES, 0, WHOLE._replace(step=step)) for step in range(40)]
    assert {positions.shape[1] for positions in places} == {4, 9}
    assert all(positions.min() >= 0.5 / 32 and positions.max() <= 1 - 0.5 / 32 for positions in places)
    even = [positions for positions in places if positions.shape[1] == 4]
    assert len({positions.numpy().tobytes() for positions in even}) > 3


def test_the_teachers_map_is_read_where_tokens_stand():
    tokens = torch.tensor([[[0.0], [1.0], [10.0], [11.0]]])  # a 2 × 2 grid of cells at 0.25 and 0.75
    positions = torch.tensor([[[0.25, 0.25], [0.25, 0.75], [0.75, 0.25], [0.5, 0.25], [0.5, 0.5], [0.0, 1.0]]])
    read = sample_map(tokens, (2, 2), positions)[0, :, 0]
    torch.testing.assert_close(read, torch.tensor([0.0, 1.0, 10.0, 5.0, 5.5, 1.0]))


def test_another_model_of_the_same_shape_may_teach():
    teacher = make_nano(seed=1)
    recipe = small_recipe("distil", **one_pass(16))
    assert Distil(make_nano(), recipe, teacher)(WHOLE).loss > 0.01
    assert abs(Distil(make_nano(seed=1), recipe, teacher)(WHOLE).loss) < 1e-5
    with pytest.raises(InputError, match="student's shape"):
        Distil(make_nano(), small_recipe("distil"), make_nano(depth=3))


def test_blending_goes_back_towards_the_teacher():
    objective = distil(blend=0.25)
    start = objective.model.vit.pos_embed.detach().clone()
    with torch.no_grad():
        objective.model.vit.pos_embed.add_(4.0)
    torch.testing.assert_close(objective.finish(objective.model).vit.pos_embed.detach(), start + 1.0)


def test_weights_that_follow_the_budget_are_trained_as_they_are_used():
    teacher, student = make_nano(seed=1), make_nano()
    share = round(16 * math.log(16 / 6) / math.log(16 / 4)) / 16
    by_hand = copy.deepcopy(student)
    for name, parameter in by_hand.named_parameters():
        base = dict(teacher.named_parameters())[name].detach()
        parameter.data = base + share * (parameter.detach() - base)
    expected = Distil(by_hand, small_recipe("distil", **one_pass(6)), teacher)(WHOLE).loss
    loss = Distil(student, small_recipe("distil", **one_pass(6), min_tokens=4), teacher)(WHOLE).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for ours, theirs in zip(student.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, share * theirs.grad, atol=1e-6, rtol=1e-3)


def test_on_the_grid_such_weights_have_nothing_to_learn_and_no_pass_is_made():
    alone = distil(budgets=((16,), (6,)), shares=(1.0, 1.0), weights=(1.0, 1.0), min_tokens=4)
    beside = distil(**one_pass(6), min_tokens=4)
    assert 0 < alone(WHOLE).loss < beside(WHOLE).loss
    alone.model.set_grad_checkpointing()
    with pytest.raises(InputError, match="checkpointing"):
        alone(WHOLE)


def test_tokens_can_be_where_the_policy_looks_in_each_image_of_a_part():
    model, recipe = make_nano(), small_recipe("distil", **one_pass(6), priors=("learned",))
    with pytest.raises(InputError, match="has no learned prior"):
        Distil(model, recipe)
    model.policy = random_policy(model, side=8)
    objective = Distil(model, recipe)
    with torch.no_grad():
        model.vit.pos_embed.add_(1.0)  # the policy was the model's when training began
    placed = objective.place(IMAGES, 0, STILL)
    torch.testing.assert_close(placed, model.policy(IMAGES, 6))
    parts = [part._replace(step=STILL.step) for part in halves()]
    assert torch.equal(placed, torch.cat([objective.place(part.images, 0, part) for part in parts]))


# Distil with windows of several sizes


def sizes(**changes) -> Distil:
    """4 windows of 16 pixels, of twice the patch's side, tile an image of 32 × 32."""
    passes = {"budgets": ((4,), (9,), (16,)), "shares": (1.0, 1.0, 1.0), "weights": (1.0, 1.0, 1.0)}
    return Distil(make_nano(), small_recipe("distil-sizes", **{**passes, "priors": ("isotropic",), **changes}))


def test_scales_are_drawn_for_each_image_around_auto_and_end_at_tiling():
    distil = sizes()
    placements = [distil.place(IMAGES, 0, WHOLE._replace(step=step)) for step in range(40)]
    scales = torch.stack([each[..., 2] for each in placements])
    assert scales.shape == (40, 8, 4)
    assert (scales == scales[..., :1]).all()  # one for all windows of an image
    assert scales.min() >= 1 and scales.max() <= 2 and scales.std() > 0.1
    assert scales.log2().median() == pytest.approx(0.7, abs=0.1)
    assert distil.place(IMAGES, 2, WHOLE).shape == (8, 16, 2)  # the grid has no scale
    parts = torch.cat([distil.place(part.images, 0, part) for part in halves()])
    assert torch.equal(parts, distil.place(IMAGES, 0, WHOLE))
    distil(WHOLE).loss.backward()
    assert distil.model.vit.blocks[0].mlp.fc1.weight.grad.abs().sum() > 0
    assert distil.finish(distil.model).scale == "auto"


def test_the_target_of_a_large_window_is_the_mean_of_the_map_over_it():
    tokens = torch.randn(1, 16, 6, generator=torch.Generator().manual_seed(0))
    grid = tokens.transpose(1, 2).unflatten(2, (4, 4))
    quarters = torch.tensor([[[y, x, 2.0] for y in (0.25, 0.75) for x in (0.25, 0.75)]])
    # Window and cells begin and end together, but a bilinear map is smooth across cells: blurred by one cell.
    expected = F.avg_pool2d(F.avg_pool2d(F.pad(grid, (1, 1, 1, 1), mode="replicate"), 3, 1), 2)
    close = sample_map(tokens, (4, 4), quarters)[0].T.view(6, 2, 2)
    assert F.cosine_similarity(close.flatten(), expected.flatten(), 0) > 0.8
    # At scale 1 it is the bilinear map; over the whole map of equal cells it is their value.
    points = torch.rand(1, 7, 2, generator=torch.Generator().manual_seed(1))
    scaled = torch.cat([points, torch.ones(1, 7, 1)], -1)
    torch.testing.assert_close(sample_map(tokens, (4, 4), scaled), sample_map(tokens, (4, 4), points))
    torch.testing.assert_close(sample_map(torch.ones(1, 16, 3), (4, 4), quarters), torch.ones(1, 4, 3))


# Masked


def test_masked_shows_a_quarter_of_the_tokens_and_other_ones_next_time():
    objective = Masked(make_nano(), small_recipe("mae-in1k"))
    shown = objective.draw_visible(WHOLE)
    assert shown.shape == (8, 4)
    assert all(len(set(row.tolist())) == 4 for row in shown)
    assert not torch.equal(shown, objective.draw_visible(WHOLE._replace(step=4)))
    assert torch.equal(shown, torch.cat([objective.draw_visible(part) for part in halves()]))


def test_masked_needs_something_to_show_and_something_to_hide():
    with pytest.raises(InputError, match="of 16 tokens"):
        Masked(make_nano(), small_recipe("mae-in1k", visible=0.01))
