import json

import pytest
from PIL import Image

from spot.cli import main


def test_data_describes_the_scenes(capsys):
    main(["data", "scenes"])
    shown = capsys.readouterr().out
    assert "32 = 8 outlines × 4 textures" in shown
    assert "images/s" in shown


def test_show_saves_a_contact_sheet_of_every_class(tmp_path, capsys):
    sheet = tmp_path / "new" / "sheet.png"
    main(["data", "scenes", "--show", "--out", str(sheet), "--examples", "2"])
    with Image.open(sheet) as image:
        width, height = image.size
    # Twice enlarged: 4 cells of 2 × 64 pixels, 8 of 64, 4 between cells, and room for the names.
    assert width == 2 * (4 * 2 * 64 + 3 * 4) + 80
    assert height == 2 * (8 * 64 + 7 * 4) + 30
    assert "sheet.png" in capsys.readouterr().out


def test_every_factor_is_an_option_and_goes_into_the_file(tmp_path):
    file = tmp_path / "scenes.json"
    main(["data", "scenes", "--distractors", "2", "5", "--grid-offset", "0.5", "0.5", "--json", str(file)])
    factors = json.loads(file.read_text())["settings"]["difficulty"]
    assert factors["distractors"] == [2, 5]
    assert factors["grid_offset"] == [0.5, 0.5]


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--radius", "0.4", "0.3"], "radius must be a range"),
        (["--noise", "2"], "noise must be between 0 and 1"),
        (["--split", "tset"], "did you mean 'test'"),
        (["--show", "--examples", "0"], "at least one example"),
        (["--show", "--out", "/dev/null/sheet.png"], "/dev/null"),
        (["--show", "--out", "sheet.xyz"], "png"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, told, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["data", "scenes", *arguments])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert told in message
    assert message.count("\n") == 1


def test_needle_is_described_at_the_size_asked_for_and_has_no_factors_to_change(tmp_path, capsys):
    file = tmp_path / "needle.json"
    main(["data", "needle:128", "--json", str(file)])
    assert json.loads(file.read_text())["settings"]["difficulty"]["image_size"] == 128
    assert "128 × 128 RGB" in capsys.readouterr().out
    for words, told in (
        (["needle", "--noise", "0.1"], "those of needle are fixed, but for its size: needle:256"),
        (["needles"], "no built-in data set 'needles'"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["data", *words])
        assert stopped.value.code == 2 and told in capsys.readouterr().err
