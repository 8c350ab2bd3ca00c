"""The playground: predictions a second while a token is dragged in a browser, and without one.

The real ViT needs ../shared; the browser is the system's chromium.
"""

import json
import math
import shutil
import threading
import time
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

from spot.play.server import Server, listen, web_server
from spot.play.session import open_session

WEIGHTS = Path(__file__).parents[2] / "shared/data/weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
SECONDS = 4


def run() -> list[dict[str, Any]]:
    rows = [measured("scenes-a")]
    return [*rows, measured("vit-ti", WEIGHTS)] if WEIGHTS.is_file() else rows


def measured(model: str, *weights: Path) -> dict[str, Any]:
    """One model on the first scene, 25 tokens."""
    session = open_session(models=[model], weights=weights, data="scenes")
    socket = listen(0)
    port = socket.getsockname()[1]
    server = web_server(Server(session), port)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
    thread.start()
    row = {"model": model, "tokens": 25, "asked one after another": asked(port, model), "dragged": dragged(port)}
    server.should_exit = True
    thread.join()
    return row


def asked(port: int, model: str) -> float:
    """Predictions a second through the WebSocket, each asked when the one before has come."""
    request = {"slot": "predict", "id": 0, "kind": "predict", "picture": "scene-0", "model": model, "token": 0}
    with connect(f"ws://127.0.0.1:{port}/live", origin=f"http://127.0.0.1:{port}", proxy=None) as live:  # type: ignore[arg-type]
        live.recv()

        def once(count: int) -> None:
            places = [[(0.5 + row) / 5, (0.5 + column + 1e-3 * count) / 5] for row in range(5) for column in range(5)]
            live.send(json.dumps({**request, "positions": places}))
            live.recv()

        for count in range(5):  # the first ones load and warm up
            once(count)
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < SECONDS:
            once(count)
            count += 1
        return count / (time.perf_counter() - start)


def dragged(port: int) -> float | None:
    """Predictions a second that reach the page while the mouse moves; None without a browser."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        return None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=browser, args=FLAGS).new_page(
            viewport={"width": 1280, "height": 800}
        )
        frames: list[Any] = []

        def listening(live: Any) -> None:
            live.on("framereceived", lambda text: frames.append(json.loads(text)["slot"]))

        page.on("websocket", listening)
        page.goto(f"http://127.0.0.1:{port}/")
        page.locator(".top li").first.wait_for()
        page.wait_for_timeout(2000)
        box = page.locator("canvas.stage").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.mouse.down()
        before, start, turn = frames.count("predict0"), time.perf_counter(), 0
        while time.perf_counter() - start < SECONDS:
            turn += 1
            y, x = 0.5 + 0.2 * math.sin(turn / 31), 0.5 + 0.2 * math.sin(turn / 20)
            page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
        return (frames.count("predict0") - before) / (time.perf_counter() - start)
