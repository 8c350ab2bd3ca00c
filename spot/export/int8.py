"""Eight bits for an exported file: weights and inputs of the blocks' linear layers, quantised once and for all budgets.

In four steps, none of which needs labels:

1. `equalise` moves scale from the channels of a layer's input into its weights (SmoothQuant), through
   the LayerNorm or value projection before it. The model computes the same; its inputs have fewer outliers.
2. `input_ranges` runs the calibration images at every budget and keeps each layer's least and greatest input.
3. `unfit` quantises one layer at a time and measures what that does to the output. The layers that change
   it most stay in float, one after the other, until all the others together change it by at most LIMIT.
   In a retrofitted ViT-Ti/16 one layer alone changes it by a third: the second of the MLP of block 7,
   whose inputs reach 215 where only a thousandth of them exceeds 2.5.
4. `quantise` rewrites the file: QuantizeLinear and DequantizeLinear around Gemm, which ONNX Runtime
   runs as one integer kernel. Attention, norms, GELU, patch projection and head stay in float.

Inputs have one scale per layer and are unsigned, weights one per output channel and are signed. This
is exact on processors with VNNI; older x86 may saturate in between, so measure there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spot.draws import Draw, generator
from spot.errors import InputError
from spot.export.graph import is_standard
from spot.models.spot_vit import SpotViT

Range = tuple[float, float]
Trial = tuple[Tensor, Tensor]  # images (B, C, H, W) and positions (B, N, 2)

BUDGETS = (9, 25, 49, 100, 196)  # tokens to calibrate with; larger grids are added
STRENGTH = 0.65  # of equalise: 0 leaves all to the inputs, 1 all to the weights
LIMIT = 0.05  # by how much the output may change, as a share of its spread
FEWEST = 8  # images to calibrate with


def layers(model: SpotViT) -> dict[str, nn.Linear]:
    """The linear layers that are quantised, by their name in the model."""
    if not all(is_standard(block) for block in model.vit.blocks):
        raise InputError(f"int8 needs timm's standard blocks, and {model.name} has others; export it in float")
    names = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    chosen = {
        f"vit.blocks.{number}.{name}": block.get_submodule(name)
        for number, block in enumerate(model.vit.blocks)
        for name in names
    }
    return {name: layer for name, layer in chosen.items() if isinstance(layer, nn.Linear)}


def trials(model: SpotViT, images: Tensor) -> list[Trial]:
    """Calibration images (M, C, H, W) shared out over the budgets; evenly placed and drawn at random in turns."""
    if len(images) < FEWEST:
        raise InputError(f"calibration needs at least {FEWEST} images, got {len(images)}; pass --calibrate a folder")
    budgets = sorted({*BUDGETS, len(model.grid())})
    random = generator(0, Draw.CALIBRATION)
    made = []
    for number, budget in enumerate(budgets):
        for start, prior in ((0, "isotropic"), (1, "uniform")):
            part = images[(start + number) % len(images) :: 2][: max(2, 2 * len(images) // len(budgets))]
            made.append((part, model.place(part, tokens=budget, prior=prior, generator=random)))
    return made


@contextmanager
def before(parts: Mapping[str, nn.Module], function: Callable[[str, Tensor], Tensor | None]) -> Iterator[None]:
    """Call function(name, input) before each layer; what it returns becomes the input."""

    def hook(name: str) -> Callable[..., Any]:
        def call(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor] | None:
            changed = function(name, inputs[0])
            return None if changed is None else (changed,)

        return call

    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in parts.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def largest_inputs(model: SpotViT, batches: Sequence[Trial]) -> dict[str, Tensor]:
    """The largest size of each channel of each layer's input (D,)."""
    sizes: dict[str, Tensor] = {}

    def look(name: str, x: Tensor) -> None:
        size = x.abs().flatten(0, -2).amax(0)
        sizes[name] = torch.maximum(sizes[name], size) if name in sizes else size

    with before(layers(model), look):
        for images, positions in batches:
            model(images, positions)
    return sizes


@torch.no_grad()
def equalise(model: SpotViT, batches: Sequence[Trial]) -> None:
    """Make the channels of the layers' inputs alike, in place, without changing what the model computes."""
    sizes = largest_inputs(model, batches)
    for number, block in enumerate(model.vit.blocks):
        name = f"vit.blocks.{number}"
        for norm, layer, which in ((block.norm1, block.attn.qkv, "attn.qkv"), (block.norm2, block.mlp.fc1, "mlp.fc1")):
            if isinstance(norm, nn.LayerNorm) and norm.elementwise_affine:
                scale = balance(sizes[f"{name}.{which}"], layer.weight)
                norm.weight.div_(scale)
                if norm.bias is not None:
                    norm.bias.div_(scale)
                layer.weight *= scale
        attention = block.attn
        if isinstance(attention.norm, nn.Identity):  # then the projection's input is a mean of values
            scale = balance(sizes[f"{name}.attn.proj"], attention.proj.weight)
            attention.qkv.weight[-len(scale) :] /= scale[:, None]
            if attention.qkv.bias is not None:
                attention.qkv.bias[-len(scale) :] /= scale
            attention.proj.weight *= scale


def balance(inputs: Tensor, weight: Tensor) -> Tensor:
    """Factors (D,) that share the size of inputs (D,) between them and the columns of weight (·, D)."""
    scale = inputs.clamp(min=1e-5) ** STRENGTH / weight.abs().amax(0).clamp(min=1e-5) ** (1 - STRENGTH)
    return scale / scale.log().mean().exp()


@torch.no_grad()
def input_ranges(model: SpotViT, batches: Sequence[Trial]) -> dict[str, Range]:
    """The least and the greatest input of each layer, and zero between them."""
    ranges: dict[str, Range] = {}

    def look(name: str, x: Tensor) -> None:
        low, high = ranges.get(name, (0.0, 0.0))
        ranges[name] = (min(low, float(x.min())), max(high, float(x.max())))

    with before(layers(model), look):
        for images, positions in batches:
            model(images, positions)
    return ranges


@torch.no_grad()
def unfit(model: SpotViT, ranges: Mapping[str, Range], batches: Sequence[Trial]) -> dict[str, float]:
    """The layers to leave in float, the worst first, and what quantising each alone changes the output by."""
    expected = outcomes(model, batches)
    spread = (expected - expected.mean(-1, keepdim=True)).norm()

    def change(names: Sequence[str]) -> float:
        with rounded(model, {name: ranges[name] for name in names}):
            return float((outcomes(model, batches) - expected).norm() / spread)

    alone = {name: change([name]) for name in ranges}
    order = sorted(alone, key=lambda name: -alone[name])
    left = 0
    while left < len(order) and change(order[left:]) > LIMIT:
        left += 1
    return {name: alone[name] for name in order[:left]}


@contextmanager
def rounded(model: SpotViT, ranges: Mapping[str, Range]) -> Iterator[None]:
    """Within the block these layers compute as with eight bits, except that sums are in float32."""
    parts = {name: layer for name, layer in layers(model).items() if name in ranges}
    weights = {name: layer.weight.data for name, layer in parts.items()}

    def rounded_input(name: str, x: Tensor) -> Tensor:
        scale, zero = input_scale(*ranges[name])
        return ((x / scale).round().add(zero).clamp(0, 255) - zero) * scale

    try:
        for name, layer in parts.items():
            layer.weight.data = rounded_weight(weights[name])
        with before(parts, rounded_input):
            yield
    finally:
        for name, layer in parts.items():
            layer.weight.data = weights[name]


def outcomes(model: SpotViT, batches: Sequence[Trial]) -> Tensor:
    """Logits of all trials, or pooled features where there is no classifier."""
    return torch.cat(
        [
            model.forward_head(model.forward_features(images, positions), pre_logits=model.num_classes < 1)
            for images, positions in batches
        ]
    )


def input_scale(low: float, high: float) -> tuple[float, int]:
    """Scale and zero point that put [low, high] on 0 to 255, and zero exactly on one of them."""
    scale = max(high - low, 1e-6) / 255
    return scale, min(255, max(0, round(-low / scale)))


def rounded_weight(weight: Tensor) -> Tensor:
    """A weight (O, I) as its eight bits give it back."""
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127
    return (weight / scale).round().clamp(-127, 127) * scale


def plan(model: SpotViT, images: Tensor) -> tuple[dict[str, Range], dict[str, float]]:
    """Equalise a model in place. Returns the inputs' ranges of the layers to quantise, and the layers to leave."""
    batches = trials(model, images)
    equalise(model, batches)
    ranges = input_ranges(model, batches)
    left = unfit(model, ranges, [(part[:4], positions[:4]) for part, positions in batches[2:8]])
    return {name: ends for name, ends in ranges.items() if name not in left}, left


# The file


def quantise(path: Path, ranges: Mapping[str, Range]) -> None:
    """Rewrite an ONNX file in which each layer of `ranges` is a Gemm whose weight is named after it."""
    import onnx
    from onnx import helper, numpy_helper

    file = onnx.load(path)
    graph = file.graph
    weights = {each.name: each for each in graph.initializer}
    shared: dict[str, str] = {}  # inputs that are quantised already, such as one of two layers

    def constant(name: str, value: NDArray[Any]) -> str:
        graph.initializer.append(numpy_helper.from_array(value, name))
        return name

    nodes = []
    for node in graph.node:
        name = node.input[1].removeprefix("model.").removesuffix(".weight") if node.op_type == "Gemm" else ""
        if name not in ranges:
            nodes.append(node)
            continue
        step, zero = input_scale(*ranges[name])
        scale = constant(f"{name}.scale", np.array(step, np.float32))
        point = constant(f"{name}.zero", np.array(zero, np.uint8))
        if node.input[0] not in shared:
            quantised, restored = f"{name}.quantised", f"{name}.restored"
            nodes.append(helper.make_node("QuantizeLinear", [node.input[0], scale, point], [quantised]))
            nodes.append(helper.make_node("DequantizeLinear", [quantised, scale, point], [restored]))
            shared[node.input[0]] = restored
        weight = numpy_helper.to_array(weights[node.input[1]])
        steps = np.maximum(np.abs(weight).max(1), 1e-9).astype(np.float32) / 127
        bits = np.clip(np.rint(weight / steps[:, None]), -127, 127).astype(np.int8)
        parts = [constant(f"{name}.weight8", bits), constant(f"{name}.weight_scale", steps)]
        parts.append(constant(f"{name}.weight_zero", np.zeros(len(steps), np.int8)))
        nodes.append(helper.make_node("DequantizeLinear", parts, [f"{name}.weight_restored"], axis=0))
        inputs = [shared[node.input[0]], f"{name}.weight_restored"]
        if len(node.input) > 2:
            bias = numpy_helper.to_array(weights[node.input[2]])
            ticks = (steps.astype(np.float64) * step).astype(np.float32)
            whole = np.rint(bias.astype(np.float64) / ticks).clip(-(2**31), 2**31 - 1).astype(np.int32)
            parts = [constant(f"{name}.bias32", whole), constant(f"{name}.bias_scale", ticks)]
            parts.append(constant(f"{name}.bias_zero", np.zeros(len(ticks), np.int32)))
            nodes.append(helper.make_node("DequantizeLinear", parts, [f"{name}.bias_restored"], axis=0))
            inputs.append(f"{name}.bias_restored")
        del node.input[:]
        node.input.extend(inputs)
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    used = set(inputs_of(graph))
    kept = [each for each in graph.initializer if each.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    onnx.save_model(file, str(path))


def inputs_of(graph: Any) -> Iterator[str]:
    """The names of what an ONNX graph's nodes take, those of its branches among them."""
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            yield from inputs_of(attribute.g)
