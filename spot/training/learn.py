"""Train a policy without labels (`spot learn`).

    policy = learn(spot.Family("vit-ti"), "images", "vit-ti.policy.safetensors", LearnOptions(epochs=4))

The target maps are computed once for every image and for its random crops (`views`). They are cached next to the
output in shards of 64, with the thumbnails. Then the policy's network is trained, which takes minutes. The same command
resumes an interrupted run, which loses at most one shard or epoch. Targets are densities (B, R, R) that sum to 1:

    attention    the square root of the class-token attention in the dense ViT's last blocks
    FILE.onnx    maps of a saliency network

They are divided by their mean over the images and multiplied by a centred Gaussian (`center`; 0 disables both).
"""

import copy
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import create_transform
from timm.layers import apply_rot_embed_cat
from torch import Tensor, nn
from torch.utils.data import Subset

from spot import report
from spot.data.difficulty import difficulty_of
from spot.data.images import Data, Images, Sample, Unread, data_for, open_data
from spot.data.loader import loader
from spot.draws import Draw, generator, seeded
from spot.errors import InputError, unknown
from spot.models.family import Source, at_budget, dense_model, hash_weights
from spot.models.spot_vit import SpotViT
from spot.options import LearnOptions
from spot.placement.policy import Policy
from spot.placement.saliency import open_saliency, rgb
from spot.store import read_tensors, write_tensors
from spot.training.optim import training_steps
from spot.training.run_folder import RunFolder

SHARD = 64  # images per target file
SCENES = 2000  # default number of scenes, which have no end
LAST = 3  # number of last blocks whose class attention is averaged
LARGER = 1.5  # size of cached thumbnails relative to the network's input, so that they can be cropped
POWER = 1.5  # predicted maps are raised to this power, which makes them narrower
CROP = 0.3  # minimum area of a crop, as a share of the image
CONTRAST, COLOUR = 0.3, 0.2  # standard deviations of the thumbnails' augmentation

Target = Callable[[SpotViT, SpotViT, Tensor], Tensor]  # model, teacher, images → densities (B, R, C)


class Crops(Images):
    """Photographs, followed by random crops of each, some mirrored. The crops are the same in every epoch."""

    def __init__(self, images: Images, crops: int, seed: int, data_config: dict[str, Any]) -> None:
        keys = [*images.keys] * (1 + crops)
        super().__init__(images.source, keys, images.classes, transform=images.transform, skip=images.skip)
        self.whole, self.cropped, self.seed = images, copy.copy(images), seed
        size = {"input_size": data_config["input_size"][-2:], "interpolation": "bicubic"}
        normal = {name: data_config[name] for name in ("mean", "std")}
        augment = {"is_training": True, "scale": (CROP, 1.0), "color_jitter": None}
        self.cropped.transform = create_transform(**size, **normal, **augment)

    def read(self, index: int) -> Sample | Unread:
        crop, number = divmod(index, len(self.whole))
        if not crop:
            return self.whole.read(number)
        with seeded(self.seed, Draw.CROP, number, crop):
            return self.cropped.read(number)


# Targets


def attention(model: SpotViT, teacher: SpotViT, images: Tensor) -> Tensor:
    """The square root of the class attention (B, rows, columns), so that one cell does not attract all tokens."""
    return density(class_attention(teacher, convert_normalisation(images, model, teacher)).sqrt())


def open_target(name: str) -> Target:
    """The function that computes targets: attention, or the maps of a saliency network in an .onnx file."""
    if name == "attention":
        return attention
    if not name.endswith(".onnx"):
        raise unknown("target", name, ("attention",), hint="or give an .onnx file of a saliency network")
    source = open_saliency(name)

    def maps(model: SpotViT, teacher: SpotViT, images: Tensor) -> Tensor:
        return density(F.adaptive_avg_pool2d(source(rgb(images, model.data_config)), 28) + 1e-4)

    return maps


@torch.no_grad()
def class_attention(model: SpotViT, images: Tensor) -> Tensor:
    """Attention of the class token to the grid's cells, averaged over the last blocks: (B, rows, columns), sum 1."""
    blocks = model.vit.blocks[-LAST:]
    inputs: list[tuple[Tensor, Tensor | None]] = []

    def keep(_: nn.Module, given: Any, named: Any) -> None:
        inputs.append((given[0], named.get("rope")))

    hooks = [block.attn.register_forward_pre_hook(keep, with_kwargs=True) for block in blocks]
    try:
        model.forward_features(images, model.grid(images))
    finally:
        for hook in hooks:
            hook.remove()
    maps, prefix = [], model.num_prefix_tokens
    for block, (x, rope) in zip(blocks, inputs, strict=True):
        attn = block.attn
        if not isinstance(getattr(attn, "qkv", None), nn.Linear) or not prefix:
            raise InputError(f"{model.name} has no class token to take attention from; use another target")
        queries, keys, _ = attn.qkv(x).unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        queries, keys = attn.q_norm(queries[:, :, :1]), attn.k_norm(keys)
        if rope is not None:  # the class token has no position, so its query is not rotated
            rotated = apply_rot_embed_cat(keys[:, :, prefix:], rope, half=getattr(attn, "rotate_half", False))
            keys = torch.cat([keys[:, :, :prefix], rotated], 2)
        weights = (queries @ keys.transpose(2, 3) * attn.scale).softmax(-1)
        maps.append(weights[:, :, 0, prefix:].mean(1))
    rows, columns = (length // model.patch_size for length in images.shape[-2:])
    return density(torch.stack(maps).mean(0).unflatten(1, (rows, columns)))


def convert_normalisation(images: Tensor, model: SpotViT, teacher: SpotViT) -> Tensor:
    """Convert images from the model's normalisation to the teacher's."""
    here, there = model.data_config, teacher.data_config
    if (here["mean"], here["std"]) == (there["mean"], there["std"]):
        return images
    mean, std, other_mean, other_std = (
        images.new_tensor(config[name])[:, None, None] for config in (here, there) for name in ("mean", "std")
    )
    return (images * std + mean - other_mean) / other_std


def density(maps: Tensor) -> Tensor:
    return maps / maps.sum((1, 2), keepdim=True)


def center_targets(targets: Tensor, width: float, whole: int) -> Tensor:
    """Divide targets (M, R, C) by the mean of the first `whole`, and multiply by a centred Gaussian of this width.

    A ViT's class token attends to some cells, such as the corners, in all images, although they are not important.
    In photographs, objects are near the centre more often than attention suggests.
    """
    maps = targets.float()
    y, x = (((torch.arange(length) + 0.5) / length - 0.5) for length in maps.shape[1:])
    middle = torch.exp(-(y[:, None] ** 2 + x**2) / (2 * width**2))
    return density(maps / maps[:whole].mean(0) * middle).to(targets.dtype)


# Training


def learn(
    source: Source,
    data: str | Path,
    out: str | Path,
    options: LearnOptions | None = None,
    *,
    teacher: SpotViT | None = None,
    limit: int | None = None,
    leave_out: Path | None = None,
    split: str = "train",
) -> Policy:
    """Train a policy on unlabelled images and write it to `out`; see the module docstring.

    Args:
        source: the model or family whose tokens the policy will place.
        data: a folder of images, a timm data set, "scenes" or "needle".
        teacher: the dense ViT. Default: the model on its own grid, or for a family the original ViT.
        limit: maximum number of images.
        leave_out: a file that names images to exclude.
    """
    out, options = Path(out), options or LearnOptions()
    target = open_target(options.target)
    if out.suffix != ".safetensors":
        raise InputError(f"a policy is written to a .safetensors file, got {out}")
    model, model_hash = at_budget(source), hash_weights(source)
    teacher_hash = model_hash if teacher is None else hash_weights(teacher)
    teacher = dense_model(source) if teacher is None else teacher
    images: Data
    if difficulty_of(data) is not None:
        images = data_for(model, data, limit=limit or SCENES, split=split)
    else:
        images = open_data(data, transform=model.transform(), split=split, limit=limit, leave_out=leave_out)
    whole = len(images)
    with seeded(options.seed, Draw.WEIGHTS):
        policy = Policy(model.patch_size, about={"model": model.name, "hash": model_hash}, side=options.side)
    settings = {**asdict(options), "model": model_hash, "teacher": teacher_hash, "images": whole}
    if options.views and isinstance(images, Images):
        images = Crops(images, options.views, options.seed, model.data_config)
    folder = RunFolder(out.with_suffix(".learning"), settings)
    with folder.held():
        thumbnails, targets = compute_targets(target, model, teacher, images, options, folder.path)
        targets = center_targets(targets, options.center, whole) if options.center else targets
        fit(policy, thumbnails, targets, options, folder.path)
    policy.about["made"] = folder.settings
    policy.eval().requires_grad_(False)
    for part in (*policy.look.head.parameters(), policy.look.everywhere):
        part.mul_(POWER)
    policy.save(out)
    return policy


@torch.no_grad()
def compute_targets(
    target: Target, model: SpotViT, teacher: SpotViT, images: Data, options: LearnOptions, folder: Path
) -> tuple[Tensor, Tensor]:
    """Thumbnails (M, 3, S, S) and targets (M, R, R) of all images, float16; computes the shards that are missing."""
    device = next(model.parameters()).device
    files = [folder / f"{number:05d}.safetensors" for number in range(math.ceil(len(images) / SHARD))]
    missing = [number for number, file in enumerate(files) if not file.exists()]
    rows = [row for number in missing for row in range(number * SHARD, min((number + 1) * SHARD, len(images)))]
    batches = loader(Subset(images, rows), SHARD) if rows else ()  # type: ignore[arg-type]
    for number, batch in report.track(zip(missing, batches, strict=True), "targets", len(missing)):
        given = batch.images.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bf16"):
            wanted = target(model, teacher, given)
        small = F.adaptive_avg_pool2d(given, int(options.side * LARGER))
        write_tensors(files[number], {"seen": small.half(), "targets": wanted.half()}, "spot_targets", {})
    shards = [read_tensors(file)[0] for file in files]
    return torch.cat([each["seen"] for each in shards]), torch.cat([each["targets"] for each in shards])


def fit(policy: Policy, thumbnails: Tensor, targets: Tensor, options: LearnOptions, folder: Path) -> None:
    """Train the policy's network to predict the target densities (KL divergence)."""
    network = policy.look.train()
    optimizer = torch.optim.AdamW(network.parameters(), options.lr, weight_decay=0.1)
    steps = math.ceil(len(thumbnails) / options.batch)
    file = folder / "state.pt"
    for number in training_steps(options.epochs * steps, network, optimizer, "policy", file=file, every=steps):
        epoch, step = divmod(number, steps)
        order = torch.randperm(len(thumbnails), generator=generator(options.seed, Draw.ORDER, epoch))
        rows = order[step * options.batch : (step + 1) * options.batch]
        images, target = augmented(policy, thumbnails, targets, rows, generator(options.seed, Draw.CROP, epoch, step))
        maps = network(images).flatten(1).log_softmax(1)
        F.kl_div(maps, target.flatten(1), reduction="batchmean").backward()


def augmented(
    policy: Policy, thumbnails: Tensor, targets: Tensor, rows: Tensor, draws: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Some thumbnails with random crop, mirroring, contrast and colour, and their target densities (B, R, R)."""
    mirrored = torch.rand(len(rows), generator=draws) < 0.5
    target = targets[rows].float()
    x, cells = thumbnails[rows].float(), policy.look.side // 4
    zoom = 1 - 0.4 * (2 * torch.rand(len(rows), generator=draws) - 1).clamp(min=0)  # half are not cropped
    shift = (2 * torch.rand(len(rows), 2, generator=draws) - 1) * (1 - zoom)[:, None]
    theta = torch.zeros(len(rows), 2, 3)
    theta[:, 0, 0], theta[:, 1, 1], theta[:, :, 2] = torch.where(mirrored, -zoom, zoom), zoom, shift
    x = F.grid_sample(x, F.affine_grid(theta, [*x.shape], align_corners=False), align_corners=False)
    x = x * (1 + CONTRAST * torch.randn(len(rows), 1, 1, 1, generator=draws))
    x = x + COLOUR * torch.randn(len(rows), x.shape[1], 1, 1, generator=draws)
    places = F.affine_grid(theta, [len(rows), 1, cells, cells], align_corners=False)
    target = F.grid_sample(target[:, None], places, align_corners=False, padding_mode="border")[:, 0]
    return x, density(target)
