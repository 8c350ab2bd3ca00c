"""Models on disk. All file formats and the parameter names of other projects are handled here.

A SpotViT is saved as safetensors (timm's parameter names with the prefix `vit.`), with the configuration
as JSON in the header. A folder also holds the configuration as config.json, which the hub displays.
Pickles are always opened with weights_only=True.
"""

import inspect
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import file_exists, hf_hub_download, try_to_load_from_cache
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from spot.errors import InputError
from spot.models.spot_vit import SpotViT
from spot.models.timm_vit import TimmViT, create_timm, refuse_unfit
from spot.placement.policy import Policy, build_policy
from spot.placement.priors import resolve_prior
from spot.store import as_json, read_state, read_tensors, write_json, write_tensors
from spot.tokens.authors import AuthorsTokenizer
from spot.tokens.tokenizer import Tokenizer

HUB_OPTIONS = ("revision", "cache_dir", "force_download", "local_files_only", "token")  # options of a download
DATA_KEYS = ("mean", "std", "interpolation", "crop_pct", "input_size", "label_names", "label_descriptions")
CONFIG, WEIGHTS, KEY = "config.json", "model.safetensors", "spot_vit"
FORMAT = 1
MAX_BLOCKS, MAX_SIDE = 1000, 20_000  # a header can claim any size


def with_options(model: SpotViT, options: Mapping[str, Any]) -> SpotViT:
    """The model rebuilt with other timm options; timm adapts its weights as it does pretrained ones."""
    if not options:
        return model
    if type(model.tokenizer) is not Tokenizer:
        raise InputError(f"the authors' checkpoints are loaded as they are, got {', '.join(options)}")
    options = {**model.options, **options}
    overlay = {key: model.pretrained_cfg[key] for key in ("num_classes", *DATA_KEYS) if key in model.pretrained_cfg}
    other = SpotViT(
        vit_with_weights(model.name, options, state_dict=model.vit.state_dict(), source="", **overlay),
        tokens=model.tokens if model.tokens != len(model.grid()) else None,
        prior=model.prior,
        scale=model.scale,
        saliency=model.saliency,
        sigma=model.sigma,
        options=options,
    )
    other.policy, other.weights_hash = model.policy, model.weights_hash
    other.class_names = model.class_names if other.num_classes == model.num_classes else None
    return other


def load_timm(name: str, weights: str | Path | None, options: dict[str, Any]) -> SpotViT:
    """Adapt a pretrained timm ViT, with weights from timm or from a file."""
    state = {} if weights is None else read_weights(weights)  # refuses invalid files before timm opens them
    implied, published = as_published(state)
    options = {**implied, **options}
    hub = {"cache_dir": options.pop("cache_dir")} if "cache_dir" in options else {}  # not an option of the model
    _, _, hub_id = name.partition("hub:")  # the configuration of "hf-hub:…" is downloaded first
    with torch.device("meta"), downloading(name, hub_id, [CONFIG], **hub):
        vit = create_timm(name, **hub, **options)
        refuse_unfit(vit)  # before weights are downloaded
    if weights is not None:
        return SpotViT(vit_with_weights(name, options, file=str(weights), **published), options=options)
    repo, file = (vit.pretrained_cfg.get(key) or "" for key in ("hf_hub_id", "hf_hub_filename"))
    files = [name for name in (file, WEIGHTS, "pytorch_model.bin") if name]
    advice = "; if you have the weights in a file, give weights=FILE (--weights FILE)"
    with downloading(name, repo, files, advice, **hub):
        return SpotViT(create_timm(name, pretrained=True, **hub, **options), options=options)


def vit_with_weights(name: str, options: Mapping[str, Any], **overlay: Any) -> TimmViT:
    """A timm ViT with weights of a `file` or `state_dict`; timm resizes position tables and replaces heads as usual."""
    vit = create_timm(name, pretrained=True, pretrained_cfg_overlay={"custom_load": False, **overlay}, **options)
    vit.pretrained_cfg = {key: value for key, value in vit.pretrained_cfg.items() if key != "state_dict"}
    return vit


def has_decoder(state: Mapping[str, Tensor]) -> bool:
    """Whether a state dict is that of a published masked autoencoder with its decoder."""
    return "decoder_embed.weight" in state and "decoder_pred.weight" in state


def as_published(state: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options and pretrained_cfg_overlay that timm needs to load a checkpoint that He et al. published.

    For a pretrained file with a decoder, only the encoder's weights are loaded. A fine-tuned file normalises and
    classifies the mean of the tokens, whereas timm's `vit_base_patch16_224.mae` uses the class token and has no head.
    Any other file needs none.
    """
    if has_decoder(state):
        encoder = {name: tensor for name, tensor in state.items() if not name.startswith(("decoder_", "mask_token"))}
        return {}, {"state_dict": encoder, "source": ""}
    if "fc_norm.weight" in state and "norm.weight" not in state and "head.weight" in state:
        classes = len(state["head.weight"])
        return {"global_pool": "avg", "num_classes": classes}, {"num_classes": classes}
    return {}, {}


@contextmanager
def downloading(name: str, repo: str = "", files: Sequence[str] = (), advice: str = "", **hub: Any) -> Iterator[None]:
    """Turn the errors of a download in this block into one sentence.

    If no such file of the repository is cached, the hub is asked once before: its own client would retry for a minute.

    Args:
        repo: the repository's name, with timm's @revision if there is one.
        hub: options of the download, as in HUB_OPTIONS.
    """
    repo, _, named = repo.partition("@")
    revision = hub.get("revision") or named or None
    cache = {"cache_dir": hub.get("cache_dir"), "revision": revision}
    try:
        if repo and not any(isinstance(try_to_load_from_cache(repo, file, **cache), str) for file in files):
            file_exists(repo, files[0], revision=revision, token=hub.get("token"))
    except Exception as error:  # its type depends on the hub's HTTP client
        raise InputError(f"cannot download {name} ({error}){advice}") from error
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot download {name} ({error}){advice}") from error


# SPoT's own format


def save_folder(model: SpotViT, folder: str | Path) -> None:
    """Write a model as a folder with model.safetensors and config.json; each file is written atomically."""
    config = save_model(model, Path(folder) / WEIGHTS)
    write_json(Path(folder) / CONFIG, {KEY: config})


def save_model(model: SpotViT, path: str | Path, *, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Write a model as one safetensors file, optionally in another dtype, and return its configuration."""
    config = model_config(model)
    state = {
        name: tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
    }
    write_tensors(path, state, KEY, config, format="pt")
    return config


def model_config(model: SpotViT) -> dict[str, Any]:
    """The configuration to rebuild the model, as JSON values. Refuses a ViT that timm cannot rebuild."""
    if not isinstance(model.prior, str):
        raise InputError("a prior that is a function cannot be saved; set model.prior to a name first")
    if model.policy is not None and not isinstance(model.policy, Policy):
        raise InputError(
            f"only a Policy can be saved, got {type(model.policy).__name__}; set model.policy to None first"
        )
    if not isinstance(model.saliency, str) and resolve_prior(model.prior).needs_map:
        raise InputError("maps of a function or a tensor cannot be saved; set model.saliency to a name first")
    options = {key: value for key, value in model.options.items() if key != "pretrained_cfg_overlay"}
    options |= {"img_size": list(model.img_size), "num_classes": model.num_classes}
    if model.vit.global_pool != "map":
        options["global_pool"] = model.vit.global_pool
    data = {**model.pretrained_cfg, **model.data_config}
    config = {
        "format": FORMAT,
        "model": model.name,
        "options": options,
        "data": {key: data[key] for key in DATA_KEYS if data.get(key) is not None},
        "tokens": model.tokens,
        "prior": model.prior,
        "saliency": model.saliency if isinstance(model.saliency, str) else "spectral",
        "scale": model.scale,
        "sigma": model.sigma,
        "tokenizer": "authors" if isinstance(model.tokenizer, AuthorsTokenizer) else "standard",
    }
    if model.policy is not None:
        config["policy"] = model.policy.describe()
    if names := model.vit.pretrained_cfg.get("label_names"):  # custom names only; timm provides ImageNet's
        config["class_names"] = list(names)
    config = as_json(config)
    with torch.device("meta"):
        rebuilt = build(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if shapes != {name: tensor.shape for name, tensor in rebuilt.state_dict().items()}:
        raise InputError(
            f"timm cannot rebuild this ViT from its name {model.name!r}; build it with "
            "spot.adapt(name, **options) so that its options are known"
        )
    return config


def build(config: Mapping[str, Any]) -> SpotViT:
    """A model with a saved configuration and newly initialised weights."""
    check_config(config)
    options: dict[str, Any]
    options, overlay = (
        {key: tuple(value) if isinstance(value, list) else value for key, value in config[part].items()}
        for part in ("options", "data")
    )
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
    if config.get("policy"):
        model.policy = build_policy(config["policy"])
    return model


def read_saved(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and configuration of a safetensors file that SPoT wrote, or of a save_pretrained folder."""
    path = path / WEIGHTS if path.is_dir() else path
    advice = f"if it holds a timm model's weights, use spot.load('timm name', weights={str(path)!r})"
    return read_tensors(path, KEY, "a SPoT model", advice)


def load_saved(path: Path) -> SpotViT:
    """A model from one safetensors file that SPoT wrote, or from a folder that save_pretrained wrote."""
    state, config = read_saved(path)
    try:
        with torch.device("meta"):  # needs no memory, whatever sizes the header claims
            refuse_misfit(str(path), state, build(config).state_dict())
        model = build(config)
    except InputError as error:
        raise InputError(f"{path} cannot be loaded: {error}") from error
    except Exception as error:  # raised by timm for invalid options
        raise InputError(f"the configuration in {path} is damaged ({error!r:.200}); save the model again") from error
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return model.eval()


def load_pretrained(model_id: str, **options: Any) -> SpotViT:
    """SpotViT.from_pretrained: load a folder or a model on the hub, with the given placement options."""
    path = Path(model_id)
    if not path.is_dir():
        hub = {key: options[key] for key in HUB_OPTIONS if key in options}  # PyTorchModelHubMixin adds others
        with downloading(model_id, model_id, [WEIGHTS], **hub):
            path = Path(hf_hub_download(model_id, WEIGHTS, **hub))
    return load_saved(path).at(**{name: options.get(name) for name in ("tokens", "prior", "scale")})


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of a pickle that holds only weights."""
    if not Path(path).is_file():
        raise InputError(f"there is no file {path}")
    if Path(path).suffix == ".safetensors":
        return read_tensors(path)[0]
    state = read_state(path)
    for wrapper in ("model", "state_dict", "model_state_dict"):
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(f"{path} does not hold a model's weights by name")
    if any(tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes() for tensor in state.values()):
        raise InputError(f"{path} claims more weights than it holds; refused")
    return {str(name).removeprefix("module."): tensor for name, tensor in state.items()}


def refuse_misfit(source: str, state: Mapping[str, Tensor], model_state: Mapping[str, Tensor]) -> None:
    """Refuse weights that do not fit a model's architecture, naming the first tensor that differs."""
    for name in sorted(model_state.keys() | state.keys()):
        given, needed = (tuple(each[name].shape) if name in each else None for each in (state, model_state))
        if given != needed:
            difference = f"has shape {given}, the model needs {needed}"
            difference = "is missing" if given is None else "is not in the model" if needed is None else difference
            raise InputError(f"{source} is of another architecture: {name} {difference}")


# Checks of a configuration, which may come from a stranger


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse values that make timm open or download files, fail only later, or exhaust the memory."""
    if config.get("format") != FORMAT:
        raise InputError(f"this model was saved in format {config.get('format')!r}; this version reads {FORMAT}")
    options, data = config["options"], config["data"]
    allowed = {key for kind in (VisionTransformer, Eva) for key in inspect.signature(kind.__init__).parameters}
    check_base(config["model"], sorted({*options} - allowed) + sorted({*data} - {*DATA_KEYS}))
    check_numbers("depth", options.get("depth", 1), [1], high=MAX_BLOCKS)
    check_numbers("img_size", options.get("img_size", 1), [1, 2], high=MAX_SIDE)
    channels = [1, 3, options.get("in_chans", 3)]
    for name, counts in {"mean": channels, "std": channels, "crop_pct": [1], "input_size": [3]}.items():
        if name in data:
            check_numbers(name, data[name], counts, low=-math.inf if name == "mean" else 0)
    for names in (config.get("class_names") or [], data.get("label_names") or []):
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InputError(f"the configuration's class names must be a list of names, got {names!r:.80}")
    for name, part in {"interpolation": data, "saliency": config, "tokenizer": config}.items():
        if not isinstance(part.get(name, ""), str):
            raise InputError(f"the configuration's {name} must be a name, got {part[name]!r:.80}")


def check_base(name: str, others: Sequence[str] = ()) -> None:
    """Refuse a name by which timm would open or download files, and other entries that could do so."""
    if ":" in name or "/" in name or others:
        raise InputError(f"the configuration asks timm for {others or name}, which no saved model needs; refused")


def check_numbers(name: str, value: Any, counts: Collection[int], *, low: float = 0, high: float = math.inf) -> None:
    """Refuse a value of the configuration other than this many finite numbers, above `low` and up to `high`."""
    numbers = value if isinstance(value, list) else [value]
    good = all(type(number) in (int, float) and low < number <= high and math.isfinite(number) for number in numbers)
    if not good or len(numbers) not in counts:
        needed = " or ".join(map(str, dict.fromkeys(counts)))
        limits = f" from {low} to {high}" if high < math.inf else ""
        raise InputError(f"the configuration's {name} must be {needed} numbers{limits}, got {value!r:.80}")


# The authors' checkpoints; for their geometry see spot/tokens/authors.py

AUTHORS_NAMES = {
    "att.": "attn.",
    "ls1.lambda_": "ls1.gamma",
    "ls2.lambda_": "ls2.gamma",
    "mlp.L1": "mlp.fc1",
    "mlp.L2": "mlp.fc2",
    "embedder.cls_token": "cls_token",
}


def load_authors(path: str | Path) -> SpotViT:
    """A model from the authors' published .pth, with class token or mean pooling, of any depth and width."""
    state = read_weights(path)
    if "embedder.emb.weight" not in state:
        raise InputError(
            f"{path} is not one of the SPoT authors' checkpoints (it lacks embedder.emb.weight); "
            "for a timm model's weights use spot.load('timm name', weights=…)"
        )
    matrices = [state.get(name) for name in ("embedder.emb.weight", "blocks.0.mlp.L1.weight", "head.weight")]
    if "embedder.emb.bias" not in state or any(matrix is None or matrix.ndim != 2 for matrix in matrices):
        raise InputError(f"{path} is damaged: its embedding, blocks or head are missing, or are no matrices")
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
        "num_heads": max(1, width // 64),  # all ViTs of this family have head_dim 64
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
    model = SpotViT(vit, tokenizer=tokenizer, options=options)
    refuse_misfit(str(path), renamed, model.state_dict())
    model.load_state_dict(renamed)
    return model.eval()
