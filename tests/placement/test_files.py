import json

import pytest
import torch
from safetensors import safe_open

from spot.draws import generator_for
from spot.errors import InputError
from spot.placement.files import Placements, PlacementWriter
from spot.store import write_tensors

ABOUT = {"model": "vit", "seed": 3, "settings": {"lr": 3e-3, "steps": 2}}


def placements(keys, about=ABOUT, tokens=4, steps=2):
    """Positions that say whose they are: the n-th letter's are all n / 100."""
    levels = torch.tensor([(ord(key[0]) - ord("a")) / 100 for key in keys])
    trajectory = levels[:, None, None, None] + torch.arange(steps + 1.0)[:, None, None].expand(-1, tokens, 2) / 10
    return Placements(keys, trajectory, about, {"losses": levels[:, None].expand(-1, steps + 1).clone()})


def test_a_file_gives_back_what_was_saved(tmp_path):
    made = placements(["a/ü.jpg", "b.jpg", "c d.jpg"])
    made.save(tmp_path / "p.safetensors")
    read = Placements.load(tmp_path / "p.safetensors")
    assert list(read.keys) == ["a/ü.jpg", "b.jpg", "c d.jpg"]
    assert read.metadata == ABOUT
    assert torch.equal(read.trajectory, made.trajectory)
    assert torch.equal(read.values["losses"], made.values["losses"])
    assert [file.name for file in tmp_path.iterdir()] == ["p.safetensors"]


def test_the_file_can_be_read_without_this_package(tmp_path):
    placements(["a.jpg", "b.jpg"], steps=0).save(tmp_path / "p.safetensors")
    with safe_open(tmp_path / "p.safetensors", "pt") as file:
        assert file.get_tensor("positions").shape == (2, 4, 2)
        assert bytes(file.get_tensor("keys").numpy()).split(b"\0") == [b"a.jpg", b"b.jpg"]
        assert json.loads(file.metadata()["spot-placements"])["metadata"] == ABOUT


def test_positions_come_in_the_order_asked_for():
    made = placements(["a.jpg", "b.jpg", "c.jpg"])
    # Steps are a tenth apart, images a hundredth.
    torch.testing.assert_close(made.positions_for(["c.jpg", "a.jpg"])[:, 0, 0], torch.tensor([0.22, 0.20]))
    torch.testing.assert_close(made.positions_for(["b.jpg"], step=0)[:, 0, 0], torch.tensor([0.01]))
    assert made.positions.shape == (3, 4, 2)
    assert made.tokens == 4
    assert "b.jpg" in made
    assert "d.jpg" not in made
    assert Placements(["a", "b"], torch.rand(2, 7, 2)).positions_for(["b"]).shape == (1, 7, 2)  # one step


# Shards


def test_shards_become_one_file_in_the_order_of_the_data(tmp_path):
    writer = PlacementWriter(tmp_path / "p.safetensors", ABOUT)
    writer.append(placements(["c.jpg"]))
    writer.append(placements(["b.jpg", "a.jpg"]))
    assert not (tmp_path / "p.safetensors").exists()
    writer.finish(["a.jpg", "b.jpg", "c.jpg"])
    assert [file.name for file in tmp_path.iterdir()] == ["p.safetensors"]
    assert list(Placements.load(tmp_path / "p.safetensors").keys) == ["a.jpg", "b.jpg", "c.jpg"]


def test_a_new_writer_knows_what_is_done_and_a_finished_file_can_grow(tmp_path):
    path = tmp_path / "p.safetensors"
    PlacementWriter(path, ABOUT).append(placements(["a.jpg"]))
    writer = PlacementWriter(path, ABOUT)
    assert writer.done == {"a.jpg"}
    writer.finish(["a.jpg"])
    writer = PlacementWriter(path, ABOUT)
    assert writer.done == {"a.jpg"}
    writer.append(placements(["b.jpg"]))
    assert list(writer.finish(["b.jpg", "a.jpg"]).keys) == ["b.jpg", "a.jpg"]


def test_shards_left_behind_by_a_kill_during_the_merge_do_no_harm(tmp_path):
    path = tmp_path / "p.safetensors"
    writer = PlacementWriter(path, ABOUT)
    writer.append(placements(["a.jpg"]))
    writer.append(placements(["b.jpg"]))
    placements(["a.jpg", "b.jpg"]).save(path)  # written, and killed before the shards were removed
    merged = PlacementWriter(path, ABOUT).finish(["a.jpg", "b.jpg"])
    assert list(merged.keys) == ["a.jpg", "b.jpg"]
    assert not writer.shards.exists()


# Randomness and identity


def test_an_image_has_its_own_random_numbers():
    def numbers(seed, key):
        return torch.rand(3, generator=generator_for(seed, key)).tolist()

    assert numbers(0, "a.jpg") == numbers(0, "a.jpg")
    assert len({tuple(numbers(seed, key)) for seed in (0, 1, 11) for key in ("a.jpg", "b.jpg", "1a.jpg")}) == 9


# Bad input


def test_a_missing_image_is_named_with_its_nearest():
    with pytest.raises(InputError, match=r"no placement for image 'n01/cat_1.jpg'; did you mean 'n01/cat_2.jpg'"):
        placements(["n01/cat_2.jpg", "b.jpg"]).positions_for(["b.jpg", "n01/cat_1.jpg"])


@pytest.mark.parametrize("how", ["truncated", "newer", "nonsense"])  # tests/test_store.py has other damages
def test_a_damaged_or_foreign_file_is_refused_in_one_sentence(tmp_path, how):
    path = tmp_path / "p.safetensors"
    placements(["a.jpg", "b.jpg"]).save(path)
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-10])
    else:
        about = {"newer": {"version": 9}, "nonsense": {"version": 1, "metadata": []}}[how]
        write_tensors(path, {"positions": torch.rand(1, 4, 2)}, "spot-placements", about)
    with pytest.raises(InputError, match=r"p\.safetensors"):
        Placements.load(path)


def test_other_settings_are_refused_and_named(tmp_path):
    path = tmp_path / "p.safetensors"
    PlacementWriter(path, ABOUT).append(placements(["a.jpg"]))
    before = sorted(tmp_path.rglob("*"))
    changed = {**ABOUT, "settings": {"lr": 1e-2, "steps": 2}}
    with pytest.raises(InputError, match=r"made with settings.lr=0.003, now settings.lr=0.01; write to another"):
        PlacementWriter(path, changed)
    merged = Placements.merge([placements(["b.jpg"]), placements(["a.jpg", "c.jpg"])])
    torch.testing.assert_close(merged.values["losses"][:, 0], torch.tensor([0.01, 0.0, 0.02]))
    with pytest.raises(InputError, match="seed=3"):
        Placements.merge([placements(["a.jpg"]), placements(["b.jpg"], {**ABOUT, "seed": 4})])
    with pytest.raises(InputError, match="do not go into one file"):
        Placements.merge([placements(["a.jpg"]), placements(["b.jpg"], tokens=5)])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: placements(["a.jpg", "a.jpg"]), "two placements"),
        (lambda: placements(["a\0.jpg"]), "zero bytes"),
        (lambda: Placements(["a"], torch.rand(2, 4, 2)), "2 images, but there are 1 keys"),
        (lambda: Placements(["a"], torch.rand(1, 4, 2), values={"x": torch.zeros(3)}), "x is for 3 images"),
        (lambda: Placements(["a"], torch.rand(1, 4)), "shape"),
        (lambda: Placements(["a"], torch.full((1, 4, 2), torch.nan)), "finite"),
        (lambda: Placements.merge([]), "nothing to merge"),
        (lambda: PlacementWriter("p.pt", ABOUT), "to a .safetensors file, got p.pt"),
    ],
)
def test_what_cannot_be_placements_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
