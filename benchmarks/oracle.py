"""A search step beside a forward pass of the same model at the same tokens.

25 tokens, 224 × 224, random weights; 32 images at a time, as `spot search` takes them, and for ViT-Ti fewer and
more too. "step" is (search of 3 steps − one forward pass) / 3 by one forward pass without gradients, in the same
round, median over rounds; "unfrozen" is the same for a plain loop that leaves the parameters' gradients on, as the
authors' code does. Forward passes are timed seven in a row: on a shared machine what is short is disturbed less
often than what is long, which would flatter it.
"""

from statistics import median

import torch
import torch.nn.functional as F

import spot
from spot.evaluation.throughput import interleaved

TOKENS, STEPS = 25, 3
PASSES = 1 + 2 * STEPS  # forward passes in a row, about as long as a search
CASES = (  # model, images at a time, rounds
    ("vit_tiny_patch16_224", 16, 15),
    ("vit_tiny_patch16_224", 32, 9),
    ("vit_tiny_patch16_224", 64, 7),
    ("vit_base_patch16_224", 32, 3),
)


def run() -> list[dict]:
    return [row(*case) for case in CASES]


def row(name: str, batch: int, rounds: int) -> dict:
    model = spot.adapt(name, tokens=TOKENS)
    images = torch.randn(batch, 3, 224, 224)
    labels = torch.randint(1000, (batch,))
    positions = model.place(images)

    @torch.no_grad()
    def forward(images):
        for _ in range(PASSES):
            model(images, positions)

    def unfrozen(images):
        places = positions.clone().requires_grad_()
        stepper = torch.optim.AdamW([places], lr=3e-3)
        for _ in range(STEPS):
            stepper.zero_grad()
            F.cross_entropy(model(images, places), labels).backward()
            stepper.step()

    calls = {
        "forward": forward,
        "search": lambda images: spot.search(model, images, labels, positions, steps=STEPS),
        "unfrozen": unfrozen,
    }
    for call in calls.values():
        call(images)
    seconds = interleaved(calls, images, rounds)
    once = [passes / PASSES for passes in seconds["forward"]]
    each = list(zip(once, seconds["search"], seconds["unfrozen"], strict=True))
    return {
        "model": name,
        "batch": batch,
        "tokens": TOKENS,
        "step / forward": median((search - once) / STEPS / once for once, search, _ in each),
        "unfrozen / forward": median(loop / STEPS / once for once, _, loop in each),
        "images/s": batch / median(seconds["search"]),
    }
