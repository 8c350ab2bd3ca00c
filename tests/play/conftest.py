"""One server and one browser for all tests of the playground."""

import base64
import json
import shutil
import threading
import time
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest
import torch

import spot
from spot.data.scenes import Scenes
from spot.play.server import Server, listen, web_server
from spot.play.session import Session

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


class Served:
    """A running playground: where it is, and what is behind it."""

    def __init__(self, port: int = 0) -> None:
        self.session = Session()
        self.server = Server(self.session)
        self.socket = listen(port)
        self.port = self.socket.getsockname()[1]
        self.host = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.host}/"
        self.web = web_server(self.server, self.port)
        self.thread = threading.Thread(target=self.web.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self.thread.start()
        while not self.web.started:
            time.sleep(0.02)

    def close(self) -> None:
        self.web.should_exit = True
        self.thread.join(timeout=10)


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    running = Served()
    yield running
    running.close()


@pytest.fixture(scope="session")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium is installed (apt-get install chromium), so the page is not tested in a browser")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def context(browser):
    """A fresh browser profile; an error in the page's own scripts fails the test."""
    errors: list[str] = []
    made = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    made.set_default_timeout(60_000)
    made.on("weberror", lambda error: errors.append(str(error.error)))
    yield made
    made.close()
    assert not errors


@pytest.fixture
def page(context, served):
    return opened(context, served.url)


def opened(context, url):
    """A tab with a view; `page.frames_received` are the messages that the server sent it."""
    page = context.new_page()
    page.frames_received = []
    received = page.frames_received

    def listen_to(socket):
        socket.on("framereceived", lambda text: received.append(json.loads(text)))

    page.on("websocket", listen_to)
    page.goto(url)
    settled(page)
    page.wait_for_url("**#picture=*")
    return page


def settled(page) -> None:
    """Wait until nothing is asked of the server, and the address tells the view."""
    page.locator(".top li").first.wait_for()
    for _ in range(2):
        page.locator('main[aria-busy="false"]').wait_for()
        page.wait_for_timeout(130)  # the address is written a moment after the last change
    page.locator('main[aria-busy="false"]').wait_for()


def view(page, panel: int = 0) -> dict:
    """What the address says: picture, model and positions (1, N, 2) of a panel, after the page has settled."""
    settled(page)
    fields = parse_qs(urlsplit(page.url).fragment)
    columns, data = fields["at"][panel].split(".")
    raw = base64.urlsafe_b64decode(data + "=" * (-len(data) % 4))
    positions = torch.frombuffer(bytearray(raw), dtype=torch.float32).reshape(1, -1, int(columns))
    return {"picture": fields["picture"][0], "model": fields["model"][panel], "positions": positions}


def shown(page, panel: int = 0) -> tuple[int, float]:
    """The class and probability on top of the page's list."""
    row = page.locator(".panel").nth(panel).locator(".top li").first
    return int(row.get_attribute("data-index")), float(row.get_attribute("data-p"))


@pytest.fixture(scope="session")
def scenes_a() -> spot.SpotViT:
    return spot.load("scenes-a")


@pytest.fixture(scope="session")
def scene(scenes_a) -> torch.Tensor:
    """The first sample of the strip, as the model takes it: (1, 3, H, W)."""
    from torchvision.transforms.functional import normalize

    config = scenes_a.data_config
    return normalize(Scenes("test")[0][0], config["mean"], config["std"])[None]
