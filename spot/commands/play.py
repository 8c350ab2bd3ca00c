"""spot play: a local page for placing tokens by hand."""

from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from spot import options
from spot.errors import InputError


def play(
    images: options.Photos = (),
    /,
    *,
    model: Annotated[options.Several[str], arg(help=f"models to choose from: {options.NAME}")] = (),
    weights: options.Several[Path] = (),
    data: options.DataInstead = None,
    split: options.Split = "val",
    saliency: options.Saliency = None,
    port: int = 7768,
    no_browser: bool = False,
) -> None:
    """Place tokens on a picture by hand and see the prediction at once.

    Starts a local server and opens its page in the browser. On the page you can drag, add and remove tokens, place
    them by a prior, run a search, and see where a token would help most. Without arguments it uses the built-in
    model on scenes. With images or data it uses a retrofitted ViT-Ti/16.

    example: spot play photo.jpg --model vit-ti scenes-a

    Args:
        weights: local files with the timm models' weights, one for all or one for each, instead of downloads
        port: port of the server; 0 takes any free port
        no_browser: only print the address
    """
    try:
        from spot.play.server import listen, serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "websockets"):
            raise
        raise InputError(f"the playground needs {error.name}; pip install 'spot-vit[play]'") from None
    from spot.play.session import Session

    sock = listen(port)
    session = Session(images, model, weights, data, split, saliency or "spectral")
    serve(session, sock, browser=not no_browser)
