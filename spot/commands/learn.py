"""spot learn: train a policy, a model's learned prior, on images without labels or for large pictures."""

from pathlib import Path
from typing import Annotated, Literal

from spot import options, report

TOKENS = 25  # number of tokens for the reported cost


def learn(
    model: options.ModelArgument,
    /,
    data: options.Data,
    out: Path,
    settings: Annotated[options.LearnOptions, options.Flat] = options.LearnOptions(),
    weights: options.Weights = None,
    teacher: options.Maybe[str] = None,
    teacher_weights: options.Maybe[Path] = None,
    split: options.Split = "train",
    limit: options.Limit = None,
    leave_out: options.LeaveOut = None,
    look: Literal["map", "glimpses"] = "map",
    boxes: options.Maybe[Path] = None,
    glimpses: options.GlimpseOptions = options.GlimpseOptions(),
) -> None:
    """Train a policy, the learned prior of a model, without labels, in minutes.

    A small network learns to predict importance maps from a dense ViT. Use the result with --prior FILE, or in Python
    with model.policy = spot.load_policy(FILE, model), which makes it a part of the model. An interrupted run resumes.

    With --look glimpses it is for large pictures with small objects. A small network detects places, and the model is
    fine-tuned to classify glimpses of them. The pictures need labels; boxes are optional.

    example: spot learn vit-ti --data images --out vit-ti.policy.safetensors

    Args:
        out: the .safetensors file; with --look glimpses a folder, whose model/ contains the policy
        teacher: the dense ViT. Default: the model itself on its own grid
        teacher_weights: as --weights, for the teacher
        look: map trains a policy that predicts an importance map; glimpses a finder for small objects in large pictures
        boxes: for glimpses: a CSV file with the columns file, left, top, right, bottom. Default: learn from labels
    """
    from spot.evaluation.cost import macs
    from spot.models.family import at_budget, dense_model
    from spot.models.loading import load_source
    from spot.training.learn import learn

    source = load_source(model, weights=weights)
    if look == "glimpses":
        from spot.training.glimpses import learn_to_find

        learn_to_find(source, data, out, glimpses, boxes=boxes, split=split, leave_out=leave_out)
        report.say(f"The model and its finder are in {out / 'model'}; try spot predict --model {out / 'model'}.")
        return
    dense = None if teacher is None else dense_model(load_source(teacher, weights=teacher_weights))
    policy = learn(source, data, out, settings, teacher=dense, split=split, limit=limit, leave_out=leave_out)
    alone, placed = (macs(at_budget(source, TOKENS, prior=prior)) for prior in ("isotropic", policy))
    cost = placed / alone - 1
    report.say(f"The policy is in {out}. It costs {cost:.1%} of a forward pass with {TOKENS} tokens.")
