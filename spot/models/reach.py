"""Whether the weights that a model stands on are here, or can be fetched: known before anything heavy is imported."""

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from spot.errors import InputError

ALIASES = {
    "vit-ti": "vit_tiny_patch16_224.augreg_in21k_ft_in1k+spot",
    "deit-ti": "deit_tiny_patch16_224.fb_in1k+spot",
}
ASSETS = Path(__file__).parents[1] / "assets"
SECONDS = 1.2  # to wait for an answer, so that a command without a network ends within two


def refuse_offline(name: str) -> None:
    """Refuse a retrofit of ours whose timm weights were not downloaded before and cannot be now."""
    name = ALIASES.get(name, name)
    base = name.removesuffix("+spot")
    if base == name or Path(name).exists() or not (ASSETS / f"{name}.safetensors").is_file():
        return
    caches = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "huggingface"
    caches = Path(os.environ.get("HF_HOME", caches)) / "hub"
    caches = Path(os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or caches)
    if any((caches / f"models--timm--{base}" / "snapshots").glob("*/*.*")):
        return
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    where = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    refuse_unreachable(f"download {base}", where, "; pass weights=FILE if you have them", offline=offline)


def refuse_unreachable(what: str, address: str, advice: str = "", *, offline: bool = False) -> None:
    """Refuse what needs a host that does not answer, or that the user has said not to ask."""
    host, port = urlsplit(address).hostname or "", urlsplit(address).port or 443
    if offline or not reachable(host, port):
        raise InputError(f"cannot {what}: {host} cannot be reached{advice}")


def reachable(host: str, port: int, seconds: float = SECONDS) -> bool:
    """Whether a host answers in time; behind a proxy that is the proxy's business."""
    if getproxies().get("https"):
        return True
    answers: list[bool] = []

    def ask() -> None:
        with suppress(OSError), socket.create_connection((host, port), timeout=seconds):
            answers.append(True)

    asking = threading.Thread(target=ask, daemon=True)  # looking up a name has no timeout of its own
    asking.start()
    asking.join(seconds)
    return bool(answers)
