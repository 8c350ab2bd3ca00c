"""What studies measure with: models, images and budgets, and measurements that are kept image by image.

    lab = Lab(backbones(["scenes-a", "scenes-b"]), cache="studies/cache")
    isotropic, dropped = lab.accuracy(lab.backbones[0], [Setting("isotropic", 9), Setting("patch-dropout", 9)])
    isotropic.right                                   # (M,) bool, image by image, in the order of isotropic.keys
    found = lab.oracle(lab.backbones[0], tokens=9)    # Placements with their trajectories
    lab.read(lab.backbones[1], found).right           # the same positions, read by another model

Every measurement is kept in the cache under what determines it, so that studies share it and a study
that was killed goes on. Nothing but outcomes stays in memory: trajectories are read from their file,
features are compared with a kNN bank and dropped, group by group. Under `accelerate launch` or
torchrun the images are shared out, every process gets every outcome, and the first one writes.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spot.data.images import Data, Stream, available_workers, data_for, loader
from spot.data.scenes import CLASSES
from spot.errors import InputError
from spot.evaluation.accuracy import Candidate, Maps, Setting, evaluate
from spot.evaluation.cost import macs
from spot.evaluation.knn import build_banks, classify, listing
from spot.models.baselines import BASELINES
from spot.models.protocol import TokenModel
from spot.placement.dataset_search import search_dataset
from spot.placement.files import Placements
from spot.placement.oracle import PRESETS, snapped
from spot.placement.priors import PRIORS
from spot.placement.saliency import map_path
from spot.processes import this_process
from spot.store import as_json, decode_names, encode_names, hash_json, hash_tensors
from spot.studies.backbone import Backbone, budgets
from spot.studies.cache import Cache
from spot.studies.maps import maps_for, maps_identity
from spot.studies.reading import Reading
from spot.studies.study import PAPER_IMAGES

SCENES = "scenes"
AT_ONCE = 12  # placements measured in one pass over the images, at most


class Lab:
    """Models, images, budgets, and where measurements are kept.

    Args:
        backbones: see `backbones`; by default the built-in ones.
        data: a folder of labelled images, a timm data set, or "scenes".
        split, root: see `spot.data.images.data_for`.
        tokens: budgets, rising; by default squares near an eighth, a quarter, a half and all of the grid.
        seeds: how many, for placements that are drawn.
        limit: images for plain rows; by default 1,024 scenes, or all photographs.
        oracle_limit: images for rows that are searched; by default 512 scenes, or as many as `limit`.
        saliency: spectral, an .onnx file, clipseg or a folder of maps; scenes know their masks.
        bank: labelled images for kNN; by default training scenes, and none for photographs.
        bank_limit: how many of them; by default 1,024 scenes, or all photographs.
        runs: folders of training runs, whose logs the study retrofit reads.
        cache: the folder of measurements.
    """

    def __init__(
        self,
        backbones: Sequence[Backbone],
        data: str = SCENES,
        *,
        cache: str | Path,
        split: str | None = None,
        root: str | Path | None = None,
        tokens: Sequence[int] = (),
        seeds: int = 3,
        limit: int | None = None,
        oracle_limit: int | None = None,
        saliency: str | None = None,
        bank: str | None = None,
        bank_limit: int | None = None,
        runs: Sequence[str | Path] = (),
        batch_size: int = 64,
        workers: int | None = None,
        memory: float = 2e9,
    ) -> None:
        if not backbones:
            raise InputError("a study needs at least one model")
        if seeds < 1:
            raise InputError(f"at least one seed is needed, got {seeds}")
        for name, number in (("limit", limit), ("oracle limit", oracle_limit), ("bank limit", bank_limit)):
            if number is not None and number < 1:
                raise InputError(f"the {name} must be at least one image, got {number}")
        self.backbones, self.data, self.root = list(backbones), data, root
        self.scenes = data == SCENES and not Path(data).is_dir()
        self.split = split or ("test" if self.scenes else "val")
        self.seeds = seeds
        self.limit = limit or (1024 if self.scenes else None)
        self.oracle_limit = oracle_limit or (min(512, self.limit or 512) if self.scenes else self.limit)
        self.saliency_source = saliency or ("masks" if self.scenes else "spectral")
        self.bank = bank or (SCENES if self.scenes else None)
        self.bank_limit = bank_limit or (1024 if self.bank == SCENES else None)
        self.runs = list(runs)
        self.batch_size, self.memory = batch_size, memory
        self.workers = (0 if self.scenes else available_workers()) if workers is None else workers
        self.cache = Cache(cache)
        self.state = this_process()
        self._tokens = tuple(sorted(set(tokens)))
        self._identities: dict[Any, str] = {}

    # What is measured

    @property
    def tokens(self) -> tuple[int, ...]:
        """The budgets, rising."""
        return self._tokens or budgets(len(self.backbones[0].model.grid()))

    @property
    def sparse(self) -> int:
        """The sparse budget, about 12.5 % of the grid: the smallest."""
        return self.tokens[0]

    @property
    def main(self) -> bool:
        """Whether this process writes; the others only share the work."""
        return bool(self.state.is_main_process)

    def images(self, backbone: Backbone, *, oracle: bool = False) -> Data:
        """The images as a backbone wants them; with `oracle`, those of them that are searched."""
        model = backbone.model
        if model.num_classes == 0:
            raise InputError(f"{backbone.name} has no classifier, and studies need its predictions")
        if self.scenes and model.num_classes != len(CLASSES):
            raise InputError(
                f"{backbone.name} knows {model.num_classes} classes, the scenes are of {len(CLASSES)}; give --data"
            )
        data = data_for(model, self.data, split=self.split, limit=self.limit, root=self.root)
        if isinstance(data, Stream):
            raise InputError(f"{self.data} is a stream, whose images have no names to compare results by")
        if oracle and self.oracle_limit is not None:
            if self.scenes:
                return data_for(model, self.data, split=self.split, limit=self.oracle_limit, root=self.root)
            data.thin(self.oracle_limit)  # type: ignore[union-attr]
        return data

    def saliency(self, backbone: Backbone) -> Maps:
        """Maps (B, H, W) for images as the backbone sees them and their keys."""
        return maps_for(self.saliency_source, backbone.model, self.data)

    def settings(self) -> dict[str, Any]:
        """Everything that determined the measurements, as JSON."""
        first = self.backbones[0]
        return {
            "models": {each.name: {"source": each.source, "weights": each.fingerprint} for each in self.backbones},
            "data": Path(self.data).name,
            "split": self.split,
            "images": len(self.images(first)),  # type: ignore[arg-type]
            "oracle_images": len(self.images(first, oracle=True)),  # type: ignore[arg-type]
            "image_files": self.identity(first, oracle=False),
            "tokens": list(self.tokens),
            "seeds": self.seeds,
            "saliency": Path(self.saliency_source).name,
            "bank": None if self.bank is None else Path(self.bank).name,
            "bank_limit": self.bank_limit,
            "oracle": {name: settings.as_json() for name, settings in PRESETS.items()},
            "processes": self.state.num_processes,
        }

    def differs(self, *, searched: bool = True) -> str:
        """What the paper's numbers and ours do not have in common, in a sentence."""
        kind = "scenes" if self.scenes else "images"
        counts = [len(self.images(self.backbones[0], oracle=oracle)) for oracle in (False, True)]  # type: ignore[arg-type]
        some = f", and {counts[1]:,} of them where positions are searched" if searched and counts[1] < counts[0] else ""
        names = ", ".join(backbone.name for backbone in self.backbones)
        return (
            f"Ours: {names} on {counts[0]:,} {kind}{some}, with 95 % intervals. The paper's: ViT-B/16 on ImageNet's "
            f"{PAPER_IMAGES:,} validation images."
        )

    def fewer(self, limit: int) -> "Lab":
        """The same lab with at most so many images for plain rows, for a study of many of them."""
        found = copy.copy(self)
        found.limit, found._identities = limit if self.limit is None else min(limit, self.limit), {}
        return found

    # Measurements, kept

    def accuracy(self, backbone: Backbone, settings: Sequence[Setting], *, knn: bool = False) -> list[Reading]:
        """What a backbone makes of all images with each placement, in one pass over the images.

        A setting's placement is a prior's name, or one in BASELINES: that is read by the backbone's
        parent if it has one, else by the backbone itself. With `knn`, neighbours vote too, where
        there is a bank (and, for priors that read maps, maps of its images).
        """
        abouts = [self._about(backbone, setting) for setting in settings]
        voting = [knn and self._can_vote(backbone, setting) for setting in settings]
        votes = [self._voted(about) for about in abouts]
        known = [self.cache.get(about) for about in abouts]
        known_votes = [
            self.cache.get(vote) if votes_too else None for vote, votes_too in zip(votes, voting, strict=True)
        ]
        missing = [
            index
            for index in range(len(settings))
            if known[index] is None or (voting[index] and known_votes[index] is None)
        ]
        self.state.wait_for_everyone()  # before the first process writes what another looks for
        at_once = self._at_once(backbone)
        groups: list[list[int]] = []
        for kind in (False, True):
            rows = [index for index in missing if voting[index] == kind]
            groups += [rows[first : first + at_once] for first in range(0, len(rows), at_once)]
        for group in groups:
            found = self._pass(backbone, [settings[index] for index in group], knn=voting[group[0]])
            for index, (outcome, vote) in zip(group, found, strict=True):
                self._keep(abouts[index], outcome)
                known[index] = outcome
                if vote is not None:
                    self._keep(votes[index], vote)
                    known_votes[index] = vote
            self.state.wait_for_everyone()
        return [
            Reading(decode_names(outcome["keys"]), outcome["ranks"] == 0, None if vote is None else vote["right"])  # type: ignore[index]
            for outcome, vote in zip(known, known_votes, strict=True)
        ]

    def seeded(self, placement: str, tokens: int, seeds: int | None = None) -> list[Setting]:
        """A placement once for each seed, or once where another seed would change nothing."""
        random = BASELINES[placement].random if placement in BASELINES else PRIORS[placement].random
        count = (self.seeds if seeds is None else seeds) if random else 1
        return [Setting(placement, tokens, seed) for seed in range(count)]

    def oracle(
        self,
        backbone: Backbone,
        prior: str = "isotropic",
        tokens: int | None = None,
        *,
        preset: str = "paper",
        objective: str = "descent",
        seed: int = 0,
    ) -> Placements:
        """Positions found by searching every oracle image from a prior, with their trajectories.

        `values` has labels (M,), predictions and losses (M, steps + 1); see `outcome`.
        """
        tokens = self.sparse if tokens is None else tokens
        about = self._about(backbone, Setting(prior, tokens, seed), oracle=True)
        about |= {"kind": "oracle", "preset": preset, "objective": objective}
        return search_dataset(
            backbone.model,
            self.images(backbone, oracle=True),  # type: ignore[arg-type]
            self.cache.path(about),
            prior=prior,
            tokens=tokens,
            saliency=self.saliency(backbone) if PRIORS[prior].needs_map else None,
            seed=seed,
            batch_size=self.batch_size,
            workers=self.workers,
            state=self.state,
            shown=self.main,
            remake=True,
            settings=PRESETS[preset].changed(objective=objective),
        ).placements

    def read(
        self, backbone: Backbone, placements: Placements, *, snap: bool = False, bank: Setting | None = None
    ) -> Reading:
        """What a backbone makes of given positions.

        snap: move each position to the nearest cell of the backbone's grid first.
        bank: with it, neighbours vote too, from images placed so (placements are of these images only).
        """
        keys = sorted(placements.keys)
        positions = placements.positions_for(keys)
        if snap:
            positions = snapped(positions, backbone.model.grid_size)
        setting = Setting(Placements(keys, positions), name="given")
        about = self._about(backbone, Setting("given", positions.shape[1]), oracle=True)
        about |= {"positions": hash_tensors({"positions": positions, "keys": encode_names(keys)})}
        vote = self._voted(about) | {"bank_placement": None if bank is None else [bank.label, bank.tokens, bank.seed]}
        voting = bank is not None and self._can_vote(backbone, bank)
        outcome, votes = self.cache.get(about), self.cache.get(vote) if voting else None
        self.state.wait_for_everyone()
        if outcome is None or (voting and votes is None):
            ((outcome, votes),) = self._pass(backbone, [setting], knn=voting, bank=bank, oracle=True)
            self._keep(about, outcome)
            if votes is not None:
                self._keep(vote, votes)
            self.state.wait_for_everyone()
        return Reading(decode_names(outcome["keys"]), outcome["ranks"] == 0, None if votes is None else votes["right"])

    def remember(self, about: Mapping[str, Any], compute: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Any other measurement: read from the cache, or computed (by every process) and kept."""
        about = as_json(about)
        found = self.cache.get(about)
        self.state.wait_for_everyone()
        if found is None:
            found = dict(compute())
            self._keep(about, found)
            self.state.wait_for_everyone()
        return found

    # Costs, not kept

    def cost(self, backbone: Backbone, setting: Setting) -> float:
        """Multiply-adds of one image, in billions."""
        return macs(self.model(backbone, setting)) / 1e9

    def model(self, backbone: Backbone, setting: Setting) -> TokenModel:
        """The model of a setting, as `model(images)`, for timing."""
        return self.candidate(backbone, setting).module

    # Inside

    def _pass(
        self,
        backbone: Backbone,
        settings: Sequence[Setting],
        *,
        knn: bool,
        bank: Setting | None = None,
        oracle: bool = False,
    ) -> list[tuple[dict[str, Tensor], dict[str, Tensor] | None]]:
        """Outcomes and votes of some settings, in one pass over the images."""
        resolved = [self.candidate(backbone, setting) for setting in settings]
        banks = self._banks(backbone, [bank or setting for setting in settings]) if knn else []
        batches = loader(
            self.images(backbone, oracle=oracle),
            self.batch_size,
            self.workers,
            process=self.state.process_index,
            processes=self.state.num_processes,
        )
        found = evaluate(
            backbone.model,
            batches,
            resolved,
            saliency=self.saliency(backbone) if any(needs_map(each) for each in settings) else None,
            features=knn,
            shown=self.main,
            title=f"{backbone.name}, {len(settings)} placement{'s' if len(settings) > 1 else ''}",
        )
        keys = encode_names(found.keys)
        results: list[tuple[dict[str, Tensor], dict[str, Tensor] | None]] = []
        for index in range(len(settings)):
            outcome = {"keys": keys, "ranks": found.ranks[index].to(torch.int32), "losses": found.losses[index].float()}
            vote = None
            if knn:
                answers = classify(found.features[index].to(self.state.device), banks[index]).cpu()
                vote = {"right": answers[:, 0] == found.labels}
            results.append((outcome, vote))
        return results

    def candidate(self, backbone: Backbone, setting: Setting) -> Candidate:
        """The setting with its model: a baseline is made of the plain ViT, where that is known."""
        baseline = isinstance(setting.placement, str) and setting.placement in BASELINES
        return setting.of((backbone.parent or backbone.model) if baseline else backbone.model)

    def _banks(self, backbone: Backbone, settings: Sequence[Setting]) -> list[Any]:
        """A kNN bank for each setting, kept in the cache folder."""
        labelled: Any = self._bank_images(backbone)
        found: list[Any] = [None] * len(settings)
        for index, setting in enumerate(settings):
            if found[index] is not None:
                continue
            kind = _reader_of(setting)  # those of one kind are made in one pass
            chosen = [each for each in range(len(settings)) if _reader_of(settings[each]) == kind]
            # A bank's file is named by its weights and placement, so maps of another kind get another folder.
            maps = self.saliency_identity().replace(" ", "-") if kind == "maps" else ""
            folder = self.cache.folder / "banks" / maps
            made = build_banks(
                (backbone.parent or backbone.model) if kind == "baseline" else backbone.model,
                labelled,
                [self.candidate(backbone, settings[each]) for each in chosen],
                folder,
                batch_size=self.batch_size,
                workers=self.workers,
                saliency=maps_for(self.saliency_source, backbone.model, str(self.bank)) if kind == "maps" else None,
                memory=self.memory,
                shown=self.main,
            )
            for each, bank in zip(chosen, made, strict=True):
                found[each] = bank
        return found

    def _bank_images(self, backbone: Backbone) -> Data:
        return data_for(backbone.model, str(self.bank), split="train", limit=self.bank_limit)

    def _can_vote(self, backbone: Backbone, setting: Setting) -> bool:
        """Whether there is a bank for this placement."""
        if self.bank is None:
            return False
        if not needs_map(setting) or not Path(self.saliency_source).is_dir():
            return True
        first: str = self._bank_images(backbone).keys[0]  # type: ignore[union-attr]
        return map_path(self.saliency_source, first).is_file()

    def _at_once(self, backbone: Backbone) -> int:
        """How many settings to measure in a pass: their features must fit into memory, and a kill not undo much."""
        count = len(self.images(backbone))  # type: ignore[arg-type]
        return max(1, min(AT_ONCE, int(self.memory / (4 * count * backbone.model.embed_dim))))

    def _about(self, backbone: Backbone, setting: Setting, *, oracle: bool = False) -> dict[str, Any]:
        """What determines an outcome: weights, images and how they are prepared, placement, budget, seed."""
        name = str(setting.placement)
        if name not in PRIORS and name not in BASELINES and name != "given":
            raise InputError(f"studies name their placements: a prior or one of {', '.join(BASELINES)}, got {name!r}")
        baseline = name in BASELINES
        return {
            "kind": "reading",
            "backbone": backbone.name.replace("/", "-"),
            "weights": (backbone.parent_fingerprint or backbone.fingerprint) if baseline else backbone.fingerprint,
            "images": self.identity(backbone, oracle=oracle),
            "placement": name,
            "tokens": setting.tokens,
            "seed": setting.seed,
            "saliency": self.saliency_identity() if needs_map(setting) else None,
        }

    def _voted(self, about: Mapping[str, Any]) -> dict[str, Any]:
        return {**about, "kind": "knn", "bank": self.bank, "bank_limit": self.bank_limit}

    def identity(self, backbone: Backbone, *, oracle: bool) -> str:
        """A hash of the images' files and how the backbone wants them."""
        config = {name: str(value) for name, value in sorted(backbone.model.data_config.items())}
        key = (str(config), oracle)
        if key not in self._identities:
            self._identities[key] = hash_json([listing(self.images(backbone, oracle=oracle)), config])
        return self._identities[key]

    def saliency_identity(self) -> str:
        if "saliency" not in self._identities:
            self._identities["saliency"] = maps_identity(self.saliency_source)
        return self._identities["saliency"]

    def _keep(self, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        if self.main:
            self.cache.put(about, tensors)


def _reader_of(setting: Setting) -> str:
    """Who reads a setting and what it needs: a baseline's own model, or the backbone with or without maps."""
    if setting.label in BASELINES:
        return "baseline"
    return "maps" if needs_map(setting) else "prior"


def needs_map(setting: Setting) -> bool:
    """Whether a setting's prior reads saliency maps."""
    return setting.label in PRIORS and PRIORS[setting.label].needs_map
