"""python -m paper, as a person would type it."""

import errno
import json

import pytest

from paper import cache
from paper.__main__ import main
from spot import store


@pytest.fixture
def given(small, tmp_path):
    """The options that name two small models and sixty images."""
    return [
        *("--model", str(small / "one"), str(small / "two")),
        *("--data", str(small / "images"), "--tokens", "4", "9", "--seeds", "2", "--workers", "0"),
        *("--out", str(tmp_path / "out")),
    ]


def refused(capsys, *arguments) -> str:
    """What python -m paper says when it ends with code 2."""
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    assert ended.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_a_study_writes_its_table_figure_and_everything_as_json_and_redraws_without_measuring(given, tmp_path, capsys):
    main(["transfer", *given])
    out = tmp_path / "out"
    assert {path.name for path in out.glob("transfer.*")} == {f"transfer.{end}" for end in ("json", "md", "png", "pdf")}
    assert (out / "transfer.png").read_bytes()[:4] == b"\x89PNG" and (out / "transfer.pdf").read_bytes()[:4] == b"%PDF"
    content = json.loads((out / "transfer.json").read_text())
    assert content["settings"]["images"] == 60 and content["settings"]["tokens"] == [4, 9]
    assert set(content["settings"]["models"]) == {"one", "two"}
    assert content["versions"]["torch"] and content["settings"]["command"].startswith("python -m paper")
    assert "paper: MAE-IN1k → CLS-IN21k | 25 | 46.85 | 56.7 | +9.9" in (out / "transfer.md").read_text()
    assert "transfer" in capsys.readouterr().out
    before = (out / "transfer.md").read_text()
    for path in (out / "transfer.md", out / "transfer.png"):
        path.unlink()
    main(["transfer", "--out", str(out), "--redraw"])  # not even the models are named
    assert (out / "transfer.md").read_text() == before and (out / "transfer.png").is_file()
    assert "no result" in refused(capsys, "priors", "--out", out, "--redraw")


def test_only_measures_some_placements_and_keeps_the_other_rows(given, tmp_path, capsys):
    main(["robustness", *given])
    file = tmp_path / "out" / "robustness.json"
    content = json.loads(file.read_text())
    whole = content["rows"]
    old = [row if row["placement"] == "isotropic" else {**row, "top1": 12.5} for row in whole]
    content["rows"] = [row for row in old if row["placement"] != "boundary"]  # stale, and one is missing
    file.write_text(json.dumps(content))
    main(["robustness", *given, "--only", "boundary", "ascent"])
    again = json.loads(file.read_text())
    new = {(row["backbone"], row["placement"]): row for row in again["rows"]}
    assert new.keys() == {(row["backbone"], row["placement"]) for row in whole}
    for row, was in zip(whole, old, strict=True):
        measured = row["placement"] in ("boundary", "ascent")
        assert new[row["backbone"], row["placement"]] == (row if measured else was)
    (added,) = again["settings"]["added"]
    assert added["only"] == ["boundary", "ascent"]
    assert again["settings"]["command"] == content["settings"]["command"]
    file.write_text(json.dumps({**again, "rows": [{**row, "top1": 12.5} for row in again["rows"]]}))
    assert "isotropic had 12.50 % there" in refused(capsys, "robustness", *given, "--only", "ascent")
    assert "same seeds: 2, not 3" in refused(capsys, "robustness", *given, "--only", "ascent", "--seeds", "3")
    assert "not for transfer" in refused(capsys, "transfer", *given, "--only", "ascent")
    assert "no result" in refused(capsys, "priors", *given, "--only", "sobol")


def test_all_goes_on_after_a_study_that_cannot_be_made(given, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("paper.__main__.STUDIES", ("transfer", "robustness"))
    alone = [*given[:1], given[1], *given[3:]]  # one model: nothing to transfer to
    said = refused(capsys, "all", *alone)
    assert said.startswith("paper: transfer: transfer is between models")
    assert (tmp_path / "out" / "robustness.json").is_file()
    content = json.loads((tmp_path / "out" / "findings.json").read_text())
    holds = {row["claim"]: row["holds"] for row in content["rows"]}
    assert holds["finding 4"] == "not decided"


def test_a_disk_that_fills_up_is_one_sentence_and_finished_work_stays(given, tmp_path, capsys, monkeypatch):
    kept = cache.write_tensors
    written = []

    def fills_up(path, *args):
        with store.disk_errors(path):
            if len(written) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        kept(path, *args)

    with monkeypatch.context() as full:
        full.setattr(cache, "write_tensors", fills_up)
        assert "the disk is full; finished work is kept" in refused(capsys, "robustness", *given)
    assert len(list((tmp_path / "out" / "cache" / "predictions").glob("*.safetensors"))) == 2
    main(["robustness", *given])
    assert (tmp_path / "out" / "robustness.json").is_file()


def test_bad_input_is_one_sentence(given, tmp_path, capsys):
    assert "did you mean" in refused(capsys, "transfers")
    assert "with --model" in refused(capsys, "priors", "--data", tmp_path, "--out", tmp_path / "out")
    assert "knows 10 classes" in refused(capsys, "priors", *given[:3], "--out", tmp_path / "out")
    assert "at least one seed" in refused(capsys, "priors", *given, "--seeds", "0")
    assert "run python -m paper all first" in refused(capsys, "findings", "--out", tmp_path / "nothing")
