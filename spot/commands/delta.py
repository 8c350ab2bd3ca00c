"""spot delta: keep a retrofit as what training added to a timm checkpoint."""

from pathlib import Path
from typing import Literal

import tyro


def delta(
    model: tyro.conf.Positional[str],
    /,
    *,
    out: Path | None = None,
    base: str | None = None,
    weights: Path | None = None,
    method: Literal["int8", "float16"] = "int8",
    fewest: int | None = None,
) -> None:
    """Keep a retrofit as what training added to a timm checkpoint, a quarter of its size or less.

    Whoever has the timm weights, or can download them, then has the retrofit: spot.load(FILE), or with
    `weights=` when they are in a file. On any other base it is refused.

    Args:
        model: the retrofitted model: a folder such as runs/tiny/model.
        out: the file to write; by default BASE+spot.safetensors in this folder.
        base: timm's name of what was retrofitted; by default the name the model has.
        weights: the base's weights in a file, instead of timm's download.
        method: int8 with a scale per row, or float16.
        fewest: let the weights follow the budget: all of the change with so many tokens, less with more, and none
            on the grid, where the model is the base again. By default all of it always.

    example: spot delta runs/tiny/model --weights vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors
    """
    import torch

    import spot
    from spot import report
    from spot.models.checkpoints import load_timm
    from spot.models.deltas import apply_delta, save_delta
    from spot.placement.priors import check_tokens

    trained = spot.load(model)
    name = base or trained.name
    state = load_timm(name, weights, {}).vit.state_dict()
    path = Path(f"{name}+spot.safetensors") if out is None else out
    if fewest is not None:
        check_tokens(fewest)
    config = {"tokens": trained.tokens, "prior": trained.prior, "scale": trained.scale, "fewest": fewest}
    save_delta(trained, state, path, base=name, method=method, config=config)
    again = apply_delta(state, path)
    change, lost = (
        torch.cat([(first[key].float() - second[key].float()).flatten() for key in state]).norm().item()
        for first, second in ((trained.vit.state_dict(), state), (trained.vit.state_dict(), again))
    )
    row = {
        "delta": path.name,
        "base": name,
        "method": method,
        "megabytes": path.stat().st_size / 1e6,
        "lost, % of the change": 100 * lost / change if change else 0.0,
    }
    report.show([row], "Retrofit as a delta")
