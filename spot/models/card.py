"""The model card that `save_pretrained` and `push_to_hub` write: a description of the model, and how to load it."""

from huggingface_hub import ModelCard, ModelCardData

from spot import report
from spot.hashes import hash_model
from spot.models.spot_vit import SpotViT
from spot.placement.priors import resolve_prior

CARD = """---
{data}
---

# {model.name}

A {model.name} whose tokens can be placed anywhere in an image ([SPoT](https://openreview.net/forum?id=XrBzSmzAVo)):
{height} × {width} pixels, windows of {model.patch_size}, {model.num_classes} classes. Its own placement is
{prior} with {model.tokens} tokens; any other is an argument.

```python
import spot

model = spot.load("NAME")  # the name of this repository or folder
logits = model(images, tokens=49)
```

## Licence

Weights: {licence}. Code: Apache-2.0.

Weights {hash}, spot-vit {version}.
"""


def model_card(model: SpotViT) -> ModelCard:
    """A card in Markdown with the hub's YAML header; the licence of the weights is that of timm's entry."""
    config = model.pretrained_cfg
    data = ModelCardData(
        library_name="spot-vit",
        pipeline_tag="image-classification",
        base_model=config.get("hf_hub_id"),
        license=config.get("license"),
        tags=["vision-transformer", "token-placement", "timm"],
    )
    height, width = model.img_size
    text = CARD.format(
        data=data.to_yaml(),
        model=model,
        height=height,
        width=width,
        prior=resolve_prior(model.prior).name,
        licence=data.license or "as their base model, whose licence is unknown here",
        hash=hash_model(model),
        version=report.versions()["spot-vit"],
    )
    return ModelCard(text)
