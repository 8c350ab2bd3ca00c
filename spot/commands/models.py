"""spot models: the shipped models, their requirements and their accuracies."""

import spot
from spot import options, report


def models(*, json: options.Json = None) -> None:
    """List the models that ship with spot, with their requirements and their top-1 accuracy at each budget.

    A MODEL can also be a folder or file that spot saved, a hub id, or the name of any timm ViT.

    example: spot models
    """
    report.check_outputs(json)
    rows = spot.list_models()
    table = []
    for row in rows:
        accuracy = " ".join(f"{tokens}:{value:.1f}" for tokens, value in row["accuracy"].items())
        needs = "a download, or --weights FILE" if "weights=FILE" in row["needs"] else row["needs"]
        name = row["alias"] or row["name"]
        table.append({"model": name, "tokens:top-1 %": accuracy, "needs": needs, "on": row["data"]})
    full = [f"{row['alias']} is {row['name']}." for row in rows if row["alias"]]
    report.show(table, "Models, with their accuracy at each number of isotropic tokens", caption="\n".join(full))
    report.save_json(json, rows)
