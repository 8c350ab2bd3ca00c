"""Training a policy without labels: `spot learn`.

    policy = learn(spot.Family("vit-ti"), "images", "vit-ti.policy.safetensors", LearnOptions(target="attention"))

What the policy's map should be is computed once for every image and for random crops of it (`views`), and kept beside
the output in shards of 64; so is what the look sees. Then the look alone is trained, which takes minutes. A kill costs
at most one shard or one epoch: the same command goes on. Targets, densities (B, R, R) over the image that sum to 1:

    attention    how much the class token of a dense ViT attends to each cell, in its last blocks (the square root)
    saliency     maps of a saliency network, an .onnx file, through the same rule as `focus`

All are then taken relative to their mean over the images, around the middle (`center`; 0 leaves them as they are).
To add one, write a function (model, teacher, images, options) → (B, R, R) and list it in TARGETS.
"""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import create_transform
from timm.layers import apply_rot_embed_cat
from torch import Tensor, nn
from torch.utils.data import Subset

from spot import report
from spot.data.canvas import Canvas
from spot.data.difficulty import difficulty_of
from spot.data.images import CANVAS, Images, data_for, listed, open_data
from spot.data.loader import loader
from spot.data.picture import evaluation_transform
from spot.data.scenes import Scenes
from spot.draws import Draw, generator, seeded
from spot.errors import InputError, unknown
from spot.models.family import Source, at_budget, dense_model, hash_weights
from spot.models.spot_vit import SpotViT
from spot.options import LearnOptions
from spot.placement.policy import Policy
from spot.placement.saliency import open_saliency, rgb
from spot.store import (
    as_json,
    locked,
    read_json,
    read_state,
    read_tensors,
    refuse_difference,
    write_json,
    write_state,
    write_tensors,
)  # fmt: skip

SHARD = 64  # images whose targets are kept in one file
LAST = 3  # blocks whose class attention is the target
LARGER = 1.5  # thumbnails are kept so much larger than they are seen, to be cropped
CROP = 0.3  # of its image that a view shows at least
JITTER = 0.3, 0.2  # how much contrast and colour of thumbnails vary, in training


class Views(Images):
    """Photographs as they are, and after them random crops of each, mirrored or not, which never change."""

    def __init__(self, images: Images, views: int, seed: int, data_config: dict[str, Any]) -> None:
        vars(self).update(vars(images))
        self.photographs, self.seed = len(images), seed
        self.keys, self.order = [*images.keys] * (1 + views), [*images.order] * (1 + views)
        size = {"input_size": data_config["input_size"][-2:], "interpolation": "bicubic"}
        normal = {name: data_config[name] for name in ("mean", "std")}
        self.crop = create_transform(**size, **normal, is_training=True, scale=(CROP, 1.0), color_jitter=None)

    def seen(self, image: Image.Image, index: int) -> Tensor:
        view, number = divmod(index, self.photographs)
        if not view:
            return self.transform(image)
        with seeded(self.seed, Draw.CROP, number, view):
            return self.crop(image)


# Targets


def attention(model: SpotViT, teacher: SpotViT, images: Tensor, how: LearnOptions) -> Tensor:
    """The square root of the class attention, so that one bright cell does not take all tokens: (B, rows, columns)."""
    return density(class_attention(teacher, seen_by(teacher, model, images)).sqrt())


@torch.no_grad()
def class_attention(model: SpotViT, images: Tensor, last: int = LAST) -> Tensor:
    """How much the class token attends to each cell of the grid: (B, rows, columns), each map summing to 1."""
    blocks = model.vit.blocks[-last:]
    seen: list[tuple[Tensor, Tensor | None]] = []

    def keep(_: nn.Module, given: Any, named: Any) -> None:
        seen.append((given[0], named.get("rope")))

    hooks = [block.attn.register_forward_pre_hook(keep, with_kwargs=True) for block in blocks]
    try:
        model.forward_features(images, model.grid(images))
    finally:
        for hook in hooks:
            hook.remove()
    maps, prefix = [], model.num_prefix_tokens
    for block, (x, rope) in zip(blocks, seen, strict=True):
        attn = block.attn
        if not isinstance(getattr(attn, "qkv", None), nn.Linear) or not prefix:
            raise InputError(f"{model.name} has no class token whose attention could be read; use another target")
        queries, keys, _ = attn.qkv(x).unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        queries, keys = attn.q_norm(queries[:, :, :1]), attn.k_norm(keys)
        if rope is not None:  # the class token has no place of its own, so its query is not turned
            turned = apply_rot_embed_cat(keys[:, :, prefix:], rope, half=getattr(attn, "rotate_half", False))
            keys = torch.cat([keys[:, :, :prefix], turned], 2)
        weights = (queries @ keys.transpose(2, 3) * attn.scale).softmax(-1)
        maps.append(weights[:, :, 0, prefix:].mean(1))
    rows, columns = (length // model.patch_size for length in images.shape[-2:])
    return density(torch.stack(maps).mean(0).unflatten(1, (rows, columns)))


def seen_by(teacher: SpotViT, model: SpotViT, images: Tensor) -> Tensor:
    """A model's images with the teacher's mean and std."""
    here, there = model.data_config, teacher.data_config
    if (here["mean"], here["std"]) == (there["mean"], there["std"]):
        return images
    mean, std, other_mean, other_std = (
        images.new_tensor(config[name])[:, None, None] for config in (here, there) for name in ("mean", "std")
    )
    return (images * std + mean - other_mean) / other_std


def divergence(full: Tensor, logits: Tensor) -> Tensor:
    """KL of logits (B, classes) from probabilities: (B,)."""
    return F.kl_div(logits.log_softmax(1), full, reduction="none").sum(1)


def density(maps: Tensor) -> Tensor:
    return maps / maps.sum((1, 2), keepdim=True)


Target = Callable[[SpotViT, SpotViT, Tensor, LearnOptions], Tensor]
TARGETS: dict[str, Target] = {"attention": attention}


def saliency_target(path: str) -> Target:
    """Maps of a saliency, such as an .onnx file, as a target."""
    source = open_saliency(path)

    def maps(model: SpotViT, teacher: SpotViT, images: Tensor, how: LearnOptions) -> Tensor:
        return density(F.adaptive_avg_pool2d(source(rgb(images, model.data_config)), 28) + 1e-4)

    return maps


def around_the_middle(targets: Tensor, width: float, whole: int) -> Tensor:
    """Targets (M, R, C) relative to the mean of the first `whole`, times a Gaussian around the middle of this width.

    A ViT's class token attends to some cells, such as the corners, whatever the image: that is no reason to look there.
    Photographs have their object near the middle, more so than attention says.
    """
    maps = targets.float()
    y, x = (((torch.arange(length) + 0.5) / length - 0.5) for length in maps.shape[1:])
    middle = torch.exp(-(y[:, None] ** 2 + x**2) / (2 * width**2))
    return density(maps / maps[:whole].mean(0) * middle).to(targets.dtype)


# What the look sees, kept so that every epoch costs little


def thumbnails(policy: Policy, images: Tensor) -> Tensor:
    """What is kept of images: large thumbnails (B, 3, S, S)."""
    return F.adaptive_avg_pool2d(images, int(policy.look.side * LARGER))


def augmented_rows(
    policy: Policy, kept: Tensor, targets: Tensor, rows: Tensor, draws: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Logits of the map and the target density, both (B, R, R), of some rows, as one epoch sees them."""
    mirrored = torch.rand(len(rows), generator=draws) < 0.5
    target = targets[rows].float()
    x, cells = kept[rows].float(), policy.look.side // 4
    zoom = 1 - 0.4 * (2 * torch.rand(len(rows), generator=draws) - 1).clamp(min=0)  # half of them whole
    shift = (2 * torch.rand(len(rows), 2, generator=draws) - 1) * (1 - zoom)[:, None]
    theta = torch.zeros(len(rows), 2, 3)
    theta[:, 0, 0], theta[:, 1, 1], theta[:, :, 2] = torch.where(mirrored, -zoom, zoom), zoom, shift
    x = F.grid_sample(x, F.affine_grid(theta, [*x.shape], align_corners=False), align_corners=False)
    contrast, colour = JITTER
    x = x * (1 + contrast * torch.randn(len(rows), 1, 1, 1, generator=draws))
    x = x + colour * torch.randn(len(rows), x.shape[1], 1, 1, generator=draws)
    logits = policy.look(x)
    places = F.affine_grid(theta, [len(rows), 1, cells, cells], align_corners=False)
    target = F.grid_sample(target[:, None], places, align_corners=False, padding_mode="border")[:, 0]
    return logits, density(target)


# The run


def learn(
    source: Source,
    data: str | Path,
    out: str | Path,
    how: LearnOptions | None = None,
    *,
    teacher: SpotViT | None = None,
    limit: int | None = None,
    leave_out: Path | None = None,
    split: str = "train",
) -> Policy:
    """Train a policy on unlabelled images and write it to `out`; see the module.

    Args:
        source: the model or family whose tokens it will place.
        data: a folder of images, a timm data set, "scenes" or "needle"; or "needle:" and a folder, for canvases.
        teacher: the dense ViT; by default the model on its own grid, of a family the ViT that was retrofitted.
        limit, leave_out: at most so many images, and a file that names images never to train on.
    """
    out, how = Path(out), how or LearnOptions()
    if out.suffix != ".safetensors":
        raise InputError(f"a policy is written to a .safetensors file, got {out}")
    model, known = at_budget(source, how.tokens), hash_weights(source)
    teacher_hash = known if teacher is None else hash_weights(teacher)
    teacher = dense_model(source) if teacher is None else teacher
    if how.target not in TARGETS and not how.target.endswith(".onnx"):
        raise unknown("target", how.target, TARGETS, hint="or give an .onnx file of a saliency network")
    images = images_of(model, data, limit, leave_out, split)
    whole = len(images)
    with seeded(how.seed, Draw.WEIGHTS):
        options: dict[str, Any] = {} if how.side is None else {"side": how.side}
        about = {"model": model.name, "hash": known}
        policy = Policy(model.patch_size, strength=how.strength, sizes=how.sizes, about=about, **options)
    settings = as_json({**asdict(how), "model": known, "teacher": teacher_hash, "images": whole})
    if how.views and isinstance(images, Images) and not isinstance(images, Canvas):
        images = Views(images, how.views, how.seed, model.data_config)
    folder = out.with_suffix(".learning")
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, str(out)):
        if (folder / "settings.json").is_file():
            advice = f"delete {folder} to begin again"
            refuse_difference(str(folder), read_json(folder / "settings.json"), settings, advice)
        write_json(folder / "settings.json", settings)
        kept, targets = compute_targets(policy, model, teacher, images, how, folder)
        targets = around_the_middle(targets, how.center, whole) if how.center else targets
        loss = fit(policy, kept, targets, how, folder)
    policy.about["made"] = {**settings, "loss": round(loss, 4)}
    policy.eval().requires_grad_(False)
    for part in (*policy.look.head.parameters(), policy.look.everywhere):
        part.mul_(how.power)
    policy.save(out)
    return policy


def images_of(
    model: SpotViT, data: str | Path, limit: int | None, leave_out: Path | None, split: str
) -> Images | Scenes:
    """The images, without those that are never to be trained on."""
    if difficulty_of(data) is not None:
        return data_for(model, data, limit=limit or 2000, split=split)  # type: ignore[return-value]
    folder = str(data).removeprefix(CANVAS)
    images = open_data(folder, transform=evaluation_transform(model.data_config), split=split)
    if leave_out is not None:
        images.without(listed(leave_out))
    images.thin(limit or len(images))
    return images if folder == str(data) else Canvas(images)


@torch.no_grad()
def compute_targets(
    policy: Policy, model: SpotViT, teacher: SpotViT, images: Images | Scenes, how: LearnOptions, folder: Path
) -> tuple[Tensor, Tensor]:
    """What the look sees (M, ...) and the targets (M, R, R) of all images, float16, from shards or into them."""
    device = next(model.parameters()).device
    missing = [
        number
        for number in range(math.ceil(len(images) / SHARD))
        if not (folder / f"{number:05d}.safetensors").exists()
    ]
    rows = [row for number in missing for row in range(number * SHARD, min((number + 1) * SHARD, len(images)))]
    batches = loader(Subset(images, rows), SHARD) if rows else ()  # type: ignore[arg-type]
    target = saliency_target(how.target) if how.target.endswith(".onnx") else TARGETS[how.target]
    for number, batch in report.track(zip(missing, batches, strict=True), "targets", len(missing)):
        given = batch.images.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=how.precision == "bf16"):
            wanted = target(model, teacher, given, how)
        made = {"seen": thumbnails(policy, given).half(), "targets": wanted.half()}
        write_tensors(folder / f"{number:05d}.safetensors", made, "spot_targets", {})
    shards = [read_tensors(path)[0] for path in sorted(folder.glob("[0-9]*.safetensors"))]
    return torch.cat([each["seen"] for each in shards]), torch.cat([each["targets"] for each in shards])


def fit(policy: Policy, kept: Tensor, targets: Tensor, how: LearnOptions, folder: Path) -> float:
    """Train the look to give the targets: cross-entropy of densities. Returns the last epoch's mean KL."""
    look = policy.look.train()
    optimizer = torch.optim.AdamW(look.parameters(), how.lr, weight_decay=how.weight_decay)
    steps = math.ceil(len(kept) / how.batch)
    first, loss = 0, math.nan
    if (folder / "state.pt").is_file():
        state = read_state(folder / "state.pt")
        look.load_state_dict(state["look"])
        optimizer.load_state_dict(state["optimizer"])
        first, loss = state["epoch"], state["loss"]
    for epoch in report.track(range(first, how.epochs), "epochs", how.epochs - first):
        order = torch.randperm(len(kept), generator=generator(how.seed, Draw.ORDER, epoch))
        total = 0.0
        for step, rows in enumerate(order.split(how.batch)):
            done = (epoch * steps + step) / (how.epochs * steps)
            for group in optimizer.param_groups:
                group["lr"] = how.lr * min(1.0, (epoch * steps + step + 1) / 20) * (1 + math.cos(math.pi * done)) / 2
            logits, target = augmented_rows(policy, kept, targets, rows, generator(how.seed, Draw.CROP, epoch, step))
            mean = F.kl_div(logits.flatten(1).log_softmax(1), target.flatten(1), reduction="batchmean")
            optimizer.zero_grad()
            mean.backward()
            optimizer.step()
            total += mean.item() * len(rows)
        loss = total / len(kept)
        state = {"look": look.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1, "loss": loss}
        write_state(folder / "state.pt", state)
    return loss
