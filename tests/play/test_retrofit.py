"""The page with a shipped retrofit, whose weights depend on the budget: predict, then search, then another budget."""

from pathlib import Path

import torch

from spot.models.family import Family
from spot.play.request import Request
from spot.play.session import ACTIONS, Session
from spot.play.worker import Job
from tests.conftest import VIT_TINY

PHOTO = Path(__file__).parents[2] / "docs" / "images" / "photos" / "coffee.jpg"


def asked(session, kind, **fields):
    """All answers to one request."""
    answers = []
    ACTIONS[kind](session, Request(fields), Job(lambda job: None, answers.append))
    return answers


def test_search_after_a_prediction_and_weights_that_follow_the_slider(shared_data):
    weights = shared_data / "weights" / f"{VIT_TINY}.safetensors"
    session = Session([PHOTO], ["vit-ti"], [weights])
    assert isinstance(session.source("vit-ti"), Family)
    view = {"picture": next(iter(session.pictures.samples)), "model": "vit-ti"}
    for tokens in (9, 25):
        placed = asked(session, "place", **view, tokens=tokens, prior="learned", seed=0)[0]["positions"]
        top = asked(session, "predict", **view, positions=placed)[0]["top"]
        family = Family("vit-ti", weights=weights)
        with torch.no_grad():
            image = session.view(view["picture"], "vit-ti").images
            expected = family.model(tokens=tokens)(image, torch.tensor([placed])).softmax(1).amax().item()
        assert abs(top[0]["p"] - expected) < 1e-4
        steps = asked(session, "search", **view, positions=placed, objective="agree", preset="paper", seed=0)
        assert steps[-1]["done"] and steps[-2]["positions"] != placed
