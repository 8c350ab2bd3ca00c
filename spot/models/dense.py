"""Dense feature maps from scattered tokens.

features = model.token_features(images, indices=1, norm=True, tokens=49)[0]
dense = model.to_map(features, (14, 14))                # (B, D, 14, 14)
"""

import torch
from torch import Tensor

from spot.errors import InputError
from spot.tokens.position_embedding import grid_positions

NEIGHBOURS = 4


def to_map(tokens: Tensor, positions: Tensor, size: tuple[int, int]) -> Tensor:
    """Tokens (B, N, D) at positions (B, N, 2 or 3) → a map (B, D, height, width).

    The value of a cell is a weighted mean of the tokens nearest to its centre, with weights ((R − d) / (R d))².
    Here d is a token's distance in cells of the map, and R the distance of the nearest token that is left out
    (Franke and Little's form of Shepard's interpolation). The map is continuous in the positions. A token at the
    centre of a cell gives exactly the cell's value, so tokens on a grid give that grid's map exactly.
    """
    if tokens.ndim != 3 or tokens.shape[:2] != positions.shape[:2]:
        raise InputError(f"tokens (B, N, D) and positions (B, N, 2) are needed, got {tuple(tokens.shape)} and "
                         f"{tuple(positions.shape)}")  # fmt: skip
    if min(size) < 1:
        raise InputError(f"a map needs at least one cell, got {size}")
    cells = grid_positions(size).to(tokens.device)[None]
    apart = (cells[:, :, None] - positions[:, None, :, :2].float()) * cells.new_tensor(size)
    distance = apart.square().sum(-1).sqrt().clamp(min=1e-6)  # not cdist: it rounds small distances
    near, which = distance.topk(min(NEIGHBOURS + 1, distance.shape[2]), largest=False)
    if near.shape[2] > NEIGHBOURS:
        radius, near, which = near[..., NEIGHBOURS:], near[..., :NEIGHBOURS], which[..., :NEIGHBOURS]
        weight = ((radius - near).clamp(min=1e-6) / (radius * near)).square()
    else:
        weight = near.reciprocal().square()
    centred = near < 1e-4  # a token at the centre of the cell
    weight = torch.where(centred.any(-1, keepdim=True), centred.to(weight), weight)
    weight = weight / weight.sum(-1, keepdim=True)
    chosen = tokens[:, None].take_along_dim(which[..., None], 2)  # (B, cells, neighbours, D)
    values = (chosen * weight[..., None].to(tokens.dtype)).sum(2)
    return values.transpose(1, 2).unflatten(2, size)
