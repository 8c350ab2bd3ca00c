"""The playground in a real browser. What the page shows is compared with what spot itself computes."""

import base64
import io
import json
import math
import re
import struct
import subprocess
import sys

import pytest
import torch
from PIL import Image
from playwright.sync_api import expect

import spot
from spot.data.picture import evaluation_transform, open_image
from spot.data.scenes import Scenes
from spot.placement.files import Placements
from tests.play.conftest import Served, opened, shown, view


def drag(page, start, end, panel=0):
    """Drag from one place of the picture to another, (y, x) as fractions."""
    box = page.locator("canvas.stage").nth(panel).bounding_box()
    at = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for y, x in (start, end)]
    page.mouse.move(*at[0])
    page.mouse.down()
    page.mouse.move(*at[1], steps=8)
    page.mouse.up()


def click(page, place, **options):
    box = page.locator("canvas.stage").first.bounding_box()
    page.locator("canvas.stage").first.click(
        position={"x": place[1] * box["width"], "y": place[0] * box["height"]}, **options
    )


def agrees(page, model, image, panel=0) -> bool:
    """Whether the page shows what the model says at the positions in the address."""
    with torch.no_grad():
        probabilities = model(image, view(page, panel)["positions"])[0].softmax(0)
    index, p = shown(page, panel)
    return index == int(probabilities.argmax()) and abs(p - probabilities.max().item()) < 1e-4


def searched(page):
    page.locator("#step-row").wait_for()


def test_the_page_opens_with_a_picture_tokens_and_what_the_model_says(page, scenes_a, scene):
    assert page.title() == "SPoT playground"
    assert page.locator(".top li").count() == 5
    assert page.locator("#strip button").count() == 24
    assert view(page)["positions"].shape == (1, 25, 2)
    assert agrees(page, scenes_a, scene)
    dense = scenes_a(scene, scenes_a.grid(scene).reshape(1, -1, 2))[0].softmax(0)
    assert spot.data.scenes.CLASSES[int(dense.argmax())] in page.locator(".dense").inner_text()


def test_a_dragged_token_changes_the_prediction_to_what_spot_computes_there(page, scenes_a, scene):
    before, said = view(page)["positions"], shown(page)
    drag(page, (0.5, 0.5), (0.62, 0.57))
    after = view(page)["positions"]
    moved = (after - before).abs().amax(-1)[0] > 1e-6
    assert moved.sum() == 1
    torch.testing.assert_close(after[0, moved][0], torch.tensor([0.62, 0.57]), atol=3e-3, rtol=0)
    assert agrees(page, scenes_a, scene)
    assert shown(page) != said


def test_the_loupe_shows_the_samples_that_the_token_reads(page, scenes_a, scene, served):
    drag(page, (0.5, 0.5), (0.53, 0.44))
    positions = view(page)["positions"]
    token = int(((positions - torch.tensor([0.53, 0.44])).abs().sum(-1)[0]).argmin())
    config = scenes_a.data_config
    mean, std = (torch.tensor(config[name])[:, None, None] for name in ("mean", "std"))
    window = spot.windows(scene, positions[:, token : token + 1], 8)[0, 0] * std + mean
    canvas = page.locator(".loupe canvas")
    pixels = Image.open(io.BytesIO(canvas.screenshot())).convert("RGB").resize((8, 8), Image.Resampling.BOX)
    seen = torch.tensor(list(pixels.getdata())).reshape(8, 8, 3).permute(2, 0, 1) / 255
    assert (seen - window.clamp(0, 1))[:, 1:-1, 1:-1].abs().mean() < 0.03  # round corners, and a browser's colours
    assert "between pixels" in page.locator(".loupe").inner_text()


def test_tokens_are_added_selected_moved_and_removed_by_mouse_and_keys(page):
    click(page, (0.2, 0.4), modifiers=["Shift"])
    assert view(page)["positions"].shape[1] == 26
    before = view(page)["positions"]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+ArrowDown")
    step = (view(page)["positions"] - before)[0, 25] * 64
    torch.testing.assert_close(step, torch.tensor([1.0, 0.1]), atol=1e-4, rtol=0)  # pixels
    page.keyboard.press("Delete")
    assert view(page)["positions"].shape[1] == 25
    click(page, (0.5, 0.5), click_count=2)
    assert view(page)["positions"].shape[1] == 24
    page.keyboard.press("a")
    page.keyboard.press(",")
    expect(page.locator(".token h2")).to_have_text("Token 24 of 25")


def test_the_wheel_and_keys_change_a_window_s_size(page, scenes_a, scene):
    click(page, (0.5, 0.5))
    page.mouse.wheel(0, -300)
    page.keyboard.press("+")
    positions = view(page)["positions"]
    assert positions.shape == (1, 25, 3)
    assert positions[0, 12, 2] == pytest.approx(1.05 * math.exp(0.5), rel=1e-5)
    assert (positions[0, :12, 2] == 1).all()
    assert agrees(page, scenes_a, scene)
    page.fill("#scale", "auto")
    page.press("#scale", "Tab")
    expected = scenes_a.place(scene, tokens=25, scale="auto")
    torch.testing.assert_close(view(page)["positions"], expected, atol=1e-6, rtol=0)


def test_undo_and_redo_walk_through_the_changes(page):
    start = view(page)["positions"]
    drag(page, (0.5, 0.5), (0.7, 0.6))
    moved = view(page)["positions"]
    page.select_option("#prior", "center")
    placed = view(page)["positions"]
    page.click("#undo")
    assert torch.equal(view(page)["positions"], moved)
    page.keyboard.press("Control+z")
    assert torch.equal(view(page)["positions"], start)
    page.keyboard.press("Control+Shift+z")
    page.click("#redo")
    assert torch.equal(view(page)["positions"], placed)


def test_priors_place_as_spot_places(page, scenes_a, scene):
    page.fill("#tokens", "9")
    page.press("#tokens", "Tab")
    page.fill("#seed", "3")
    page.press("#seed", "Tab")
    page.select_option("#prior", "uniform")
    expected = scenes_a.place(scene, tokens=9, prior="uniform", keys=["test/00000000"], seed=3)
    torch.testing.assert_close(view(page)["positions"], expected, atol=1e-6, rtol=0)
    page.click("#snap")
    cells = view(page)["positions"] * 8 - 0.5
    torch.testing.assert_close(cells, cells.round(), atol=1e-5, rtol=0)


def test_a_search_arrives_step_by_step_and_ends_where_spot_search_ends(page, scenes_a, scene):
    start = view(page)["positions"]
    page.click("#search")
    searched(page)
    parts = [message for message in page.frames_received if message["slot"] == "search"]
    assert len(parts) == 7  # the start, five steps and the end
    label = torch.tensor([Scenes("test")[0][1]])
    expected = spot.search(scenes_a, scene, label, start, steps=5, lr=3e-3)
    torch.testing.assert_close(view(page)["positions"], expected.positions, atol=1e-5, rtol=0)
    chances = expected.logits[0].softmax(-1)[:, label[0]]
    torch.testing.assert_close(torch.tensor([part["p"] for part in parts[:-1]]), chances, atol=1e-4, rtol=0)
    assert agrees(page, scenes_a, scene)
    assert page.locator("#curve .dot").count() == 6


def test_ascent_breaks_it_and_the_control_moves_tokens_as_far_at_random(page, scenes_a, scene):
    start = view(page)["positions"]
    page.select_option("#preset", "paper-long")
    page.click("#ascend")
    searched(page)
    first, last = re.findall(r"([\d.]+)\s%", page.locator("#search-text").inner_text())[:2]
    assert float(last) < float(first)
    end = view(page)["positions"]
    page.click("#control")
    page.locator("#curve .other").first.wait_for()
    control = view(page)["positions"]
    far = (end - start).norm(dim=-1)
    torch.testing.assert_close((control - start).norm(dim=-1), far, atol=1e-4, rtol=0)
    assert (end - control).norm(dim=-1).mean() > 0.3 * far.mean()  # in other directions
    assert "16 draws" in page.locator("#search-text").inner_text()


def test_a_search_can_be_stopped(page, served):
    page.fill("#steps", "200")
    page.click("#search")
    page.locator("#stop").click()
    assert page.locator("#stop").is_hidden()
    page.wait_for_timeout(300)
    assert not served.server.worker.busy


def test_why_here_is_the_log_probability_at_other_places(page, scenes_a, scene, served):
    click(page, (0.5, 0.5))
    positions = view(page)["positions"]
    page.click("#why")
    page.locator("#why-best").wait_for(timeout=120_000)
    last = [message for message in page.frames_received if message["slot"] == "field"][-1]
    label = Scenes("test")[0][1]
    for row, column in ((0, 0), (7, 20), (32, 32)):
        there = positions.clone()
        there[0, 12] = (0.5 + torch.tensor([row, column]) / 32 * 63) / 64
        expected = scenes_a(scene, there)[0].log_softmax(0)[label].item()
        assert last["values"][row][column] == pytest.approx(expected, abs=1e-4)
    best = max(value for row in last["values"] for value in row)
    page.click("#why-best")
    after = scenes_a(scene, view(page)["positions"])[0].log_softmax(0)[label].item()
    assert after == pytest.approx(best, abs=1e-4)


def test_two_panels_compare_models_with_their_cost(page, scene):
    page.click("#compare")
    page.locator(".panel").nth(1).locator(".top li").first.wait_for()
    page.locator(".model").nth(1).select_option("scenes-b")
    page.fill("#tokens", "9")
    page.press("#tokens", "Tab")
    assert agrees(page, spot.load("scenes-b"), scene, panel=1)
    costs = page.locator(".cost-macs")
    for panel, tokens in enumerate(("25", "9")):
        expect(page.locator(".cost-tokens").nth(panel)).to_have_text(tokens)
        expect(costs.nth(panel)).to_have_text(re.compile(r"[\d.]+ [MG] \(\d+ % of dense\)"))
    page.reload()
    page.locator(".panel").nth(1).locator(".top li").first.wait_for()
    assert view(page, 1)["model"] == "scenes-b"


def test_a_dropped_image_is_seen_as_spot_predict_sees_it(page, scenes_a, tmp_path):
    noise = torch.randint(0, 255, (80, 120, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    Image.fromarray(noise.numpy()).resize((360, 240)).save(tmp_path / "photo.png")
    data = list((tmp_path / "photo.png").read_bytes())
    transfer = page.evaluate_handle(
        """data => {
          const transfer = new DataTransfer();
          transfer.items.add(new File([new Uint8Array(data)], "photo.png", { type: "image/png" }));
          return transfer;
        }""",
        data,
    )
    page.dispatch_event("canvas.stage", "drop", {"dataTransfer": transfer})
    expect(page.locator(".picture-name")).to_have_text("photo.png")
    expect(page.locator("#strip button")).to_have_count(25)
    image = evaluation_transform(scenes_a.data_config)(open_image(tmp_path / "photo.png"))[None]
    assert agrees(page, scenes_a, image)
    page.reload()
    assert agrees(page, scenes_a, image)


def test_reload_restores_the_view(page, scenes_a):
    page.locator("#strip button").nth(2).click()
    drag(page, (0.5, 0.5), (0.4, 0.42))
    page.select_option("#target", "class")
    page.fill("#class", "dots ring")
    page.press("#class", "Tab")
    before, said = view(page), shown(page)
    page.reload()
    after = view(page)
    assert after["picture"] == before["picture"] and torch.equal(after["positions"], before["positions"])
    assert shown(page) == said
    assert page.input_value("#class") == "dots ring"


def test_a_link_to_a_picture_that_is_gone_says_so_and_shows_another(context, served, scenes_a, scene):
    at = base64.urlsafe_b64encode(struct.pack("<2f", 0.5, 0.5)).decode().rstrip("=")
    page = opened(context, f"{served.url}#picture=gone&model=scenes-a&at=2.{at}&file=ignored")
    assert "not on the server any more" in page.locator("#notes").inner_text()
    assert view(page)["picture"] == "scene-0"
    assert agrees(page, scenes_a, scene)


def test_two_tabs_do_not_disturb_each_other(page, context, served, scenes_a, scene):
    other = opened(context, served.url)
    other.fill("#tokens", "4")
    other.press("#tokens", "Tab")
    page.fill("#steps", "30")
    page.click("#search")
    drag(other, (0.25, 0.25), (0.4, 0.5))
    assert view(other)["positions"].shape == (1, 4, 2)
    assert agrees(other, scenes_a, scene)
    searched(page)
    assert agrees(page, scenes_a, scene)


def test_files_that_the_page_saves_are_spots_own(page, scenes_a, scene, tmp_path):
    page.click("#search")
    searched(page)
    positions = view(page)["positions"]
    with page.expect_download() as download:
        page.click("#save-file")
    download.value.save_as(tmp_path / "kept.safetensors")
    kept = Placements.load(tmp_path / "kept.safetensors")
    assert kept.keys == ["test/00000000"] and kept.trajectory.shape == (1, 6, 25, 2)
    torch.testing.assert_close(kept.positions, positions)
    with page.expect_download() as download:
        page.click("#save-picture")
    download.value.save_as(tmp_path / "kept.png")
    assert Image.open(tmp_path / "kept.png").width == 1365  # placement_figure's 10.5 inches at 130 dpi
    page.click("#clear")
    page.set_input_files("#placements", tmp_path / "kept.safetensors")
    page.wait_for_timeout(100)
    assert torch.equal(view(page)["positions"], positions)


BAD_POSITIONS = {
    "[[0.5, NaN]]": "NaN is among them",
    "[[0.5, 1e999]]": "two finite numbers",
    "{}": "A list of [y, x] is needed",
    "[[0.5, 0.5]": "This is not JSON",
    json.dumps([[0.5, 0.5]] * 10_000): "up to 1024 tokens, got 10000",
}


def test_bad_positions_files_and_numbers_are_answered_with_a_sentence(page, tmp_path):
    page.click("#paste")
    for text, sentence in BAD_POSITIONS.items():
        page.fill("#json-text", text)
        page.click("#json-use")
        page.locator("#json-trouble", has_text=sentence).wait_for()
    page.fill("#json-text", "[[0.25, 0.75]]")
    page.click("#json-use")
    page.locator("#json").wait_for(state="hidden")
    assert view(page)["positions"].tolist() == [[[0.25, 0.75]]]
    (tmp_path / "photo.jpg").write_text("no image")
    page.set_input_files("#file", tmp_path / "photo.jpg")
    page.locator("#notes p", has_text="photo.jpg is not an image").wait_for()
    page.fill("#tokens", "10000")
    page.press("#tokens", "Tab")
    page.locator("#notes p", has_text="from 1 to 1024").wait_for()


def test_every_control_has_a_name_for_screen_readers(page):
    click(page, (0.5, 0.5))
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, canvas")].filter((element) => {
          const labelled = element.ariaLabel || element.getAttribute("aria-label") || element.labels?.length;
          return !(labelled || element.textContent.trim());
        }).map((element) => element.outerHTML)"""
    )
    assert unnamed == []
    expect(page.locator("canvas.stage")).to_have_attribute("aria-label", re.compile("token 13 at row"))


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_nothing_is_cut_off_on_a_laptop_or_a_phone(browser, served, size):
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme="dark")
    page = opened(context, served.url)
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 21, 24)"  # dark
    if size[0] > 1000:
        assert page.evaluate("document.documentElement.scrollHeight") <= size[1]
    context.close()


def test_a_killed_server_gives_a_message_and_a_new_one_is_found(context, scenes_a, scene):
    command = [sys.executable, "-m", "spot", "play", "--no-browser", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = re.findall(r"http://\S+", process.stdout.readline())[0]
        page = opened(context, url)
    finally:
        process.kill()
        process.wait()
    page.locator("#offline").wait_for()
    drag(page, (0.5, 0.5), (0.6, 0.6))  # the page is not frozen
    again = Served(int(url.rstrip("/").rpartition(":")[2]))
    try:
        page.locator("#offline").wait_for(state="hidden")
        torch.testing.assert_close(view(page)["positions"][0, 12], torch.tensor([0.6, 0.6]), atol=3e-3, rtol=0)
        assert agrees(page, scenes_a, scene)
    finally:
        again.close()
