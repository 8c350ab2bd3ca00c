"""The lab that studies use: models, images, budgets, and cached measurements per image.

    lab = Lab(backbones(["scenes-a", "scenes-b"]), StudySettings(), cache="studies/cache")
    made = lab.accuracy(lab.backbones[0], {"even": Setting("isotropic", 9), "random": Setting("patch-dropout", 9)})
    made["even"].right                                # (M,) bool, per image, in the order of made["even"].keys
    placements = lab.oracle(lab.backbones[0], tokens=9)    # with their trajectories
    lab.at(lab.backbones[1], placements).right        # another model at the same positions

Every measurement is cached under a key of everything that determines it, so that studies share it and a
study that was killed resumes. Only predictions stay in memory: trajectories are read from their file,
and features are compared with a kNN bank and freed, group by group. Under `accelerate launch` or torchrun
the images are divided among the processes; all get every prediction, and the first one writes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from paper.backbone import Backbone, budgets
from paper.cache import Cache, hash_places
from paper.settings import StudySettings
from paper.sources import Sources
from paper.statistics import Predictions
from spot.data.images import Data
from spot.data.loader import Loader, loader
from spot.evaluation.accuracy import Setting, evaluate, model_of, with_models
from spot.evaluation.cost import macs
from spot.evaluation.knn import Bank, classify, compute_banks
from spot.models.baselines import BASELINES
from spot.models.family import Source
from spot.models.spot_vit import SpotViT
from spot.models.wrappers import TokenModel
from spot.placement.dataset_search import search_dataset
from spot.placement.files import Placements
from spot.placement.oracle import PRESETS, SearchSettings
from spot.placement.priors import LEARNED, resolve_prior
from spot.placement.saliency import map_path
from spot.processes import this_process
from spot.store import as_json, decode_names, encode_names

PAPER_IMAGES = 50_000  # ImageNet's validation images, on which the paper's numbers were measured
AT_ONCE = 12  # the largest number of placements measured in one pass over the images
MEMORY = 2e9  # bytes of features at a time
Tensors = dict[str, Tensor]
Pair = tuple[Setting, Setting | None]  # what is measured, and the placement of the bank's images for its kNN votes
T = TypeVar("T")


class Lab:
    """Models, the data they are measured on, and the cache of measurements."""

    def __init__(
        self, backbones: Sequence[Backbone], settings: StudySettings | None = None, *, cache: str | Path
    ) -> None:
        self.backbones, self.settings = list(backbones), settings or StudySettings()
        self.sources, self.cache, self.state = Sources(self.settings), Cache(cache), this_process()
        self._macs: dict[Any, int] = {}

    # Models, budgets and settings

    @property
    def tokens(self) -> tuple[int, ...]:
        """The budgets, in ascending order."""
        return self.settings.tokens or budgets(len(self.backbones[0].model.grid()))

    @property
    def sparse(self) -> int:
        """The smallest budget, about 12.5 % of the grid."""
        return self.tokens[0]

    @property
    def main(self) -> bool:
        """Whether this process writes results; the others only share the computation."""
        return bool(self.state.is_main_process)

    def describe(self) -> dict[str, Any]:
        """Everything that determined the measurements, as JSON."""
        first, given = self.backbones[0].model, self.settings
        return {
            "models": {each.name: each.describe() for each in self.backbones},
            "data": Path(given.data).name,
            "split": given.split,
            "images": len(self.sources.images(first)),
            "oracle_images": len(self.sources.images(first, oracle=True)),
            "image_files": self.sources.images_hash(first),
            "tokens": list(self.tokens),
            "seeds": given.seeds,
            "saliency": self.sources.maps_name(),
            "bank": None if given.bank is None else Path(given.bank).name,
            "bank_limit": given.bank_limit,
            "bank_keep": None if given.bank_keep is None else given.bank_keep.name,
            "oracle": {name: search.as_json() for name, search in PRESETS.items()},
            "processes": self.state.num_processes,
        }

    def conditions(self, *, searched: bool = True) -> str:
        """A sentence on how the conditions of the paper's numbers and ours differ."""
        kind = "scenes" if self.settings.scenes else "images"
        first = self.backbones[0].model
        counts = [len(self.sources.images(first, oracle=oracle)) for oracle in (False, True)]
        some = f", and {counts[1]:,} of them where positions are searched" if searched and counts[1] < counts[0] else ""
        names = ", ".join(backbone.name for backbone in self.backbones)
        return (
            f"Ours: {names} on {counts[0]:,} {kind}{some}, with 95 % intervals. The paper's: ViT-B/16 on ImageNet's "
            f"{PAPER_IMAGES:,} validation images."
        )

    def wanted(self, placements: Sequence[str], needed: Sequence[str] = ()) -> tuple[str, ...]:
        """The placements in --only and those that they are compared with; without --only all placements."""
        only = self.settings.only
        return tuple(name for name in placements if not only or name in (*only, *needed))

    def seeded(self, placement: str, tokens: int, seeds: int | None = None) -> list[Setting]:
        """A placement with each seed, or once if it does not depend on the seed."""
        random = BASELINES[placement].random if placement in BASELINES else resolve_prior(placement).random
        count = (self.settings.seeds if seeds is None else seeds) if random else 1
        return [Setting(placement, tokens, seed) for seed in range(count)]

    def candidate(self, backbone: Backbone, setting: Setting) -> Setting:
        """The setting with its model. Without one it gets the backbone or, for a baseline, the plain ViT if known."""
        source: Source = backbone.loaded
        if setting.model is None:
            baseline = setting.placement in BASELINES
            source = backbone.parent or source if baseline else backbone.at(setting.tokens)
        return with_models(source, [setting])[0]

    def same_weights(self, backbone: Backbone, setting: Setting) -> Setting:
        """A baseline's setting with a model that has the backbone's weights, not the plain ViT's."""
        candidate = with_models(backbone.loaded, [setting])[0]
        model_of(candidate).to(backbone.device)
        return candidate

    def model(self, backbone: Backbone, setting: Setting) -> TokenModel:
        """The model of a setting, called `model(images)`, for timing."""
        return model_of(self.candidate(backbone, setting))

    def cost(self, backbone: Backbone, setting: Setting) -> dict[str, Any]:
        """The cost of one image's prediction: GMACs including its saliency map, and `maps`, the GMACs of the map alone.

        maps is None if the map's cost is unknown, and absent if no map is used.
        """
        candidate = self.candidate(backbone, setting)
        reads, kind = candidate.needs_map, type(candidate.model).__name__
        maps = self.sources.maps_cost() if reads else None
        own = setting.placement if kind == "ToMe" or setting.placement == LEARNED else ""
        key = (backbone.hash, kind, own, candidate.tokens, str(setting.scale))
        if key not in self._macs:  # for priors that ignore the image the cost depends only on the budget
            self._macs[key] = macs(model_of(candidate))
        cost = {"GMACs": (self._macs[key] + (maps or 0)) / 1e9}
        return cost | {"maps": None if maps is None else maps / 1e9} if reads else cost

    # Cached measurements

    def accuracy(self, backbone: Backbone, settings: Mapping[T, Setting], *, knn: bool = False) -> dict[T, Predictions]:
        """Predictions of a backbone for all images with each setting, in one pass over the images.

        A setting's placement is the name of a prior or of a baseline in BASELINES, see `candidate`. With `knn`, there
        are kNN predictions too if there is a bank (and, for priors that use maps, maps of its images).
        """
        candidates = [self.candidate(backbone, setting) for setting in settings.values()]
        made = self._predictions(backbone, [(each, each if knn else None) for each in candidates])
        return dict(zip(settings, made, strict=True))

    def accuracies(
        self, backbone: Backbone, settings: Mapping[T, Sequence[Setting]], *, knn: bool = False
    ) -> dict[T, list[Predictions]]:
        """The same for lists of settings, such as a placement's seeds."""
        each = {(name, number): setting for name, own in settings.items() for number, setting in enumerate(own)}
        made = self.accuracy(backbone, each, knn=knn)
        return {name: [made[name, number] for number in range(len(own))] for name, own in settings.items()}

    def at(self, backbone: Backbone, placements: Placements, *, bank: Setting | None = None) -> Predictions:
        """Predictions of a backbone at given positions.

        bank: adds kNN predictions, with this placement of the bank's images.
        """
        keys = sorted(placements.keys)
        positions = Placements(keys, placements.positions_for(keys))
        given = Setting(positions, name="given", model=backbone.at(positions.tokens))
        voter = None if bank is None else self.candidate(backbone, bank)
        return self._predictions(backbone, [(given, voter)], oracle=True)[0]

    def oracle(
        self,
        backbone: Backbone,
        prior: str = "isotropic",
        tokens: int | None = None,
        *,
        preset: SearchSettings = PRESETS["paper"],
        objective: str = "descent",
    ) -> Placements:
        """Positions found by the oracle search for every oracle image, starting from a prior, with trajectories.

        `values` has labels (M,), predictions and losses (M, steps + 1); see `predicted`.
        """
        tokens = self.sparse if tokens is None else tokens
        model = backbone.at(tokens).at(tokens=tokens, prior=prior)
        about = self.about(backbone, self.candidate(backbone, Setting(prior, tokens)), oracle=True)
        search = preset.changed(objective=objective)
        about |= {"kind": "oracle", "search": search.as_json(), "objective": objective}
        return search_dataset(
            model,
            self.sources.images(model, oracle=True),
            self.cache.search_path(about),
            saliency=self.sources.saliency(model) if resolve_prior(prior).needs_map else None,
            settings=search,
            batch_size=self.settings.batch_size,
            workers=self.settings.workers,
        ).placements

    def remember(self, about: Mapping[str, Any], compute: Callable[[], Tensors]) -> Tensors:
        """Any other measurement: read from the cache, or computed (by every process) and stored."""
        return self._remember_all([(about, None)], lambda _: [compute()])[0]

    def _remember_all(
        self,
        wanted: Sequence[tuple[Mapping[str, Any], T]],
        compute: Callable[[list[T]], list[Tensors]],
        at_once: int = 1,
    ) -> list[Tensors]:
        """Measurements from the cache: their descriptions, and what `compute` makes them of, `at_once` at a time."""
        abouts = [as_json(about) for about, _ in wanted]
        found = {index: entry for index, about in enumerate(abouts) if (entry := self.cache.get(about)) is not None}
        self.state.wait_for_everyone()  # before the first process writes entries that others look for
        missing = [index for index in range(len(wanted)) if index not in found]
        for group in (missing[first : first + at_once] for first in range(0, len(missing), at_once)):
            for index, entry in zip(group, compute([wanted[index][1] for index in group]), strict=True):
                found[index] = entry
                if self.main:
                    self.cache.put(abouts[index], entry)
            self.state.wait_for_everyone()
        return [found[index] for index in range(len(wanted))]

    def about(
        self, backbone: Backbone, candidate: Setting, bank: Setting | None = None, *, oracle: bool = False
    ) -> dict[str, Any]:
        """Everything that determines a measurement, with the backbone's name for the file name."""
        images = self.sources.images_hash(backbone.model, oracle=oracle)
        name = backbone.name.replace("/", "-")
        about = {"kind": "predictions", "name": name, **self._determinants(backbone, candidate, images)}
        if bank is None:
            return about
        images = self.sources.images_hash(backbone.model, bank=True)
        return {**about, "kind": "knn", "bank": self._determinants(backbone, bank, images)}

    def _predictions(self, backbone: Backbone, pairs: Sequence[Pair], *, oracle: bool = False) -> list[Predictions]:
        """Predictions of candidates and, for those with a bank's placement, kNN predictions."""
        pairs = [(each, bank if bank is not None and self._can_vote(backbone, bank) else None) for each, bank in pairs]
        model, voting = backbone.model, any(bank is not None for _, bank in pairs)
        # In groups, so that features fit into memory and an interruption loses little work.
        count = max(len(self.sources.images(model)), len(self.sources.bank(model)) if voting else 0)
        at_once = max(1, min(AT_ONCE, int(MEMORY / (4 * count * model.embed_dim))))
        wanted = [(self.about(backbone, *pair, oracle=oracle), pair) for pair in pairs]
        found = self._remember_all(wanted, partial(self._measured, backbone, oracle), at_once)
        return [Predictions(decode_names(each["keys"]), each["ranks"] == 0, each.get("knn")) for each in found]

    def _measured(self, backbone: Backbone, oracle: bool, pairs: Sequence[Pair]) -> list[Tensors]:
        """Outcomes of candidates, in one pass over the images and, for kNN, one over the bank's images."""
        model, candidates = backbone.model, [candidate for candidate, _ in pairs]
        voters = {index: bank for index, (_, bank) in enumerate(pairs) if bank is not None}
        banks = dict(zip(voters, self._banks(model, list(voters.values())), strict=True)) if voters else {}
        made = evaluate(
            model,
            self._batches(self.sources.images(model, oracle=oracle)),
            candidates,
            saliency=self.sources.saliency(model) if any(each.needs_map for each in candidates) else None,
            features=bool(banks),
            shown=self.main,
            title=f"{backbone.name}, {len(pairs)} placement{'s' if len(pairs) > 1 else ''}",
        )
        keys, ranks, losses = encode_names(made.keys), made.ranks.to(torch.int32), made.losses.float()
        entries = [{"keys": keys, "ranks": ranks[index], "losses": losses[index]} for index in range(len(pairs))]
        for index, bank in banks.items():
            answers = classify(made.features[index].to(self.state.device), bank)
            entries[index]["knn"] = answers[:, 0].cpu() == made.labels
        return entries

    def _banks(self, model: SpotViT, voters: Sequence[Setting]) -> list[Bank]:
        """kNN banks with these placements, in one pass over the bank's images."""
        maps = any(each.needs_map for each in voters)
        saliency = self.sources.saliency(model, str(self.settings.bank)) if maps else None
        batches = self._batches(self.sources.bank(model))
        return list(compute_banks(model, batches, voters, memory=math.inf, saliency=saliency, shown=self.main))

    def _batches(self, images: Data) -> Loader:
        """This process's share of the batches."""
        given = self.settings
        sharing = {"process": self.state.process_index, "processes": self.state.num_processes}
        return loader(images, given.batch_size, given.workers, **sharing)

    def _determinants(self, backbone: Backbone, candidate: Setting, images: str) -> dict[str, Any]:
        """Everything that determines the result of a setting on images with this hash, as JSON."""
        plain = backbone.parent is not None and model_of(candidate).spot_vit.vit is backbone.parent.vit
        return {
            "model": type(candidate.model).__name__,
            "weights": backbone.parent_hash if plain else backbone.hash,
            "placement": candidate.name,
            "tokens": candidate.tokens,
            "seed": candidate.seed,
            "places": hash_places(candidate),
            "images": images,
            "maps": self.sources.maps_hash() if candidate.needs_map else "",
        }

    def _can_vote(self, backbone: Backbone, bank: Setting) -> bool:
        """Whether there is a bank and, if this placement uses maps, maps of the bank's images."""
        if self.settings.bank is None or not bank.needs_map:
            return self.settings.bank is not None
        maps = Path(self.settings.saliency)
        return not maps.is_dir() or map_path(maps, self.sources.bank(backbone.model).keys[0]).is_file()
