"""The paper at its original scale in one program: three kinds of ViT-B/16, ImageNet, every table and figure.

    python -m paper.scale_up --plan-only                                                 # the steps, hours and memory
    accelerate launch -m paper.scale_up --data imagenet --weights weights --out runs/paper        # one node, all GPUs
    accelerate launch --num_machines 4 --num_processes 32 --machine_rank $RANK --main_process_ip $HOST \\
        --main_process_port 29500 -m paper.scale_up --data imagenet --weights weights --out runs/paper   # on each of 4
    torchrun --nproc_per_node 2 -m paper.scale_up --rehearse --out runs/rehearsal   # two processes on a CPU, gloo

The same command resumes: steps whose file exists are skipped, training continues from its last checkpoint, and studies
from their measurements. With several nodes --out and --data must be on a shared file system.

--weights holds four files: timm's vit_base_patch16_224.augreg_in1k.safetensors and
vit_base_patch16_224.augreg2_in21k_ft_in1k.safetensors, and He et al.'s mae_pretrain_vit_base_full.pth (retrofitted)
and mae_finetuned_vit_base.pth (the baseline). --data is ImageNet's root, with train/<wnid> and val/<wnid>.

We have not run it at that scale. --rehearse runs every step on ViT-B reduced to 2 blocks and 96 pixels, with random
weights, on 40 random images, and writes the same tables.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import tyro
from PIL import Image
from safetensors.torch import save_file
from torchvision.transforms import ToTensor

import spot
from paper.backbone import Backbone, vit_b16_macs
from paper.lab import Lab
from paper.program import program
from paper.run import run as run_studies
from paper.run import write_findings
from paper.settings import StudySettings
from paper.study import find_study
from spot import report
from spot.data.images import open_data
from spot.errors import unknown
from spot.models.checkpoints import read_weights
from spot.models.mae import DECODER_NAMES, Decoder
from spot.options import TrainOptions
from spot.placement.saliency import record_method, write_maps
from spot.processes import this_process
from spot.store import write_text
from spot.training.new_weights import with_classifier
from spot.training.recipes import find_recipe, override
from spot.training.run import run as train

TRAIN_IMAGES, VAL_IMAGES, BUDGETS = 1_281_167, 50_000, (25, 49, 100, 196)
GPUS = 8
FLOPS = 1e14  # sustained per GPU and second: a third of an A100's bfloat16 peak
READ = 500  # images per second that 8 workers decode for each GPU
FULL, FINETUNED = "mae_pretrain_vit_base_full.pth", "mae_finetuned_vit_base.pth"
IN21K, IN1K = "vit_base_patch16_224.augreg2_in21k_ft_in1k", "vit_base_patch16_224.augreg_in1k"
MAE, WNIDS = "vit_base_patch16_224.mae", ("n01440764", "n02123045", "n02504458", "n07753592")


@dataclass(frozen=True)
class Kind:
    """One of the paper's three models."""

    run: str  # the folder of the model to study
    model: str  # timm's name
    baseline: str  # the file of the plain ViT
    recipe: str = ""  # for its retrofit with labels


KINDS = {
    "CLS-IN21k": Kind("in21k", IN21K, IN21K, "cls-in21k"),
    "CLS-IN1k": Kind("in1k", IN1K, IN1K, "cls-in1k"),
    "MAE-IN1k": Kind("mae-finetuned", MAE, FINETUNED),
}
# Forward passes per validation image and model, in dense passes; a search step counts as three. Estimates.
STUDIES = {
    "off-grid": 20, "priors": 10, "saliency-gain": 30, "transfer": 5, "classification": 60, "robustness": 8, "tome": 15,
    "elastic": 15, "speed": 10, "retrofit": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """All paths and options, and the changes for a rehearsal."""

    data: str
    weights: Path
    out: Path
    accumulate: int = 1
    workers: int = 8
    changes: Mapping[str, Any] = field(default_factory=lambda: {"precision": "bf16"})  # of every recipe
    decoder: Mapping[str, Any] = field(default_factory=dict)  # of the recipe mae-in1k
    cut: Mapping[str, Any] = field(default_factory=dict)  # timm's options for the ViTs
    method: str = "clipseg:class"  # of saliency maps; the paper marks the row as an oracle's without naming its prompt
    studies: Mapping[str, Any] = field(default_factory=dict)  # settings of the studies

    def file(self, name: str) -> Path:
        return self.weights / (name if name.endswith(".pth") else f"{name}.safetensors")

    def options(self, run: str) -> TrainOptions:
        """Options of a training run."""
        return TrainOptions(
            data=self.data, out=self.out / run, val=self.data, accumulate=self.accumulate, workers=self.workers
        )


@dataclass(frozen=True)
class Step:
    """A step, the file it writes, and its cost at the paper's scale."""

    name: str
    description: str
    run: Callable[[Setup], None]
    output: str  # a file below --out that exists once the step is done
    flops: float
    reads: float  # images decoded
    memory: float  # GB per GPU, without the framework's own

    @property
    def hours(self) -> float:
        """Hours on 8 GPUs for arithmetic or reading, whichever is longer. An estimate, not a measurement."""
        return max(self.flops / FLOPS, self.reads / READ) / GPUS / 3600


def steps() -> list[Step]:
    """All steps, in order."""
    dense = vit_b16_macs(196)
    seen = vit_b16_macs(49)  # of MAE's encoder
    decoder = 8 * (197 * 12 * 512**2 + 2 * 197**2 * 512)
    clipseg = 45e9  # a ViT-B/16 on 352 pixels and its decoder
    listed = [
        Step(kind.run, f"retrofit {kind.model}, recipe {kind.recipe}", partial(retrofit, kind=kind),
             f"{kind.run}/model/model.safetensors", *training(50, dense, memory(196, 2048)))
        for kind in KINDS.values() if kind.recipe
    ]  # fmt: skip
    listed += [
        Step("mae", f"retrofit {MAE} with its decoder, recipe mae-in1k", retrofit_mae,
             "mae/model/model.safetensors",
             *training(50, seen + decoder, memory(49, 4096) + memory(197, 4096, 512, 8))),
        Step("mae-finetuned", "fine-tune it, recipe mae-finetune", finetune_mae,
             "mae-finetuned/model/model.safetensors", *training(100, dense, memory(196, 1024))),
        Step("maps", "CLIPSeg's saliency maps of validation and training images", make_maps,
             "maps/done.txt", 2 * clipseg * (TRAIN_IMAGES + VAL_IMAGES), 5 * (TRAIN_IMAGES + VAL_IMAGES), 3),  # PNGs
    ]  # fmt: skip
    banks = {"classification": 8 * 4, "priors": 10}  # placements of all training images, for kNN
    for name, passes in STUDIES.items():
        images = len(KINDS) * (passes * VAL_IMAGES + banks.get(name, 0) * TRAIN_IMAGES / 3)
        listed.append(
            Step(name, find_study(name).question, partial(study, name=name), f"studies/{name}.json",
                 2 * dense * images, images / 4, 6)  # about four placements per read image
        )  # fmt: skip
    return [*listed, Step("tables", "which findings hold, and every table on one page", tables, "tables.md", 0, 0, 0)]


def training(epochs: float, forward: float, memory: float) -> tuple[float, float, float]:
    """FLOPs, images read and GB of training on ImageNet; a backward pass counts as two forward passes."""
    images = epochs * TRAIN_IMAGES
    return images * forward * 2 * 3, images, memory  # a multiply-add is two FLOPs


def memory(tokens: int, batch: int, width: int = 768, depth: int = 12) -> float:
    """GB per GPU for training its share of a batch in bfloat16: 16 bytes per parameter for weights, gradients and Adam,
    34 per token, channel and block for activations (Korthikanti et al., 2022, with fused attention)."""
    return (16 * 12 * width**2 * depth + 34 * (tokens + 1) * width * depth * batch / GPUS) / 1e9


# Implementation of the steps


def retrofit(setup: Setup, kind: Kind) -> None:
    file = setup.file(kind.model)
    model = spot.load(kind.model, weights=file, **setup.cut)
    train(model, override(find_recipe(kind.recipe), setup.changes), setup.options(kind.run))


def retrofit_mae(setup: Setup) -> None:
    file = setup.file(FULL)
    model = spot.load(MAE, weights=file, **setup.cut)
    recipe = override(find_recipe("mae-in1k"), {**setup.changes, **setup.decoder})
    train(model, recipe, setup.options("mae"), decoder=read_weights(file))


def finetune_mae(setup: Setup) -> None:
    recipe = override(find_recipe("mae-finetune"), setup.changes)
    options = setup.options("mae-finetuned")
    model = with_classifier(spot.load(setup.out / "mae" / "model"), 1000, "avg", recipe.seed)
    train(model, recipe, options)


def make_maps(setup: Setup) -> None:
    """Make the maps, divided among the processes."""
    state, folder = this_process(), setup.out / "maps"
    if state.is_main_process:
        record_method(folder, setup.method)
    state.wait_for_everyone()
    for split in ("val", "train"):
        images = open_data(setup.data, transform=ToTensor(), split=split)
        images.keep(range(state.process_index, len(images), state.num_processes))
        write_maps(images, folder, setup.method)
    state.wait_for_everyone()
    if state.is_main_process:
        write_text(folder / "done.txt", "all maps are made\n")


def study(setup: Setup, name: str) -> None:
    device = this_process().device
    models = [
        Backbone(kind_name, str(setup.out / kind.run / "model"), setup.file(kind.baseline), device)
        for kind_name, kind in KINDS.items()
    ]
    given: dict[str, Any] = {"data": setup.data, "bank": setup.data, "saliency": str(setup.out / "maps")}
    given |= {"runs": tuple(setup.out / kind.run for kind in KINDS.values()), "workers": setup.workers}
    lab = Lab(models, StudySettings(**{**given, **setup.studies}), cache=setup.out / "cache")
    run_studies([find_study(name)], lab, setup.out / "studies")


def tables(setup: Setup) -> None:
    """Join all pages into one, findings first."""
    if this_process().is_main_process:
        folder = setup.out / "studies"
        write_findings(folder)
        pages = [(folder / f"{name}.md").read_text() for name in ("findings", *STUDIES)]
        write_text(setup.out / "tables.md", "\n".join(page.replace("](", "](studies/") for page in pages))


# The rehearsal


def rehearsal(out: Path) -> Setup:
    """ViT-B reduced to 2 blocks and 96 pixels, random weights, 40 random images for training and 40 for measuring."""
    data, weights = out / "images", out / "weights"
    if this_process().is_main_process and not (weights / FULL).is_file():
        for number, split in enumerate(("train", "val")):
            draw = np.random.default_rng(number)
            for wnid in WNIDS:
                (data / split / wnid).mkdir(parents=True, exist_ok=True)
                for each in range(10):
                    small = Image.fromarray(draw.integers(0, 255, (8, 8, 3), dtype=np.uint8))
                    small.resize((256, 256), Image.Resampling.BICUBIC).save(data / split / wnid / f"{each}.jpg")
        random_weights(weights)
    this_process().wait_for_everyone()
    tiny = {"img_size": 96, "batch_size": 8, "epochs": 1.0, "warmup_epochs": 0.0, "lr": 1e-5}
    few = {"seeds": 1, "oracle_limit": 20, "batch_size": 20}
    return Setup(
        str(data), weights, out, workers=0, changes=tiny, decoder={"decoder_depth": 2}, method="spectral",
        cut={"depth": 2, "img_size": 96}, studies=few,
    )  # fmt: skip


def random_weights(folder: Path) -> None:
    """Write the four files with 2 blocks, with the names and shapes of the published ones."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    for kind in KINDS.values():
        if kind.recipe:
            save_file(timm.create_model(kind.model, depth=2).state_dict(), folder / f"{kind.baseline}.safetensors")
    tuned = timm.create_model(MAE, depth=2, num_classes=1000, global_pool="avg")
    torch.save({"model": tuned.state_dict()}, folder / FINETUNED)
    names = {ours: theirs for theirs, ours in DECODER_NAMES.items()}
    state = timm.create_model(MAE, depth=2).state_dict()
    for name, tensor in Decoder(768, (14, 14), 768, width=512, depth=2, heads=16).state_dict().items():
        begin = next(ours for ours in names if name.startswith(ours))
        table = name == "positions.table"
        state[names[begin] + name.removeprefix(begin)] = torch.cat([0 * tensor[:1], tensor])[None] if table else tensor
    torch.save({"model": state}, folder / FULL)  # last: it marks all files as complete


# The program


def scale_up(
    out: Path = Path("runs/paper"),
    data: str = "imagenet",
    weights: Path = Path("weights"),
    only: tuple[str, ...] = (),
    accumulate: int = 1,
    workers: int = 8,
    plan_only: tyro.conf.FlagCreatePairsOff[bool] = False,
    rehearse: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Reproduce the paper at its original scale: run every step that is not done yet, in order.

    Args:
        out: the output folder.
        data: ImageNet's root, with train/<wnid> and val/<wnid>.
        weights: a folder with the four published files.
        only: run only these steps.
        accumulate: backward passes per step, for GPUs with less memory than the plan needs.
        workers: processes that read images, per GPU.
        plan_only: only show the steps with hours and memory.
        rehearse: ViT-B reduced to 2 blocks, random weights and 40 random images; ignores --data and --weights.

    example: accelerate launch -m paper.scale_up --data imagenet --weights weights
    """
    listed, main = steps(), this_process().is_main_process
    strange = [name for name in only if name not in {step.name for step in listed}]
    if strange:
        raise unknown("step", strange[0], [step.name for step in listed])
    if main:
        caption = (
            f"Hours are estimates: arithmetic at {FLOPS / 1e12:g} TFLOP/s or reading {READ} images/s for each GPU, "
            "whichever is longer. `spot retrofit … --dry-run` times a few steps on your machine."
        )
        plan = [
            {
                "step": step.name,
                "does": step.description,
                f"hours on {GPUS} GPUs": f"{step.hours:.1f}",
                "GB a GPU": round(step.memory),
                "done": "yes" if (out / step.output).is_file() else "",
            }
            for step in listed
        ]
        report.show(plan, "The paper at its own scale", caption=caption)
    if plan_only:
        return
    setup = rehearsal(out) if rehearse else Setup(data, weights, out, accumulate, workers)
    for step in listed:
        if (not only or step.name in only) and not (out / step.output).is_file():
            if main:
                report.say(f"{step.name}: {step.description}")
            step.run(setup)
            this_process().wait_for_everyone()
    if main:
        report.say(f"Every table is in {out / 'tables.md'}.")


if __name__ == "__main__":
    program("paper.scale_up", scale_up)
