"""The playground's server on 127.0.0.1: a page, its pictures and a WebSocket, only for its own page.

The page's files are read once at the start, and pictures are looked up by id: no path from a request is
ever opened. Requests of other hosts or origins are refused, so that another web page cannot control the
server through the browser.
"""

import asyncio
import socket
import threading
import webbrowser
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.resources import files
from io import BytesIO
from typing import Any, TypeVar
from urllib.parse import unquote

import uvicorn
from PIL import Image
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from spot import report
from spot.errors import InputError, unknown
from spot.play.request import Request
from spot.play.session import ACTIONS, LONG, Session, picture_png, placements_file, placements_of
from spot.play.worker import Job, Worker

HOST = "127.0.0.1"
MESSAGE_BYTES = 2**20
UPLOAD_BYTES = 20 * 2**20
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

Result = TypeVar("Result")


class Guard:
    """Allow requests only from the server's own page, by the headers Host, Origin and Sec-Fetch."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self.app = app
        self.hosts = {f"{name}:{port}" for name in (HOST, "localhost")}
        self.origins = {f"http://{host}" for host in self.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not self.allowed(scope):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                refusal = PlainTextResponse("spot play answers its own page only\n", 403)
                await refusal(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def allowed(self, scope: Scope) -> bool:
        """Whether the host, and the origin if given, are those of the server's page."""
        headers = Headers(scope=scope)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or hosts[0].lower() not in self.hosts:
            return False
        if origins or scope["type"] == "websocket":
            return len(origins) == 1 and origins[0].lower() in self.origins
        # Links on other sites may open the page but not fetch its pictures.
        opened = headers.get("sec-fetch-mode") == "navigate" and scope["path"] == "/"
        return opened or headers.get("sec-fetch-site", "none") in ("same-origin", "none")


class Server:
    """The routes, over one session and one worker."""

    def __init__(self, session: Session) -> None:
        self.session, self.worker = session, Worker()
        folder = files("spot") / "play" / "page"
        self.page = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.split(".")[-1] in TYPES}

    def app(self, port: int) -> ASGIApp:
        """The whole application, guarded."""
        routes = [
            Route("/", self.get_page),
            Route("/page/{name}", self.get_page),
            Route("/thumbnail/{picture}", self.get_thumbnail),
            Route("/picture/{picture}", self.get_picture),
            Route("/picture", self.post_picture, methods=["POST"]),
            Route("/drawn", partial(self.post_trajectory, picture_png), methods=["POST"]),
            Route("/placements", partial(self.post_trajectory, placements_file), methods=["POST"]),
            Route("/placements/{picture}", self.post_placements_file, methods=["POST"]),
            WebSocketRoute("/live", self.live),
        ]

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            yield
            self.worker.close()

        errors: dict[Any, Any] = {InputError: bad_input}
        return Guard(Starlette(routes=routes, exception_handlers=errors, lifespan=lifespan), port)

    async def compute(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run a function in the worker's thread."""
        done: Future[Result] = Future()

        def work(job: Job) -> None:
            if done.set_running_or_notify_cancel():  # otherwise the browser has disconnected
                done.set_result(function(*arguments))

        self.worker.submit(done, "once", Job(work, lambda message: done.set_exception(InputError(message["error"]))))
        try:
            return await asyncio.wrap_future(done)
        finally:
            self.worker.stop(done)

    async def get_page(self, request: HttpRequest) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in self.page:
            return PlainTextResponse("there is no such file\n", 404)
        kind = TYPES[name.split(".")[-1]]
        return Response(self.page[name], media_type=f"{kind}; charset=utf-8", headers=HEADERS)

    async def get_thumbnail(self, request: HttpRequest) -> Response:
        return png(await self.compute(self.session.thumbnail, request.path_params["picture"]))

    async def get_picture(self, request: HttpRequest) -> Response:
        picture, model = request.path_params["picture"], request.query_params.get("model", "")
        sharp = request.query_params.get("kind") == "sharp"
        return png(await self.compute(lambda: self.session.view(picture, model).shown(sharp)))

    async def post_picture(self, request: HttpRequest) -> Response:
        name = unquote(request.headers.get("x-name", ""))[:300] or "image"
        data = await body(request, UPLOAD_BYTES)
        return JSONResponse({"picture": await self.compute(self.session.pictures.add, name, data), "name": name})

    async def post_trajectory(self, write: Callable[[Session, Request], bytes], request: HttpRequest) -> Response:
        data = await self.compute(write, self.session, Request.parse(await body(request, 16 * MESSAGE_BYTES)))
        kind = "image/png" if write is picture_png else "application/octet-stream"
        return Response(data, media_type=kind, headers=HEADERS)

    async def post_placements_file(self, request: HttpRequest) -> Response:
        data = await body(request, UPLOAD_BYTES)
        picture = request.path_params["picture"]
        return JSONResponse(await self.compute(placements_of, self.session, picture, data))

    async def live(self, socket: WebSocket) -> None:
        """Serve one tab until it is closed: requests {"slot", "id", "kind", …} and answers {"slot", "id", …}."""
        await socket.accept()
        loop, answers = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]]()
        answers.put_nowait({"slot": "about", **self.session.about()})

        def answer(message: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(answers.put_nowait, message)

        async def sender() -> None:
            while True:
                await socket.send_json(await answers.get())

        sending = asyncio.create_task(sender())
        try:
            while True:
                text = await socket.receive_text()
                try:
                    self.take(socket, text, answer)
                except InputError as error:
                    answers.put_nowait({"slot": "error", "error": str(error)})
        except (WebSocketDisconnect, KeyError):
            pass  # the tab was closed, or sent a message that is not text
        finally:
            self.worker.stop(socket)
            sending.cancel()

    def take(self, owner: WebSocket, text: str, send: Callable[[dict[str, Any]], None]) -> None:
        """Submit one request of a tab to the worker."""
        request = Request.parse(text)
        slot, number, kind = request.text("slot"), request.number("id"), request.text("kind")
        if kind == "stop":
            self.worker.stop(owner, slot)
            return
        if kind not in ACTIONS:
            raise unknown("request", kind, ACTIONS)
        work = partial(ACTIONS[kind], self.session, request)
        job = Job(work, lambda message: send({"slot": slot, "id": number, **message}), long=kind in LONG)
        self.worker.submit(owner, slot, job)


async def body(request: HttpRequest, limit: int) -> bytes:
    """Read the request's body. Raises InputError as soon as it exceeds the limit."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > limit:
            raise InputError(f"this is more than {limit // 2**20} MB, the most that the page accepts")
    return bytes(data)


async def bad_input(request: HttpRequest, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 400, headers=HEADERS)


def png(image: Image.Image) -> Response:
    data = BytesIO()
    image.save(data, "PNG")
    return Response(data.getvalue(), media_type="image/png", headers=HEADERS)


def listen(port: int) -> socket.socket:
    """Open a socket on 127.0.0.1. Port 0 selects any free port."""
    if not 0 <= port <= 65535:
        raise InputError(f"a port is a number from 0 to 65535, got {port}")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((HOST, port))
        sock.listen()  # reserves the port
    except OSError as error:
        sock.close()
        raise InputError(f"port {port} cannot be used ({error.strerror}); choose another with --port") from None
    return sock


def web_server(server: Server, port: int) -> uvicorn.Server:
    """uvicorn over the server's application, for a socket that `listen` opened."""
    config = uvicorn.Config(
        server.app(port), log_level="warning", access_log=False, ws_max_size=MESSAGE_BYTES, timeout_graceful_shutdown=1
    )
    return uvicorn.Server(config)


def serve(session: Session, sock: socket.socket, *, browser: bool = True) -> None:
    """Open the page in a browser, and serve until Ctrl-C."""
    port = sock.getsockname()[1]
    address = f"http://{HOST}:{port}/"
    report.say(f"The playground is at {address} (Ctrl-C ends it)")
    if browser:
        threading.Timer(0.5, webbrowser.open, [address]).start()
    with suppress(KeyboardInterrupt):  # uvicorn has shut down by then
        web_server(Server(session), port).run(sockets=[sock])
