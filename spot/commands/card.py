"""spot card: a model card for the hub."""

from pathlib import Path

from spot.commands import options


def card(
    model: options.ModelArgument,
    /,
    results: Path | None = None,
    weights: options.Weights = None,
    licence: str = "",
    out: Path = Path("-"),
) -> None:
    """Write the card that the hub shows: what the model is, how to load it, and what was measured of it.

    Args:
        results: what spot evaluate MODEL --json FILE wrote; its table and intervals go into the card.
        licence: of the weights, such as cc-by-nc-4.0; by default what timm says.
        out: the file, README.md for the hub; - is standard output.

    example: spot card scenes-a --results scenes-a.json --out README.md
    """
    import spot
    from spot.models.card import card, read_results
    from spot.store import write_text

    loaded = spot.load(model, weights=weights)
    measured = None if results is None else read_results(results, loaded)
    write_text(out, card(loaded, model, measured, licence))
