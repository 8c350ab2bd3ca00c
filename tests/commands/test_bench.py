"""spot bench, on a model small enough to time in no time."""

import json

import pytest

from spot.cli import main
from tests.conftest import make_nano


@pytest.fixture
def folder(tmp_path):
    make_nano().save_pretrained(tmp_path / "nano")
    return tmp_path / "nano"


def test_it_times_every_method_at_every_budget_and_batch_size(folder, tmp_path, capsys):
    out, figure = tmp_path / "bench.json", tmp_path / "bench.png"
    given = [str(folder), "--tokens", "4", "9", "--batch-size", "1", "2", "--rounds", "2", "--threads", "1"]
    main(
        [
            "bench",
            *given,
            "--baseline",
            "plain",
            "patch-dropout",
            "tome",
            "elastic",
            "--json",
            str(out),
            "--plot",
            str(figure),
        ]
    )
    data = json.loads(out.read_text())
    methods = ["plain", *2 * ["spot", "patch-dropout", "tome", "elastic"]]
    assert [row["method"] for row in data["rows"]] == 2 * methods
    assert [row["budget"] for row in data["rows"]] == 2 * [16, *4 * [4], *4 * [9]]
    assert data["settings"]["threads"] == 1
    first, *others = data["rows"][:9]
    for row in others:
        assert row["MAC ratio"] == pytest.approx(first["GMACs"] / row["GMACs"])
    assert figure.read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "batch 1" in text
    assert "batch 2" in text


def test_budgets_are_by_default_parts_of_the_grid(folder, tmp_path):
    out = tmp_path / "bench.json"
    main(["bench", str(folder), "--baseline", "plain", "--batch-size", "1", "--rounds", "1", "--json", str(out)])
    assert [row["budget"] for row in json.loads(out.read_text())["rows"]] == [16, 2, 4, 8, 16]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tokens", "17"], "at most the 16 patches"),
        (["--tokens", "0"], "at least 1"),
        (["--rounds", "0"], "at least one round"),
        (["--device", "abacus"], "'abacus' cannot be used here"),
        (["--prior", "isotopic"], "isotropic"),
        (["vit_tiny_patch16_224"], "different sizes"),
    ],
)
def test_bad_input_is_one_sentence(folder, given, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", str(folder), *given])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_name_nobody_knows_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "vit_tiny_patch16_225"])
    assert stopped.value.code == 2
    assert "vit_tiny_patch16_224" in capsys.readouterr().err
