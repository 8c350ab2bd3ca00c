"""Calls of the public API and of the command line, drawn by hypothesis: right, or refused in one sentence."""

import contextlib
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

import spot
from spot.cli import main
from spot.models.checkpoints import save_folder
from spot.placement.priors import omega
from tests.conftest import make_nano, options_of
from tests.data.files import png_of
from tests.faults.harness import Tally
from tests.faults.jobs import images

SPECIAL = (0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, float("nan"), float("inf"))
DTYPES = (torch.float32,) * 40 + (torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64)
OTHERS = st.sampled_from([None, 0, -1, 3, 2.5, True, "x", "", b"x", [], [1.0], (), {}, object(), 10**20, float("nan")])


@st.composite
def tensors(draw: Any, *shape: int) -> torch.Tensor:
    """A tensor of the shape or near it, of any type, with special values here and there."""
    sides = list(shape)
    if draw(st.integers(0, 5)) == 0 and sides:
        sides[draw(st.integers(0, len(sides) - 1))] = draw(st.integers(0, 4))
    if draw(st.integers(0, 11)) == 0:
        sides = draw(st.lists(st.integers(0, 4), max_size=5))
    values = torch.rand(sides, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    if draw(st.integers(0, 5)) == 0 and values.numel():
        values.view(-1)[draw(st.integers(0, values.numel() - 1))] = draw(st.sampled_from(SPECIAL))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return values.to(draw(st.sampled_from(DTYPES)))


def mostly(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """The right kind of value, and now and then anything else."""
    return st.integers(0, 19).flatmap(lambda number: OTHERS if number == 0 else strategy)


IMAGES, POSITIONS = mostly(tensors(2, 3, 32, 32)), mostly(tensors(2, 5, 2) | tensors(2, 5, 3))
TOKENS = mostly(st.sampled_from([1, 2, 4, 16, 25, 0, -3]))
PRIORS = mostly(st.sampled_from(sorted(spot.PRIORS)))
KEYS = mostly(st.sampled_from([None, ["a", "b"], ["a", "ä/[b]$.png"], ["a"], ["a\0", ""]]))


def is_finite(*values: Any) -> bool:
    return all(bool(each.isfinite().all()) for each in values if isinstance(each, torch.Tensor) and each.numel())


def moderate(*values: Any) -> bool:
    """Whether nothing is so large that float32 may overflow within the model."""
    given = [value for value in values if isinstance(value, torch.Tensor) and value.numel()]
    return is_finite(*given) and all(float(value.abs().max()) < 1e6 for value in given)


def api() -> dict[str, tuple[st.SearchStrategy[Any], Callable[..., None]]]:
    """Calls by name: what to draw, and the call with what must hold of its result."""
    model = make_nano()
    averaged = make_nano(global_pool="avg", class_token=False)

    def windows(images: Any, positions: Any, size: Any) -> None:
        made = spot.windows(images, positions, size)
        assert made.shape == (*positions.shape[:2], images.shape[1], size, size)
        if moderate(images, positions):
            assert is_finite(made), "NaN from finite input"
            slack = 1e-3 * max(1.0, float(images.abs().max())) if images.numel() else 0.0
            if made.numel():  # an average of pixels
                assert float(made.max()) <= float(images.max()) + slack
                assert float(made.min()) >= float(images.min()) - slack

    def place(images: Any, tokens: Any, prior: Any, keys: Any, seed: Any, scale: Any) -> None:
        made = model.place(images, tokens=tokens, prior=prior, keys=keys, seed=seed, scale=scale)
        count = model.tokens if tokens is None else tokens
        assert made.shape[:2] == (len(images), count)
        low, high = omega(images)
        places = made[..., :2]
        assert bool(((places >= low - 1e-6) & (places <= high + 1e-6)).all()), "outside the image"
        if keys is not None:
            again = model.place(images, tokens=tokens, prior=prior, keys=keys, seed=seed, scale=scale)
            assert torch.equal(made, again), "another placement"

    def prior(images: Any, tokens: Any, name: Any, maps: Any, generator: Any) -> None:
        made = spot.PRIORS[name](images, tokens, generator, maps=maps)
        assert made.shape == (len(images), tokens, 2)
        assert is_finite(made)

    def forward(images: Any, positions: Any, tokens: Any, prior: Any, pooled: Any) -> None:
        chosen = averaged if pooled else model
        with torch.no_grad():
            made = chosen(images, positions, tokens, prior)
        assert made.shape == (len(images), 10)
        if moderate(images, positions):
            assert is_finite(made), "NaN from finite input"
            if positions is not None and len(images) > 1:
                with torch.no_grad():
                    alone = chosen(images[:1], positions[:1])
                torch.testing.assert_close(alone, made[:1], rtol=1e-3, atol=1e-4)

    def search(images: Any, labels: Any, positions: Any, changes: dict[str, Any]) -> None:
        made = spot.search(model, images, labels, positions, **{"steps": 1, **changes})
        assert made.positions.shape == positions.shape
        assert is_finite(made.trajectory, made.losses), "NaN"

    def placements(keys: Any, positions: Any, metadata: Any) -> None:
        made = spot.Placements(keys, positions, metadata)
        assert made.positions_for(list(keys)).shape[0] == len(keys)

    changes = st.dictionaries(
        st.sampled_from(
            ["lr", "objective", "optimizer", "weight_decay", "project", "grid", "snap", "max_batch", "nothing"]
        ),
        OTHERS
        | st.sampled_from([0.01, "agree", "entropy", "ascent", "obfuscate", "sgd", "adamw", True, False, 4, (2, 2), 1]),
        max_size=2,
    )
    scale = st.none() | mostly(st.sampled_from([1, 1.5, 2, 0.3, "auto", 0, -1]) | tensors(2, 5))
    maps = mostly(st.none() | tensors(2, 32, 32))
    generator = mostly(st.none() | st.builds(lambda: torch.Generator().manual_seed(1)))
    labels = mostly(st.none() | st.sampled_from([torch.tensor([0, 1]), torch.tensor([9, 10])]) | tensors(2))
    lists = mostly(st.lists(mostly(st.sampled_from(["a", "b", "", "x\0", "ä"])), max_size=3))
    return {
        "windows": (st.tuples(IMAGES, POSITIONS, mostly(st.sampled_from([1, 4, 8, 40, 0]))), windows),
        "place": (st.tuples(IMAGES, st.none() | TOKENS, st.none() | PRIORS, KEYS, mostly(st.just(0)), scale), place),
        "prior": (st.tuples(IMAGES, TOKENS, st.sampled_from(sorted(spot.PRIORS)), maps, generator), prior),
        "model": (st.tuples(IMAGES, POSITIONS, st.none(), st.none(), st.booleans()), forward),
        "model, placed": (st.tuples(IMAGES, st.none(), st.none() | TOKENS, st.none() | PRIORS, st.booleans()), forward),
        "search": (st.tuples(IMAGES, labels, POSITIONS, changes), search),
        "placements": (st.tuples(lists, mostly(tensors(2, 5, 2) | tensors(2, 2, 5, 3)), st.just({})), placements),
    }


SMALL = ("--set", "img_size=32", "batch_size=2")
VERBS: dict[str, tuple[str, ...]] = {  # a call that is right and quick; PICTURE and so on are put in
    "predict": ("PICTURE", "--model", "MODEL", "--out", "OUT"),
    "evaluate": ("MODEL", "--data", "DATA", "--workers", "0", "--limit", "4"),
    "search": ("PICTURE", "--model", "MODEL", "--out", "OUT", "--steps", "1", "--tokens", "4"),
    "saliency": ("DATA", "--out", "OUT"),
    "retrofit": ("MODEL", "--recipe", "cls-in1k", "--data", "DATA", "--out", "OUT", "--dry-run", *SMALL),
    "finetune": ("MODEL", "--recipe", "finetune-small", "--data", "DATA", "--out", "OUT", "--dry-run", *SMALL),
    "pretrain": ("MODEL", "--recipe", "mae-in1k", "--data", "DATA", "--out", "OUT", "--dry-run", *SMALL),
    "models": (),
}
WORDS = [
    "", "0", "-1", "1", "2", "4", "nan", "inf", "1e999", "99999999999999999999", "x", "x" * 300, "[red]", "$x$",
    "a\0b", "-", "ä", "PICTURE", "MODEL", "DATA", "OUT", "BAD", "BOMB", "/nonexistent/x", "/dev/null", "center",
    "salient", "tome", "auto", "spectral", "lr=x", "betas=(2,3)", "clip_grad=-1", "mixup=-1", "num_heads=0",
    "depth=1000000", "img_size=32",
]  # fmt: skip
HEAVY = {"--workers": ("99999999999999999999", "2", "4"), "--seeds": ("99999999999999999999",)}  # a person's own wish


def prepared(room: Path) -> dict[str, str]:
    """What stands for PICTURE, MODEL and so on: pictures, a saved model, a damaged file and a bomb."""
    save_folder(make_nano(num_classes=2), room / "saved")
    Image.effect_noise((40, 30), 50).convert("RGB").save(room / "a [b] $c$.png")
    (room / "bad.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    (room / "bomb.png").write_bytes(png_of(60_000, 8, b"\0" * 9999))  # a few bytes that claim 3.6 gigapixels
    names = {"MODEL": "saved", "PICTURE": "a [b] $c$.png", "OUT": "out", "BAD": "bad.safetensors", "BOMB": "bomb.png"}
    return {"DATA": str(images(room / "pictures")), **{word: str(room / name) for word, name in names.items()}}


@st.composite
def lines(draw: Any) -> list[str]:
    """A command line with options changed, left out or doubled."""
    verb = draw(st.sampled_from(sorted(VERBS)))
    cut = draw(st.integers(0, 12))
    words = [verb, *VERBS[verb][: cut if cut < 3 else None]]
    for option in draw(st.lists(st.sampled_from(sorted(options_of(verb))), max_size=4)):
        value = draw(st.sampled_from(WORDS))
        words += [] if value in HEAVY.get(option, ()) else [option, value]
    return words


def command_line(tally: Tally, room: Path, count: int) -> None:
    """Run command lines in this process."""
    places = prepared(room)

    def call(*given: str) -> None:
        words = [places.get(word, word) for word in given]

        def work() -> None:
            said = io.StringIO()
            try:
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                    main(words)
            except SystemExit as stop:
                said.write("" if stop.code in (0, 2, None) else f"Traceback: exit {stop.code}")
            assert "Traceback" not in said.getvalue(), said.getvalue()[-300:]

        tally.check(f"command: {words[0]}", work, " ".join(map(repr, words)))

    with contextlib.chdir(room):
        drawn(count, lines(), call)


def calls(tally: Tally, count: int) -> None:
    """So many calls of each part of the public API."""
    for name, (strategy, call) in api().items():
        drawn(
            count,
            strategy,
            lambda *given, name=name, call=call: tally.check(f"call: {name}", lambda: call(*given), shown(given)),
        )


def drawn(count: int, strategy: st.SearchStrategy[Any], call: Callable[..., Any]) -> None:
    """Call with so many values of a strategy, the same ones every time."""

    @settings(max_examples=count, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(strategy)
    def each(values: tuple[Any, ...]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(*values)

    each()


def shown(values: Any) -> str:
    return ", ".join(f"{v.dtype} {tuple(v.shape)}" if isinstance(v, torch.Tensor) else repr(v)[:60] for v in values)
