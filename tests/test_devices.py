"""Where results live when the model is on a GPU: nothing is left behind, nothing is mixed. No GPU is needed."""

import pytest
import torch

from paper.saliency_gain import score
from paper.trial_search import jittered, trial_search, whole_pixels
from spot.data.loader import Batch, Loader
from spot.evaluation.accuracy import Setting, evaluate
from spot.evaluation.knn import Bank, classify
from spot.models.baselines import BASELINES
from spot.models.tome import ToMe
from spot.placement.oracle import OBJECTIVES, moved_at_random, search
from spot.placement.priors import PRIORS
from spot.training.batches import MicroBatch
from spot.training.objectives import OBJECTIVES as TRAINED
from tests.conftest import make_nano
from tests.fake_cuda import fake_cuda, moved
from tests.training.small_run import small_recipe

KEYS = ["a", "b", "c", "d"]


@pytest.fixture
def cuda(monkeypatch):
    """A nano model, four images and their labels on a GPU."""
    model = make_nano()
    with fake_cuda(monkeypatch) as mode:
        labels = torch.empty(4, dtype=torch.int64, device="cuda")
        yield moved(model, mode), torch.empty(4, 3, 32, 32, device="cuda"), labels


def on_cuda(*tensors):
    return all(tensor.device.type == "cuda" for tensor in tensors)


@pytest.mark.parametrize("prior", PRIORS)
def test_a_model_places_and_predicts_where_its_images_are(cuda, prior):
    model, images, _ = cuda
    maps = torch.empty(4, 32, 32, device="cuda") if PRIORS[prior].needs_map else None
    for how in ({"generator": torch.Generator().manual_seed(0)}, {"keys": KEYS}):
        positions = model.place(images, tokens=4, prior=prior, maps=maps, **how)
        assert on_cuda(positions, model(images, positions)) and positions.dtype == torch.float32


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_search_stays_on_the_gpu(cuda, objective):
    model, images, labels = cuda
    found = search(model, images, labels, model.place(images, tokens=4), objective=objective, steps=2)
    assert on_cuda(found.trajectory, found.losses, found.logits, found.best_step, found.positions)


def test_controls_and_trials_stay_on_the_gpu(cuda):
    model, images, labels = cuda
    start = model.place(images, tokens=4)
    moves = jittered(start, 2, (32, 32)), moved_at_random(start, start, (32, 32)), whole_pixels(start, (32, 32), 8)
    assert on_cuda(*moves)
    for on_grid in (True, False):
        found = trial_search(model, images, labels, start, (4, 4), passes=3, on_grid=on_grid, keys=KEYS)
        assert on_cuda(found.trajectory, found.losses, found.logits)
    assert on_cuda(score(torch.empty(4, 32, 32, device="cuda"), start, 8))


@pytest.mark.parametrize("name", [name for name in BASELINES if name != "merged-learned"])  # merged, with a policy
def test_baselines_predict_where_their_images_are(cuda, name):
    model, images, _ = cuda
    baseline = BASELINES[name].build(model, 16 if BASELINES[name].dense else 9)
    assert on_cuda(baseline(images), baseline.place(images, keys=KEYS))


def test_merging_keeps_everything_on_the_gpu(cuda):
    model, images, _ = cuda
    merged = ToMe(model, 4).merge(images)
    assert on_cuda(merged.features, merged.sizes, merged.sources, merged.positions)


@pytest.mark.parametrize("recipe", ["cls-in1k", "distil", "distil-sizes", "mae-in1k"])
def test_objectives_have_their_loss_on_the_gpu(cuda, recipe):
    model, images, labels = cuda
    given = small_recipe(recipe)
    objective = TRAINED[type(given)](model, given)
    objective = moved(objective, images.fake_mode).train()  # a decoder is new: accelerate puts it there
    for teacher in getattr(objective, "_teacher", ()):
        teacher.to = lambda device, teacher=teacher: teacher  # it is there, and fake modules cannot be moved
    outcome = objective(MicroBatch(step=1, first=0, batch_size=4, images=images, labels=labels))
    assert on_cuda(outcome.loss, outcome.correct)


class OneBatch(Loader):
    """A loader of one batch that is there."""

    def __init__(self, batch):
        self.batch, self.samples, self.seconds, self.waited, self.skipped = batch, len(batch.keys), 0.0, 0.0, []

    def __iter__(self):
        yield self.batch


def test_an_evaluation_brings_its_results_to_the_cpu(cuda):
    model, images, labels = cuda
    settings = [Setting("isotropic", 4), Setting("uniform", 4), Setting("tome", 4), Setting("resize", 4)]
    made = evaluate(model, OneBatch(Batch(images.cpu(), labels.cpu(), KEYS)), settings, features=True, shown=False)
    results = made.labels, made.predictions, made.ranks, made.losses, *made.features
    assert len(made.features) == 4 and {each.device.type for each in results} == {"cpu"}


def test_neighbours_are_found_where_the_features_are(cuda):
    bank = Bank(torch.empty(30, 8), torch.empty(30, dtype=torch.int64))
    assert on_cuda(classify(torch.empty(5, 8, device="cuda"), bank, k=3, chunk=10))
