"""What studies measure with: models, images and budgets, and measurements that are kept image by image.

    lab = Lab(backbones(["scenes-a", "scenes-b"]), StudySettings(), cache="studies/cache")
    isotropic, dropped = lab.accuracy(lab.backbones[0], [Setting("isotropic", 9), Setting("patch-dropout", 9)])
    isotropic.right                                   # (M,) bool, image by image, in the order of isotropic.keys
    placements = lab.oracle(lab.backbones[0], tokens=9)    # with their trajectories
    lab.at(lab.backbones[1], placements).right        # another model at the same positions

Every measurement is kept in the cache under what determines it, so that studies share it and a study
that was killed goes on. Only predictions stay in memory: trajectories are read from their file,
features are compared with a kNN bank and dropped, group by group. Under `accelerate launch` or
torchrun the images are shared out, every process gets every prediction, and the first one writes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spot.data.images import loader
from spot.errors import InputError
from spot.evaluation.accuracy import Candidate, Setting, evaluate
from spot.evaluation.cache import Cache, determinants, needs_map
from spot.evaluation.knn import build_banks, classify
from spot.models.baselines import BASELINES
from spot.models.protocol import TokenModel
from spot.placement.dataset_search import search_dataset
from spot.placement.files import Placements
from spot.placement.oracle import PRESETS, snapped
from spot.placement.priors import PRIORS
from spot.placement.sizes import Scale
from spot.processes import this_process
from spot.store import as_json, decode_names, encode_names
from spot.studies.backbone import Backbone, budgets
from spot.studies.predictions import Predictions
from spot.studies.sources import Sources, StudySettings
from spot.studies.study import PAPER_IMAGES

AT_ONCE = 12  # placements measured in one pass over the images, at most
Tensors = dict[str, Tensor]


class Lab:
    """Models, what they are measured on, and where measurements are kept."""

    def __init__(
        self, backbones: Sequence[Backbone], settings: StudySettings | None = None, *, cache: str | Path
    ) -> None:
        if not backbones:
            raise InputError("a study needs at least one model")
        self.backbones, self.settings = list(backbones), settings or StudySettings()
        self.sources, self.cache, self.state = Sources(self.settings), Cache(cache), this_process()

    # What is measured

    @property
    def tokens(self) -> tuple[int, ...]:
        """The budgets, rising."""
        return self.settings.tokens or budgets(len(self.backbones[0].model.grid()))

    @property
    def sparse(self) -> int:
        """The sparse budget, about 12.5 % of the grid: the smallest."""
        return self.tokens[0]

    @property
    def main(self) -> bool:
        """Whether this process writes; the others only share the work."""
        return bool(self.state.is_main_process)

    def describe(self) -> dict[str, Any]:
        """Everything that determined the measurements, as JSON."""
        first, given = self.backbones[0].model, self.settings
        return {
            "models": {each.name: {"source": each.source, "weights": each.hash} for each in self.backbones},
            "data": Path(given.data).name,
            "split": given.split,
            "images": len(self.sources.images(first)),
            "oracle_images": len(self.sources.images(first, oracle=True)),
            "image_files": self.sources.images_hash(first),
            "tokens": list(self.tokens),
            "seeds": given.seeds,
            "saliency": Path(given.saliency).name,
            "bank": None if given.bank is None else Path(given.bank).name,
            "bank_limit": given.bank_limit,
            "oracle": {name: search.as_json() for name, search in PRESETS.items()},
            "processes": self.state.num_processes,
        }

    def differs(self, *, searched: bool = True) -> str:
        """What the paper's numbers and ours do not have in common, in a sentence."""
        kind = "scenes" if self.settings.scenes else "images"
        first = self.backbones[0].model
        counts = [len(self.sources.images(first, oracle=oracle)) for oracle in (False, True)]
        some = f", and {counts[1]:,} of them where positions are searched" if searched and counts[1] < counts[0] else ""
        names = ", ".join(backbone.name for backbone in self.backbones)
        return (
            f"Ours: {names} on {counts[0]:,} {kind}{some}, with 95 % intervals. The paper's: ViT-B/16 on ImageNet's "
            f"{PAPER_IMAGES:,} validation images."
        )

    def fewer(self, limit: int) -> "Lab":
        """The same lab with at most so many images for plain rows, for a study of many of them."""
        limit = min(limit, self.settings.limit or limit)
        return Lab(self.backbones, replace(self.settings, limit=limit), cache=self.cache.folder)

    def seeded(self, placement: str, tokens: int, seeds: int | None = None) -> list[Setting]:
        """A placement once for each seed, or once where another seed would change nothing."""
        random = BASELINES[placement].random if placement in BASELINES else PRIORS[placement].random
        count = (self.settings.seeds if seeds is None else seeds) if random else 1
        return [Setting(placement, tokens, seed) for seed in range(count)]

    def candidate(self, backbone: Backbone, setting: Setting) -> Candidate:
        """The setting with its model: a baseline is made of the plain ViT, where that is known."""
        name = setting.placement
        if not isinstance(name, str) or (name not in PRIORS and name not in BASELINES):
            raise InputError(f"studies name their placements: a prior or one of {', '.join(BASELINES)}, got {name!r}")
        return setting.of((backbone.parent or backbone.model) if name in BASELINES else backbone.model)

    def model(self, backbone: Backbone, setting: Setting) -> TokenModel:
        """The model of a setting, as `model(images)`, for timing."""
        return self.candidate(backbone, setting).module

    # Measurements, kept

    def accuracy(self, backbone: Backbone, settings: Sequence[Setting], *, knn: bool = False) -> list[Predictions]:
        """What a backbone predicts of all images with each placement, in one pass over the images.

        A setting's placement is a prior's name, or one in BASELINES: that is made of the backbone's
        parent if it has one, else of the backbone itself. With `knn`, neighbours vote too, where
        there is a bank (and, for priors that read maps, maps of its images).
        """
        candidates = [self.candidate(backbone, setting) for setting in settings]
        return self._predictions(backbone, candidates, list(candidates) if knn else [None] * len(candidates))

    def at(
        self, backbone: Backbone, placements: Placements, *, snap: bool = False, bank: Setting | None = None
    ) -> Predictions:
        """What a backbone predicts at given positions.

        snap: move each position to the nearest cell of the backbone's grid first.
        bank: with it, neighbours vote too, from images placed so (placements are of these images only).
        """
        keys = sorted(placements.keys)
        positions = placements.positions_for(keys)
        if snap:
            positions = snapped(positions, backbone.model.grid_size)
        given = Candidate(backbone.model, Placements(keys, positions), name="given")
        banks = [None if bank is None else self.candidate(backbone, bank)]
        return self._predictions(backbone, [given], banks, oracle=True)[0]

    def oracle(
        self,
        backbone: Backbone,
        prior: str = "isotropic",
        tokens: int | None = None,
        *,
        preset: str = "paper",
        objective: str = "descent",
        seed: int = 0,
        scale: Scale | None = None,
    ) -> Placements:
        """Positions found by searching every oracle image from a prior, with their trajectories.

        With a scale other than 1 the search starts there, and moves the windows' scales too.
        `values` has labels (M,), predictions and losses (M, steps + 1); see `predicted`.
        """
        start = Setting(prior, self.sparse if tokens is None else tokens, seed, scale=scale)
        about = self.about(backbone, self.candidate(backbone, start), oracle=True)
        search = PRESETS[preset].changed(objective=objective)
        about |= {"kind": "oracle", "search": search.as_json(), "objective": objective}
        return search_dataset(
            backbone.model,
            self.sources.images(backbone.model, oracle=True),
            self.cache.path(about),
            prior=prior,
            tokens=start.tokens,
            scale=scale,
            saliency=self.sources.saliency(backbone.model) if PRIORS[prior].needs_map else None,
            seed=seed,
            batch_size=self.settings.batch_size,
            workers=self.settings.workers,
            state=self.state,
            shown=self.main,
            remake=True,
            settings=search,
        ).placements

    def remember(self, about: Mapping[str, Any], compute: Callable[[], Mapping[str, Tensor]]) -> Tensors:
        """Any other measurement: read from the cache, or computed (by every process) and kept."""
        about = as_json(about)
        known = self.cache.get(about)
        self.state.wait_for_everyone()
        if known is None:
            known = dict(compute())
            self._keep(about, known)
            self.state.wait_for_everyone()
        return known

    def about(self, backbone: Backbone, candidate: Candidate, *, oracle: bool = False) -> dict[str, Any]:
        """What determines a measurement, and the backbone's name, for the name of its file."""
        images = self.sources.images_hash(backbone.model, oracle=oracle)
        name = backbone.name.replace("/", "-")
        return {"kind": "predictions", "name": name, **self._determinants(backbone, candidate, images)}

    # Inside

    def _predictions(
        self,
        backbone: Backbone,
        candidates: Sequence[Candidate],
        banks: Sequence[Candidate | None],
        *,
        oracle: bool = False,
    ) -> list[Predictions]:
        """Predictions of candidates and, where there can be a bank, votes of neighbours in a bank placed so."""
        voters = [bank if bank is not None and self._can_vote(backbone, bank) else None for bank in banks]
        abouts = [self.about(backbone, candidate, oracle=oracle) for candidate in candidates]
        votes = [
            None if voter is None else {**about, "kind": "knn", "bank": self._about_bank(backbone, voter)}
            for about, voter in zip(abouts, voters, strict=True)
        ]
        known = [self.cache.get(about) for about in abouts]
        known_votes = [None if vote is None else self.cache.get(vote) for vote in votes]
        self.state.wait_for_everyone()  # before the first process writes what another looks for
        missing = [
            index
            for index, vote in enumerate(votes)
            if known[index] is None or (vote is not None and known_votes[index] is None)
        ]
        at_once = self._at_once(backbone)
        for kind in (False, True):  # features are kept only where neighbours vote
            rows = [index for index in missing if (voters[index] is not None) == kind]
            for group in (rows[first : first + at_once] for first in range(0, len(rows), at_once)):
                some = [(candidates[index], voters[index]) for index in group]
                for index, (outcome, vote) in zip(group, self._measured(backbone, some, kind, oracle), strict=True):
                    self._keep(abouts[index], outcome)
                    self._keep(votes[index], vote)
                    known[index], known_votes[index] = outcome, vote
                self.state.wait_for_everyone()
        return [
            Predictions(decode_names(outcome["keys"]), outcome["ranks"] == 0, None if vote is None else vote["right"])  # type: ignore[index]
            for outcome, vote in zip(known, known_votes, strict=True)
        ]

    def _measured(
        self, backbone: Backbone, some: Sequence[tuple[Candidate, Candidate | None]], knn: bool, oracle: bool
    ) -> list[tuple[Tensors, Tensors | None]]:
        """Outcomes and votes of some candidates, in one pass over the images."""
        candidates = [candidate for candidate, _ in some]
        banks = self._banks(backbone, [bank for _, bank in some if bank is not None])
        images = self.sources.images(backbone.model, oracle=oracle)
        sharing = {"process": self.state.process_index, "processes": self.state.num_processes}
        made = evaluate(
            backbone.model,
            loader(images, self.settings.batch_size, self.settings.workers, **sharing),
            candidates,
            saliency=self.sources.saliency(backbone.model) if any(map(needs_map, candidates)) else None,
            features=knn,
            shown=self.main,
            title=f"{backbone.name}, {len(some)} placement{'s' if len(some) > 1 else ''}",
        )
        keys = encode_names(made.keys)
        results: list[tuple[Tensors, Tensors | None]] = []
        for index in range(len(some)):
            outcome = {"keys": keys, "ranks": made.ranks[index].to(torch.int32), "losses": made.losses[index].float()}
            vote = None
            if knn:
                answers = classify(made.features[index].to(self.state.device), banks[index]).cpu()
                vote = {"right": answers[:, 0] == made.labels}
            results.append((outcome, vote))
        return results

    def _banks(self, backbone: Backbone, candidates: Sequence[Candidate]) -> list[Any]:
        """A kNN bank for each candidate, kept in the cache folder."""
        if not candidates:
            return []
        maps = any(map(needs_map, candidates))
        return build_banks(
            backbone.model,
            self.sources.bank(backbone.model),
            candidates,
            self.cache.folder,
            batch_size=self.settings.batch_size,
            workers=self.settings.workers,
            saliency=self.sources.saliency(backbone.model, str(self.settings.bank)) if maps else None,
            maps=self.sources.maps_hash() if maps else "",
            memory=self.settings.memory,
            shown=self.main,
        )

    def _determinants(self, backbone: Backbone, candidate: Candidate, images: str) -> dict[str, Any]:
        own = candidate.model.spot_vit is backbone.model
        maps = self.sources.maps_hash() if needs_map(candidate) else ""
        return determinants(candidate, backbone.hash if own else backbone.parent_hash, images, maps)

    def _about_bank(self, backbone: Backbone, bank: Candidate) -> dict[str, Any]:
        return self._determinants(backbone, bank, self.sources.images_hash(backbone.model, bank=True))

    def _can_vote(self, backbone: Backbone, bank: Candidate) -> bool:
        """Whether there is a bank for this placement."""
        if self.settings.bank is None:
            return False
        return not needs_map(bank) or self.sources.has_maps_of_bank(backbone.model)

    def _at_once(self, backbone: Backbone) -> int:
        """How many candidates to measure in a pass: their features must fit into memory, and a kill not undo much."""
        count = len(self.sources.images(backbone.model))
        return max(1, min(AT_ONCE, int(self.settings.memory / (4 * count * backbone.model.embed_dim))))

    def _keep(self, about: Mapping[str, Any] | None, tensors: Mapping[str, Tensor] | None) -> None:
        if self.main and about is not None and tensors is not None:
            self.cache.put(about, tensors)
