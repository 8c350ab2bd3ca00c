"""Measurements on disk: found by what determines them, never half written, never of another version."""

import pytest
import torch

import spot
from paper import cache as module
from paper.cache import Cache

ABOUT = {"kind": "reading", "backbone": "a", "placement": "isotropic", "tokens": 9, "seed": 0}


def test_what_was_put_is_found_by_the_same_description_only(tmp_path):
    cache = Cache(tmp_path)
    cache.put(ABOUT, {"ranks": torch.tensor([0, 3])})
    assert cache.get(dict(reversed(ABOUT.items())))["ranks"].tolist() == [0, 3]
    assert cache.get({**ABOUT, "seed": 1}) is None
    assert "isotropic" in cache.path(ABOUT).name


def test_a_damaged_measurement_is_named_and_made_again(tmp_path, capsys):
    cache = Cache(tmp_path)
    cache.put(ABOUT, {"ranks": torch.arange(100)})
    path = cache.path(ABOUT)
    path.write_bytes(path.read_bytes()[:-8])
    assert cache.get(ABOUT) is None
    assert path.name in capsys.readouterr().err


@pytest.mark.parametrize("change", [(module, "FORMAT", 0), (spot, "__version__", "0.0.1")])
def test_a_measurement_of_another_version_is_named_and_made_again(tmp_path, capsys, monkeypatch, change):
    cache = Cache(tmp_path)
    with monkeypatch.context() as before:
        before.setattr(*change)
        cache.put(ABOUT, {"ranks": torch.arange(3)})
    assert cache.get(ABOUT) is None
    assert "another version" in capsys.readouterr().err.replace("\n", " ")
    cache.put(ABOUT, {"ranks": torch.arange(3)})
    assert cache.get(ABOUT) is not None
