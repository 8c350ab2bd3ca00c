"""Whether the weights that a model stands on are here, or can be fetched: known before anything heavy is imported."""

import os
import re
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


TIMM = re.compile(r"[a-z0-9_]+_[a-z0-9_]+\.[a-z0-9_]+")  # an architecture and the tag of its weights
FILES = (".safetensors", ".pt", ".pth", ".bin", ".onnx", ".pt2")


def refuse_offline(name: str) -> None:
    """Refuse a retrofit of ours, or a timm model, whose weights were not downloaded before and cannot be now."""
    name = ALIASES.get(name, name)
    base = name.removesuffix("+spot")
    ours = base != name and (ASSETS / f"{name}.safetensors").is_file()
    timm = TIMM.fullmatch(name) is not None and not name.endswith(FILES)
    if Path(name).exists() or not (ours or timm):
        return
    hub, torch = caches()
    # Of other models than ours it is not known here where timm has their weights from: what may be they, is asked for.
    wanted = f"models--*{base.partition('.')[0]}*" if timm else f"models--timm--{base}"
    if any(hub.glob(f"{wanted}/snapshots/*/*.*")) or (timm and any(torch.glob("*"))):
        return
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    where = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    refuse_unreachable(f"download {base}", where, "; pass weights=FILE if you have them", offline=offline)


def caches() -> tuple[Path, Path]:
    """Where the hub and where torch keep what was downloaded."""
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    hub = Path(os.environ.get("HF_HOME", home / "huggingface")) / "hub"
    hub = Path(os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or hub)
    return hub, Path(os.environ.get("TORCH_HOME", home / "torch")) / "hub" / "checkpoints"


def refuse_unreachable(what: str, address: str, advice: str = "", *, offline: bool = False) -> None:
    """Refuse what needs a host that does not answer, or that the user has said not to ask."""
    host, port = urlsplit(address).hostname or "", urlsplit(address).port or 443
    if offline or not reachable(host, port):
        raise InputError(f"cannot {what}: {host} cannot be reached{advice}")


def reachable(host: str, port: int) -> bool:
    """Whether a host answers in time; behind a proxy that is the proxy's business."""
    if getproxies().get("https"):
        return True
    answers: list[bool] = []

    def ask() -> None:
        with suppress(OSError), socket.create_connection((host, port), timeout=SECONDS):
            answers.append(True)

    asking = threading.Thread(target=ask, daemon=True)  # looking up a name has no timeout of its own
    asking.start()
    asking.join(SECONDS)
    return bool(answers)
