"""A new head on a pretrained encoder, for fine-tuning."""

from timm.models.vision_transformer import VisionTransformer

from spot.data.classes import class_folders
from spot.data.images import Images, open_data
from spot.data.scenes import CLASSES
from spot.draws import Draw, seeded
from spot.errors import InputError
from spot.models.spot_vit import SpotViT
from spot.models.timm_vit import create_timm
from spot.training.options import Options
from spot.training.recipes import Recipe


def with_classifier(model: SpotViT, classes: int, pool: str | None, seed: int = 0, *, anew: bool = False) -> SpotViT:
    """The model's encoder with a head for so many classes, pooling the class token ("token") or the mean ("avg").

    As He et al. do, mean pooling comes with a norm of its own after it, which starts fresh like
    the head. A model that already classifies so is returned as it is, unless its head is to begin anew.
    """
    old = model.vit
    if not isinstance(old, VisionTransformer):
        raise InputError(f"fine-tuning with a new head is for timm's VisionTransformer, not {type(old).__name__}")
    pool = old.global_pool if pool is None else pool
    if classes == old.num_classes and pool == old.global_pool and not anew:
        return model
    options = {**model.options, "img_size": model.img_size, "num_classes": classes, "global_pool": pool}
    overlay = {key: model.data_config[key] for key in ("mean", "std", "interpolation", "crop_pct")}
    with seeded(seed, Draw.HEAD):
        vit = create_timm(model.name, pretrained_cfg_overlay=overlay, **options)
    fresh = {name for name in vit.state_dict() if name.startswith(("head.", "fc_norm.", "norm."))}
    left = ("head.", "fc_norm.") if "norm.weight" in fresh else ("head.", "fc_norm.", "norm.")  # or after the mean
    state = {name: tensor for name, tensor in old.state_dict().items() if not name.startswith(left)}
    missing, surplus = vit.load_state_dict(state, strict=False)
    if surplus or set(missing) - fresh:
        raise InputError(f"timm builds {model.name} differently from the model given: {[*missing, *surplus][:3]}")
    return SpotViT(vit, tokens=model.tokens, prior=model.prior, sigma=model.sigma, options=options)


def for_data(model: SpotViT, recipe: Recipe, options: Options, classes: int | None = None) -> SpotViT:
    """The model with a head for the data's classes, which it then knows by name, or for a given number of them.

    A model that was trained for these classes keeps its head.
    """
    names = list(CLASSES) if options.scenes else None
    if names is None and classes is None:
        data = open_data(options.data, transform=model.transform(), split=options.split)
        if not isinstance(data, Images) or not data.classes:
            raise InputError(f"{options.data} has no classes to fine-tune for; one folder per class is needed")
        names = data.classes
    if names is None or (classes is not None and classes != len(names)):
        return with_classifier(model, classes or 0, getattr(recipe, "global_pool", None), recipe.seed)
    known = class_folders(model)
    other = isinstance(known, list) and known != names
    new = with_classifier(model, len(names), getattr(recipe, "global_pool", None), recipe.seed, anew=other)
    if known != names:
        new.class_names = names
    return new
