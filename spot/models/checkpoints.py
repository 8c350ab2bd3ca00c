"""Models on disk: the one place that knows file formats and other people's parameter names.

A SpotViT is kept as safetensors (timm's parameter names behind `vit.`) whose header holds the
configuration as JSON; a folder has the same configuration beside it in config.json, which is what
the hub shows. Pickles are only ever opened with weights_only=True.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from spot.data.scenes import CLASSES
from spot.errors import InputError, check_kind, unknown
from spot.models.deltas import apply_delta, is_delta, read_about, refuse_misfit
from spot.models.reach import ALIASES, refuse_unreachable
from spot.models.spot_vit import SpotViT, adapt
from spot.models.timm_vit import create_timm, refuse_unfit
from spot.models.untrusted import DATA, refuse_nonsense, refuse_steering
from spot.placement.policy import hash_of
from spot.placement.priors import AnyPrior, resolve_prior
from spot.placement.sizes import Scale
from spot.store import as_json, read_tensors, write_json, write_tensors
from spot.store import read_state as read_pickle
from spot.tokens.authors import AuthorsTokenizer
from spot.tokens.tokenizer import Tokenizer

HUB = ("revision", "cache_dir", "force_download", "local_files_only", "token")
PLACING = ("tokens", "prior", "scale")  # what is saved of how a model places tokens
POLICY, ANYTIME = ".policy.safetensors", ".anytime.json"
CONFIG, WEIGHTS, KEY = "config.json", "model.safetensors", "spot_vit"
FORMAT = 1


def load(
    name: str | Path,
    *,
    weights: str | Path | None = None,
    tokens: int | None = None,
    prior: AnyPrior | None = None,
    scale: Scale | None = None,
    **options: Any,
) -> SpotViT:
    """Load a model by what it is called or where it is.

    Args:
        name: a built-in model, a folder or file that SPoT saved, a hub id, a timm name (its pretrained
            ViT, adapted), a retrofit on one (`timm name+spot`), or the authors' published .pth file.
        weights: a file with the timm model's weights, instead of downloading them.
        tokens, prior, scale: where to place tokens and how large, instead of as the model was saved.
        options: what timm.create_model takes, such as num_classes or img_size; for a hub id also its revision, token, …
    """
    check_kind("a model's name", name, str, Path)
    check_kind("weights", weights, str, Path, type(None))
    model = _load(str(name), weights, options)
    path = built_in().get(ALIASES.get(str(name), str(name)), Path(name))
    if path.exists():
        policy, cascade = beside(path)
        model.policy, model.cascade = (each if each.is_file() else None for each in (policy, cascade))
    return with_placing(model, tokens=tokens, prior=prior, scale=scale).eval()


def with_placing(model: SpotViT, **placing: Any) -> SpotViT:
    """The model, which from now on places tokens as told where that is not None."""
    for name, value in placing.items():
        if value is not None:
            setattr(model, name, value)
    return model


def _load(name: str, weights: str | Path | None, options: dict[str, Any]) -> SpotViT:
    path = built_in().get(ALIASES.get(name, name), Path(name))
    architecture = name.removeprefix("timm/").split(".")[0]
    if path.exists():
        if is_delta(path):
            return refitted(load_delta(path, weights), options)
        if weights is not None:
            raise InputError(f"{path} already holds weights; weights={weights} goes with a timm name")
        ours = path.is_dir() or path.suffix == ".safetensors"
        model = load_file(path) if ours else load_authors(path)
        if name in built_in():  # trained on scenes
            model.class_names = CLASSES
        return refitted(model, options)
    if path.suffix in (".safetensors", ".pth", ".pt", ".bin"):
        raise InputError(f"there is no file {path}")
    if (timm.is_model(architecture) and not name.endswith("+spot")) or ":" in name:
        return load_timm(name.removeprefix("timm/"), weights, options)
    if name.count("/") == 1:
        hub = {key: options.pop(key) for key in HUB if key in options}
        return refitted(load_pretrained(name, **hub), options)
    timms = [*timm.list_models(module="vision_transformer"), *timm.list_models(module="eva")]
    begun = [known for known in built_in() if known.startswith(name.partition("+")[0])]  # deit_tiny+spot
    raise unknown("model", name, begun or [*built_in(), *ALIASES, *timms], hint="spot.list_models() lists ours")


def refitted(model: SpotViT, options: Mapping[str, Any]) -> SpotViT:
    """The model under other options of timm's, its weights fitted as timm fits pretrained ones."""
    if not options:
        return model
    if type(model.tokenizer) is not Tokenizer:
        raise InputError(f"the authors' checkpoints are loaded as they are, got {', '.join(options)}")
    given = {**model.options, **options}
    with torch.device("meta"):
        refuse_unfit(create_timm(model.name, **given))
    overlay = {"state_dict": model.vit.state_dict(), "custom_load": False, "source": ""}
    overlay |= {key: model.pretrained_cfg[key] for key in ("num_classes", *DATA) if key in model.pretrained_cfg}
    vit = create_timm(model.name, pretrained=True, pretrained_cfg_overlay=overlay, **given)
    vit.pretrained_cfg = {key: value for key, value in vit.pretrained_cfg.items() if key != "state_dict"}
    tokens = model.tokens if model.tokens != len(model.grid()) else None
    placing: Any = {"tokens": tokens, "prior": model.prior, "scale": model.scale, "saliency": model.saliency}
    fitted = SpotViT(vit, **placing, sigma=model.sigma, options=given)
    if model.base is not None:
        fitted.base, fitted.fewest = lambda: refitted(model.base_vit(), options), model.fewest
    fitted.class_names = model.class_names if fitted.num_classes == model.num_classes else None
    return fitted


def beside(path: Path) -> tuple[Path, Path]:
    """Where the learned prior and the calibration of a model are kept: beside its file, or in its folder."""
    file = path / WEIGHTS if path.is_dir() else path
    return file.with_suffix(POLICY), file.with_suffix(ANYTIME)


def built_in() -> dict[str, Path]:
    """The models that come with the package: name → file."""
    folder = Path(str(files("spot") / "assets"))
    found = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    return {path.stem: path for path in found if not path.name.endswith(POLICY)}


def load_timm(name: str, weights: str | Path | None, options: dict[str, Any]) -> SpotViT:
    """A pretrained timm ViT, adapted; its weights from timm, or from a file."""
    with torch.device("meta"):
        vit = create_timm(name, **options)
        refuse_unfit(vit)  # before anything is downloaded
    if weights is None:
        weights = downloaded(name, vit.pretrained_cfg)
    if weights is None:
        try:
            return adapt(name, pretrained=True, **options)
        except (OSError, HfHubHTTPError) as error:
            raise InputError(f"cannot download {name}: {error}; pass weights=FILE if you have them") from error
    read_state(weights)  # refuses what is not weights, before timm opens it
    # timm loads the file itself, so that it resizes a position table or drops a head as it always does.
    overlay = {"file": str(weights), "custom_load": False}
    vit = create_timm(name, pretrained=True, pretrained_cfg_overlay=overlay, **options)
    return SpotViT(vit, options=options)


def downloaded(name: str, config: Mapping[str, Any]) -> str | None:
    """The file of a timm model's weights if it was downloaded before, else None if it can be now.

    Without a network timm would try again and again for a minute; this is refused after two seconds.
    """
    hub, url = config.get("hf_hub_id"), config.get("url")
    if not hub and not url:
        return None  # timm says that there are none
    for file in (config.get("hf_hub_filename"), "model.safetensors", "pytorch_model.bin"):
        cached = try_to_load_from_cache(hub, file) if hub and file else None
        if isinstance(cached, str) and config.get("source") != "hf-hub":
            return cached
    where = constants.ENDPOINT if hub else str(url)
    refuse_unreachable(
        f"download {name}", where, "; pass weights=FILE if you have them", offline=constants.HF_HUB_OFFLINE
    )
    return None


def load_delta(path: Path, weights: str | Path | None) -> SpotViT:
    """A retrofit kept as what it added to a timm ViT, whose weights come from timm or from a file."""
    about = read_about(path)
    refuse_steering(about["base"], {}, {})
    model = load_timm(about["base"], weights, {})
    model.vit.load_state_dict(apply_delta(model.vit.state_dict(), path))
    model.base, model.fewest = partial(load_timm, about["base"], weights, {}), about["config"].get("fewest")
    return with_placing(model, **{name: about["config"].get(name) for name in PLACING})


# SPoT's own format


def save_folder(model: SpotViT, folder: str | Path) -> None:
    """Write a model as a folder with model.safetensors and config.json; each file whole or not at all."""
    config = save_file_whole(model, Path(folder) / WEIGHTS)
    write_json(Path(folder) / CONFIG, {KEY: config})


def save_file_whole(model: SpotViT, path: str | Path, *, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Write a model as one safetensors file, in another dtype if asked; its configuration is returned."""
    config = describe(model)
    state = {
        name: tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
    }
    write_tensors(path, state, KEY, config, format="pt")
    if dtype is None:
        save_beside(model, Path(path))
    return config


def save_beside(model: SpotViT, path: Path) -> None:
    """Write a model's learned prior and calibration beside its file, unless the model was trained since they were."""
    policy, cascade = beside(path)
    with suppress(InputError):
        if model.policy is not None and model.policy.about["hash"] == hash_of(model):
            model.policy.save(policy)
    with suppress(InputError):
        if model.cascade is not None and model.cascade.hash == hash_of(model) and not model.cascade.base:
            model.cascade.save(cascade)


def describe(model: SpotViT) -> dict[str, Any]:
    """What is needed to build the model again: JSON values only. Refuses a ViT that timm cannot rebuild."""
    if model.fewest is not None:
        raise InputError(f"the weights of {model.name} follow the budget; save those for one, as model.suited(49)")
    if not isinstance(model.prior, str):
        advice = 'a name first; for a policy set model.policy to it, and the name is "learned"'
        raise InputError(f"a prior that is a function cannot be saved; set model.prior to {advice}")
    if not isinstance(model.saliency, str) and resolve_prior(model.prior).needs_map:
        raise InputError("maps of a function or a tensor cannot be saved; set model.saliency to a name first")
    options = {key: value for key, value in model.options.items() if key != "pretrained_cfg_overlay"}
    options |= {"img_size": list(model.img_size), "num_classes": model.num_classes}
    if model.vit.global_pool != "map":
        options["global_pool"] = model.vit.global_pool
    known = {**model.pretrained_cfg, **model.data_config}
    config = {
        "format": FORMAT,
        "model": model.name,
        "options": options,
        "data": {key: known[key] for key in DATA if known.get(key) is not None},
        "tokens": model.tokens,
        "prior": model.prior,
        "saliency": model.saliency if isinstance(model.saliency, str) else "spectral",
        "scale": model.scale,
        "sigma": model.sigma,
        "tokenizer": "authors" if isinstance(model.tokenizer, AuthorsTokenizer) else "standard",
    }
    if names := model.vit.pretrained_cfg.get("label_names"):  # its own; ImageNet's are timm's
        config["class_names"] = list(names)
    config = as_json(config)
    with torch.device("meta"):
        again = build(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if shapes != {name: tensor.shape for name, tensor in again.state_dict().items()}:
        raise InputError(
            f"timm cannot rebuild this ViT from its name {model.name!r}; build it with "
            "spot.adapt(name, **options) so that its options are known"
        )
    return config


def build(config: Mapping[str, Any]) -> SpotViT:
    """A model with a saved configuration and fresh weights."""
    if config.get("format") != FORMAT:
        raise InputError(f"this model was saved in format {config.get('format')!r}; this version reads {FORMAT}")
    options: dict[str, Any]
    options, overlay = (
        {key: tuple(value) if isinstance(value, list) else value for key, value in config[part].items()}
        for part in ("options", "data")
    )
    refuse_steering(config["model"], options, overlay)
    refuse_nonsense(options, overlay, config)
    vit = create_timm(config["model"], pretrained_cfg_overlay=overlay, **options)
    authors = config["tokenizer"] == "authors"
    model = SpotViT(
        vit,
        tokens=config["tokens"],
        prior=config["prior"],
        saliency=config.get("saliency", "spectral"),
        scale=config.get("scale"),
        sigma=config["sigma"],
        options=options,
        tokenizer=AuthorsTokenizer(vit.patch_embed.patch_size[0], vit.embed_dim) if authors else None,
    )
    if config.get("class_names"):
        model.class_names = [str(name) for name in config["class_names"]]
    return model


def load_file(path: Path) -> SpotViT:
    """A model from one safetensors file that SPoT wrote, or from a folder that save_pretrained wrote."""
    if path.is_dir():
        for name in (CONFIG, WEIGHTS):
            if not (path / name).is_file():
                raise InputError(f"{path} holds no {name}, so it is not a saved SPoT model")
        path = path / WEIGHTS
    advice = f"if it holds a timm model's weights, use spot.load('timm name', weights={str(path)!r})"
    state, config = read_tensors(path, KEY, "a SPoT model", advice)
    try:
        with torch.device("meta"):  # costs no memory, whatever sizes the header claims
            refuse_misfit(str(path), state, build(config).state_dict())
        model = build(config)
    except InputError as error:
        raise InputError(f"{path} cannot be loaded: {error}") from error
    except Exception as error:  # timm's, for options that make no sense to it
        raise InputError(f"the configuration in {path} is damaged ({error!r:.200}); save the model again") from error
    return filled(model, {name: tensor.float() for name, tensor in state.items()}, path)


def load_pretrained(model_id: str, **options: Any) -> SpotViT:
    """What SpotViT.from_pretrained does: a folder, or a model on the hub, that places tokens as options say."""
    path = Path(model_id)
    if not path.is_dir():
        if not isinstance(try_to_load_from_cache(model_id, WEIGHTS), str):
            refuse_unreachable(f"get {model_id} from the hub", constants.ENDPOINT, offline=constants.HF_HUB_OFFLINE)
        hub = {key: options[key] for key in HUB if key in options}  # PyTorchModelHubMixin has some of its own
        try:
            path = Path(hf_hub_download(model_id, WEIGHTS, **hub))
        except (OSError, HfHubHTTPError, LocalEntryNotFoundError) as error:
            raise InputError(f"cannot get {model_id} from the hub: {error}") from error
    return with_placing(load_file(path), **{name: options.get(name) for name in PLACING})


def read_state(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file or of a pickle that holds nothing but weights."""
    if not Path(path).is_file():
        raise InputError(f"there is no file {path}")
    if Path(path).suffix == ".safetensors":
        return read_tensors(path)[0]
    state = read_pickle(path)
    for wrapper in ("model", "state_dict", "model_state_dict"):
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(f"{path} does not hold a model's weights by name")
    if any(tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes() for tensor in state.values()):
        raise InputError(f"{path} claims more weights than it holds; refused")
    return {str(name).removeprefix("module."): tensor for name, tensor in state.items()}


def filled(model: SpotViT, state: Mapping[str, Tensor], path: Path) -> SpotViT:
    """The model with these weights, which must fit exactly."""
    refuse_misfit(str(path), state, model.state_dict())
    model.load_state_dict(state)
    return model.eval()


# The authors' checkpoints: facts are in the design notes, the geometry in spot/tokens/authors.py

AUTHORS_NAMES = {
    "att.": "attn.",
    "ls1.lambda_": "ls1.gamma",
    "ls2.lambda_": "ls2.gamma",
    "mlp.L1": "mlp.fc1",
    "mlp.L2": "mlp.fc2",
    "embedder.cls_token": "cls_token",
}


def load_authors(path: str | Path) -> SpotViT:
    """A model from the authors' published .pth, class-token or mean-pooled, of any depth and width."""
    state = read_state(path)
    if "embedder.emb.weight" not in state:
        raise InputError(
            f"{path} is not one of the SPoT authors' checkpoints (it lacks embedder.emb.weight); "
            "for a timm model's weights use spot.load('timm name', weights=…)"
        )
    if "blocks.0.mlp.L1.weight" not in state or "head.weight" not in state or "embedder.emb.bias" not in state:
        raise InputError(f"{path} lacks an embedding, blocks or a head; it may be cut short")
    if {state[name].ndim for name in ("embedder.emb.weight", "blocks.0.mlp.L1.weight", "head.weight")} != {2}:
        raise InputError(f"{path} is damaged: its embedding, blocks or head are no matrices")
    weight = state.pop("embedder.emb.weight")
    width, inputs = weight.shape
    side = math.isqrt(inputs // 4)
    if 4 * side * side != inputs:
        raise InputError(f"embedder.emb.weight of {path} takes {inputs} values, not 4 channels of a square window")
    depth = next(index for index in range(len(state) + 1) if f"blocks.{index}.mlp.L1.weight" not in state)
    options: dict[str, Any] = {
        "patch_size": side,
        "embed_dim": width,
        "depth": depth,
        "num_heads": max(1, width // 64),  # all ViTs of this family have heads of 64
        "mlp_ratio": state["blocks.0.mlp.L1.weight"].shape[0] / width,
        "num_classes": state["head.weight"].shape[0],
        "init_values": 1e-5,
        "pos_embed": "none",
        "global_pool": "avg" if "fc_norm.weight" in state else "token",
    }
    data = {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD, "crop_pct": 0.875, "interpolation": "bicubic"}
    vit = create_timm("vit_base_patch16_224", **options, pretrained_cfg_overlay=data)
    tokenizer = AuthorsTokenizer(side, width)
    renamed = {
        "vit.patch_embed.proj.weight": weight[:, : 3 * side**2].unflatten(1, (3, side, side)),
        "vit.patch_embed.proj.bias": state.pop("embedder.emb.bias"),
        "tokenizer.position.weight": weight[:, 3 * side**2 :],
        "tokenizer.n_sigma": state.pop("tokenizer._n_sigma", tokenizer.n_sigma.detach()).flatten()[0],
    }
    for name, tensor in state.items():
        for theirs, ours in AUTHORS_NAMES.items():
            name = name.replace(theirs, ours)
        renamed[f"vit.{name}"] = tensor
    return filled(SpotViT(vit, tokenizer=tokenizer, options=options), renamed, Path(path))
