"""SpotViT at N tokens beside timm's ViT on N of its patches, and ToMe at the same cost: ViT-B/16, batch 8.

One CPU thread, all models in turns in one process, timed by processor time. "speed-up" is the dense timm
model's time by the row's in the same round, median over rounds; "by MACs" is what its multiply-adds
promise. "of timm" is timm's time on as many randomly kept patches by the row's: 1 is no overhead at all.
"""

from functools import partial

import torch
from timm.layers import PatchDropout as TimmPatchDropout
from torch import Tensor, nn

import spot
from benchmarks import ratio
from spot.evaluation.cost import macs
from spot.evaluation.throughput import cpu_threads, interleaved
from spot.models.baselines import tome_at_cost
from spot.models.tome_schedule import blocks_macs
from spot.models.wrappers import PlainViT

BATCH, BUDGETS = 8, (25, 49, 100, 196)


class TimmKeeping(nn.Module):
    """timm's ViT, made of timm's parts alone: embed all patches, keep N at random, run the blocks."""

    def __init__(self, vit: nn.Module, tokens: int) -> None:
        super().__init__()
        self.vit = vit
        # Half a patch more than asked for, because timm rounds the share down.
        share = (tokens + 0.5) / vit.patch_embed.num_patches
        self.drop = TimmPatchDropout(max(0.0, 1 - share)).train()

    def forward(self, images: Tensor) -> Tensor:
        x = self.drop(self.vit._pos_embed(self.vit.patch_embed(images)))
        return self.vit.forward_head(self.vit.norm(self.vit.blocks(self.vit.norm_pre(x))))


@torch.no_grad()
def run(rounds: int = 9) -> list[dict]:
    model = spot.adapt("vit_base_patch16_224").eval()
    images = torch.randn(BATCH, 3, 224, 224)
    positions = {tokens: torch.rand(BATCH, tokens, 2) for tokens in BUDGETS}
    merging = {tokens: tome_at_cost(model, tokens) for tokens in BUDGETS[:-1]}
    calls = {("timm", "dense"): model.vit}
    cost = {("timm", "dense"): macs(PlainViT(model))}
    for tokens in BUDGETS:
        calls["timm", tokens] = TimmKeeping(model.vit, tokens)
        calls["SpotViT", tokens] = partial(model, positions=positions[tokens])
        cost["SpotViT", tokens] = macs(model, tokens=tokens)
        # timm embeds all patches, and its positions are a table without products.
        grid = model.vit.patch_embed.num_patches * model.vit.patch_embed.proj.weight.numel()
        cost["timm", tokens] = grid + blocks_macs(model, tokens) + model.vit.head.weight.numel()
    for tokens, merged in merging.items():
        calls["ToMe", tokens], cost["ToMe", tokens] = merged, macs(merged)
    with cpu_threads(1):
        for call in calls.values():
            call(images)
        seconds = interleaved(calls, images, rounds, "processor")
    return [
        {
            "model": name,
            "tokens": tokens,
            "speed-up": ratio(seconds, ("timm", "dense"), (name, tokens)),
            "by MACs": cost["timm", "dense"] / cost[name, tokens],
            "of timm": None if name == "timm" else ratio(seconds, ("timm", tokens), (name, tokens)),
        }
        for name, tokens in sorted(calls, key=lambda key: (str(key[1]).rjust(5), key[0] != "timm"))
    ]
