"""The colours of lines and bars: ColorBrewer's Dark2, as in the paper, and more where those run out."""

import matplotlib

Colour = tuple[float, ...]


def palette(count: int) -> list[Colour]:
    """So many colours, which differ from each other up to 20."""
    name = "Dark2" if count <= 8 else "tab10" if count <= 10 else "tab20"
    colours = matplotlib.colormaps[name]
    return [colours(index % colours.N) for index in range(count)]
