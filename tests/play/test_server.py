"""Who may talk to the playground's server, and what it takes."""

import io
import json
import math
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path

import pytest
import torch
from PIL import Image
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

import spot
from spot.cli import main
from spot.errors import InputError
from spot.models.family import Family
from spot.placement.oracle import SearchSettings
from spot.play import pictures
from spot.play.pictures import PictureStore
from spot.play.request import Request
from spot.play.server import UPLOAD_BYTES, listen
from spot.play.session import ACTIONS, CONTROLS, Session
from spot.play.worker import Job
from tests.conftest import VIT_TINY

PHOTO = Path(__file__).parents[2] / "docs" / "images" / "photos" / "coffee.jpg"


def ask(served, method="GET", path="/", body=None, **headers):
    """Status, headers and body of a request; host and others as given."""
    connection = HTTPConnection("127.0.0.1", served.port, timeout=120)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.putrequest(method, path, skip_host=True)
    for name, value in {"Host": served.host, "Content-Length": str(len(body or b"")), **named}.items():
        connection.putheader(name, value)
    connection.endheaders(body)
    response = connection.getresponse()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()


def live(served, **headers):
    named = {"Origin": f"http://{served.host}", **headers}
    return connect(f"ws://{served.host}/live", origin=named["Origin"], proxy=None)


def answer(socket, slot, **request):
    """The first answer to a request."""
    socket.send(json.dumps({"slot": slot, "id": 1, **request}))
    while True:
        message = json.loads(socket.recv(timeout=120))
        if message["slot"] in (slot, "error"):
            return message


def test_it_listens_on_this_machine_alone(served):
    assert served.socket.getsockname()[0] == "127.0.0.1"


def test_the_page_loads_nothing_from_elsewhere(served):
    status, headers, _ = ask(served)
    assert status == 200 and "default-src 'self'" in headers["content-security-policy"]
    for name, text in served.server.page.items():
        linked = text.decode().replace("http://www.w3.org/2000/svg", "")  # a name, not an address
        assert "http://" not in linked and "https://" not in linked, name


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "spot.example:80"},
        {"Host": "127.0.0.1:1"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
@pytest.mark.parametrize(
    "method, path", [("GET", "/thumbnail/scene-0"), ("POST", "/picture"), ("GET", "/page/main.js")]
)
def test_foreign_hosts_and_origins_are_refused(served, headers, method, path):
    assert ask(served, method, path, **headers)[0] == 403


def test_a_link_elsewhere_may_open_the_page_but_not_what_is_behind_it(served):
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert ask(served, path="/", **link)[0] == 200
    assert ask(served, path="/thumbnail/scene-0", **link)[0] == 403
    assert ask(served, path="/", Host=f"localhost:{served.port}", Origin=f"http://localhost:{served.port}")[0] == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1:1", None])
def test_a_foreign_page_cannot_open_the_websocket(served, origin):
    with pytest.raises(InvalidStatus, match="403"):
        live(served, Origin=origin)


@pytest.mark.parametrize("path", ["/page/..%2Fserver.py", "/page/../server.py", "/page/%2Fetc%2Fpasswd", "/page/none"])
def test_no_path_from_the_page_is_opened(served, path):
    assert ask(served, path=path)[0] == 404


@pytest.mark.parametrize("picture", ["..%2F..%2Fphoto.png", "%2Fetc%2Fpasswd", "none"])
def test_a_picture_is_an_id_and_not_a_path(served, picture):
    status, _, body = ask(served, path=f"/thumbnail/{picture}")
    assert status in (400, 404)
    assert status == 404 or "not on the server" in json.loads(body)["error"]


def png(width: int, height: int, mode: str = "RGB") -> bytes:
    data = io.BytesIO()
    Image.new(mode, (width, height), 90).save(data, "PNG")
    return data.getvalue()


def test_uploads_stay_in_memory_and_the_oldest_go_first(served):
    kept = PictureStore()
    ids = [kept.add(f"{number}.png", png(4, 4)) for number in range(pictures.KEPT + 1)]
    assert kept.open(ids[-1]).name == f"{pictures.KEPT}.png"
    with pytest.raises(InputError, match="not on the server any more"):
        kept.open(ids[0])
    status, _, body = ask(served, "POST", "/picture", png(40, 30, "L"), X_Name="a%2Fb%00c%20d.png")
    made = json.loads(body)
    assert status == 200 and served.session.pictures.open(made["picture"]).name == "bc d.png"
    seen = ask(served, path=f"/picture/{made['picture']}?model=scenes-a&kind=pixels")[2]
    assert Image.open(io.BytesIO(seen)).size == (64, 64)


@pytest.mark.parametrize(
    "data, sentence",
    [
        (b"", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (png(64, 64)[:80], "cannot be read"),
        (png(9000, 5000, "1"), "too large to decode; scale it below 40 megapixels first"),
        (bytes(UPLOAD_BYTES + 1), "more than 20 MB"),
    ],
)
def test_what_is_no_image_or_too_large_is_refused_in_a_sentence(served, data, sentence):
    try:
        status, _, body = ask(served, "POST", "/picture", data, X_Name="thing.png")
    except (BrokenPipeError, ConnectionResetError):  # the server stops listening at the limit
        assert len(data) > UPLOAD_BYTES
        return
    assert status == 400 and sentence in json.loads(body)["error"]


def test_a_webp_image_can_be_uploaded_to_a_new_server(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.webp")
    code = "import sys; from spot.play.pictures import decode; decode('a.webp', open(sys.argv[1], 'rb').read())"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.webp")], check=True)


@pytest.mark.parametrize(
    "request_, sentence",
    [
        ({"kind": "predict", "positions": []}, "at least one"),
        ({"kind": "predict", "positions": [[0.5, 0.5]] * 1025}, "up to 1024 tokens"),
        ({"kind": "predict", "positions": [[0.5, "x"]]}, "two finite numbers"),
        ({"kind": "predict", "positions": [[0.5, 0.5, 1], [0.5, 0.5]]}, "each three with a scale"),
        ({"kind": "predict", "positions": [[0.5, 0.5, 0]]}, "above 0"),
        ({"kind": "place", "tokens": 4, "prior": "center", "seed": 0, "scale": -1}, "scale must be"),
        ({"kind": "predict", "positions": [[0.5, 80]]}, "fractions of height and width"),
        ({"kind": "predict", "positions": [[0.5, 0.5]], "model": "/etc/passwd"}, "no model"),
        ({"kind": "place", "tokens": 10_000, "prior": "center", "seed": 0}, "from 1 to 1024"),
        ({"kind": "place", "tokens": 4, "prior": "centre", "seed": 0}, "did you mean 'center'"),
        ({"kind": "place", "tokens": 4, "prior": "learned", "seed": 0}, "has no learned prior"),
        ({"kind": "place", "tokens": 4, "prior": "/etc/a.safetensors", "seed": 0}, "no prior '/etc/a.safetensors'"),
        ({"kind": "search", "positions": [[0.5, 0.5]], "objective": "descent", "preset": "paper"}, "needs a label"),
        ({"kind": "search", "positions": [[0.5, 0.5]], "objective": "up", "preset": "paper"}, "no objective"),
        ({"kind": "field", "positions": [[0.5, 0.5]], "token": 1, "label": 0}, "token must be"),
        ({"kind": "dance"}, "no request"),
    ],
)
def test_bad_requests_are_answered_with_a_sentence(served, request_, sentence):
    with live(served) as socket:
        message = answer(socket, "x", **{"picture": "scene-0", "model": "scenes-a", **request_})
        assert sentence in message["error"]
        assert "top" in answer(socket, "y", kind="predict", picture="scene-0", model="scenes-a", positions=[[0.5, 0.5]])


def test_nan_and_nonsense_are_answered_with_a_sentence(served):
    with live(served) as socket:
        socket.recv(timeout=120)  # what the server says first
        for text, sentence in (("[1]", "JSON object"), ("{", "not JSON"), ("[" * 9000, "JSON")):
            socket.send(text)
            assert sentence in json.loads(socket.recv(timeout=120))["error"]
    with pytest.raises(InputError, match="two finite numbers"):
        Request.parse('{"positions": [[0.5, NaN]]}').positions()


def test_a_message_that_is_too_long_ends_that_tab_alone(served):
    with live(served) as socket, live(served) as other:
        socket.recv(timeout=120)  # what the server says first
        socket.send("x" * (2**20 + 1))
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=120)
        assert "size" in answer(other, "m", kind="model", model="scenes-a")


def test_closing_the_page_stops_its_search(served):
    request = {"picture": "scene-0", "model": "scenes-a", "positions": [[0.5, 0.5]] * 100, "label": 3}
    socket = live(served)
    answer(socket, "search", kind="search", objective="descent", preset="paper", steps=200, seed=0, **request)
    assert served.server.worker.busy
    socket.close()
    until = time.monotonic() + 10
    while served.server.worker.busy:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_control_moves_as_far_as_the_search_and_keeps_its_last_sizes(served):
    request = {"picture": "scene-0", "model": "scenes-a", "label": 0, "seed": 0}
    (told,) = answers(served.session, "control", **request, trajectory=[[[0.5, 0.5, 1.0]], [[0.5, 0.6, 2.0]]])
    ((y, x, scale),) = told["positions"]
    assert math.hypot(y - 0.5, x - 0.5) == pytest.approx(0.1, abs=1e-4)
    assert scale == 2
    assert len(told["probabilities"]) == CONTROLS


def test_the_picture_is_the_one_that_spot_search_draws(served, tmp_path):
    from spot.evaluation.searches import search_photos
    from spot.plots import save

    photo = tmp_path / "photo.png"
    photo.write_bytes(png(90, 90))
    model = spot.load("scenes-a", tokens=9)
    (made,) = search_photos(model, [photo], ["5"], SearchSettings(steps=3))
    save(made.figure(model.patch_size), tmp_path / "expected.png")
    picture = served.session.pictures.add("photo.png", photo.read_bytes())
    trajectory = made.trajectory.tolist()
    about = {"picture": picture, "model": "scenes-a", "trajectory": trajectory, "label": 5}
    status, _, drawn = ask(served, "POST", "/drawn", json.dumps(about).encode())
    assert status == 200
    ours, theirs = Image.open(io.BytesIO(drawn)), Image.open(tmp_path / "expected.png")
    # A model without class names calls its classes by number; the page knows the scenes' names.
    assert ours.size == theirs.size
    below = (0, 120, *ours.size)
    assert ours.crop(below).tobytes() == theirs.crop(below).tobytes()


def test_placements_of_another_image_or_damaged_files_are_refused(served, tmp_path):
    file = tmp_path / "two.safetensors"
    spot.Placements(["a.png", "b.png"], torch.rand(2, 5, 2)).save(file)
    status, _, body = ask(served, "POST", "/placements/scene-0", file.read_bytes())
    assert status == 400 and "none of test/00000000" in json.loads(body)["error"]
    status, _, body = ask(served, "POST", "/placements/scene-0", b"nothing")
    assert status == 400 and "the file is not" in json.loads(body)["error"]


def test_images_of_the_command_line_and_of_a_folder_are_samples(tmp_path):
    (tmp_path / "photo.png").write_bytes(png(40, 40))
    session = Session([tmp_path / "photo.png"], ["scenes-a"])
    assert [sample.name for sample in session.pictures.samples.values()] == ["photo.png"]
    for name in ("plain disc", "stripes disc"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "1.png").write_bytes(png(40, 40))
    session = Session(data=str(tmp_path / "data"), models=["scenes-a"])  # some of the model's classes
    assert len(session.pictures.samples) == 2
    (tmp_path / "data" / "unicorn").mkdir()
    with pytest.raises(InputError, match="no class 'unicorn'"):
        Session(data=str(tmp_path / "data"), models=["scenes-a"])
    (tmp_path / "none.png").write_text("no")
    with pytest.raises(InputError, match="not an image"):
        Session([tmp_path / "none.png"], ["scenes-a"])


def test_a_port_in_use_is_one_sentence(capsys):
    with listen(0) as taken, pytest.raises(SystemExit) as stopped:
        main(["play", "--no-browser", "--port", str(taken.getsockname()[1])])
    assert stopped.value.code == 2
    assert "choose another with --port" in capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install():
    code = "import sys; sys.modules['uvicorn'] = None; from spot.cli import main; main(['play'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "pip install 'spot-vit[play]'" in result.stderr


def answers(session, kind, **fields):
    """All answers to one request."""
    sent = []
    ACTIONS[kind](session, Request(fields), Job(lambda job: None, sent.append))
    return sent


def test_search_after_a_prediction_and_weights_that_follow_the_slider(shared_data):
    weights = shared_data / "weights" / f"{VIT_TINY}.safetensors"
    session = Session([PHOTO], ["vit-ti"], [weights])
    assert isinstance(session.source("vit-ti"), Family)
    view = {"picture": next(iter(session.pictures.samples)), "model": "vit-ti"}
    for tokens in (9, 25):
        placed = answers(session, "place", **view, tokens=tokens, prior="learned", seed=0)[0]["positions"]
        top = answers(session, "predict", **view, positions=placed)[0]["top"]
        family = Family("vit-ti", weights=weights)
        with torch.no_grad():
            image = session.view(view["picture"], "vit-ti").images
            expected = family.model(tokens=tokens)(image, torch.tensor([placed])).softmax(1).amax().item()
        assert abs(top[0]["p"] - expected) < 1e-4
        steps = answers(session, "search", **view, positions=placed, objective="agree", preset="paper", seed=0)
        assert steps[-1]["done"] and steps[-2]["positions"] != placed
