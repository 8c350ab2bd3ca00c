"""spot learn: train a policy, the learned prior of a model, on images without labels."""

from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from spot.commands import options
from spot.training.options import Learning

DEFAULT = Learning()


def learn(
    model: options.ModelArgument,
    /,
    data: options.Data,
    out: Path,
    how: Annotated[Learning, arg(name="")] = DEFAULT,
    weights: options.Weights = None,
    teacher: str | None = None,
    teacher_weights: options.Weights = None,
    split: str = "train",
    limit: int | None = None,
    leave_out: Path | None = None,
) -> None:
    """Train where a model's tokens should go, without labels, in minutes.

    A cheap look at the image learns an importance map from a dense ViT. The result is a prior: --prior FILE,
    or --prior learned where it stands beside its model as NAME.policy.safetensors. A kill costs little: the
    same command goes on.

    Args:
        out: the .safetensors file.
        teacher: the dense ViT; by default the model itself, on its own grid.
        teacher_weights: a file with the teacher's weights, instead of downloading them.
        split: val, train or test, where the data has several.
        limit: at most so many images, evenly spread over the classes.
        leave_out: a file that names images never to train on, one a line, as paths below the data's root.

    example: spot learn vit-ti --data images --out vit-ti.policy.safetensors
    """
    import spot
    from spot import report
    from spot.evaluation.cost import macs
    from spot.models.protocol import Placed
    from spot.training.learn import learn

    loaded = spot.load(model, weights=weights)
    dense = None if teacher is None else spot.load(teacher, weights=teacher_weights)
    policy = learn(loaded, data, out, how, teacher=dense, split=split, limit=limit, leave_out=leave_out)
    alone = macs(Placed(loaded, how.tokens, "isotropic"))
    share = macs(Placed(loaded, how.tokens, policy)) / alone - 1
    report.say(f"The policy is in {out}. Looking costs {share:.1%} of a forward pass with {how.tokens} tokens.")
