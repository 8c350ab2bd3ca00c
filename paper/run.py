"""Run studies one after the other and write their files, for `python -m paper`."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paper import findings
from paper.lab import Lab
from paper.study import Result, Study
from spot import report
from spot.errors import InputError
from spot.plots import save
from spot.store import as_json, write_text

TOLERANCE = 0.25  # points by which different rounding of sums may change an accuracy
# Studies that --only can add to, and the column of their rows that names a placement:
PLACEMENT_COLUMN = {"priors": "prior", "classification": "placement", "robustness": "placement"}


def run(studies: Sequence[Study], lab: Lab, out: Path) -> None:
    """Measure studies and write each; if one of several fails, the others are still measured."""
    failures = {}
    only = list(lab.settings.only)
    existing = {study.name: existing_result(study, lab, out) for study in studies if only}
    for number, study in enumerate(studies, 1):
        if lab.main:
            report.errors.print(f"{study.name} ({number} of {len(studies)})", highlight=False)
        started, cpu_started = time.perf_counter(), time.process_time()
        try:
            result = study.run(lab)
        except InputError as error:
            if isinstance(error.__cause__, OSError) or len(studies) == 1:
                raise  # the following studies could not be written either
            failures[study.name] = str(error)
            if lab.main:
                report.warn(f"{study.name}: {error}")
            continue
        result.study = study.name
        result.settings = {**lab.describe(), **result.settings, "command": report.command("python -m paper")}
        result.settings["seconds"] = round(time.perf_counter() - started, 1)
        # Values that do not depend on the load of the machine:
        result.settings["processor_seconds"] = round(time.process_time() - cpu_started, 1)
        if lab.main:
            write(study, replaced(existing[study.name], result, only) if only else result, out)
    if lab.main and 1 < len(studies) != len(failures):
        write_findings(out)
    if failures:
        raise InputError("; ".join(f"{name}: {failure}" for name, failure in failures.items()))


def existing_result(study: Study, lab: Lab, out: Path) -> Result:
    """The result in the folder, if --only can add rows to it because models and images are the same."""
    if study.name not in PLACEMENT_COLUMN:
        raise InputError(f"--only is for {', '.join(PLACEMENT_COLUMN)}, not for {study.name}")
    kept, now = Result.load(out / f"{study.name}.json"), as_json(lab.describe())
    for name in ("models", "data", "split", "images", "tokens", "seeds", "oracle_images", "bank", "bank_limit"):
        if now[name] != kept.settings[name]:
            raise InputError(f"--only adds to a result of the same {name}: {kept.settings[name]}, not {now[name]}")
    return kept


def replaced(kept: Result, new: Result, only: Sequence[str]) -> Result:
    """An existing result with the rows of some placements replaced by new ones."""
    label = PLACEMENT_COLUMN[new.study]
    before = {(row["backbone"], row["tokens"]): row["top1"] for row in kept.rows if row[label] == "isotropic"}
    for row in new.rows:
        known = before.get((row["backbone"], row["tokens"]), row["top1"])
        if row[label] == "isotropic" and abs(row["top1"] - known) > TOLERANCE:
            raise InputError(
                f"--only adds to rows of the same images: isotropic had {known:.2f} % there, now {row['top1']:.2f} %"
            )
    rows = [row for row in kept.rows if row[label] not in only] + [row for row in new.rows if row[label] in only]
    order = [*dict.fromkeys(row[label] for row in [*kept.rows, *new.rows])]
    names = [*kept.settings["models"]]
    rows.sort(key=lambda row: (names.index(row["backbone"]), order.index(row[label])))
    added = [each for each in kept.settings.get("added", []) if not set(each["only"]) <= set(only)]
    added.append({"only": list(only), "command": new.settings["command"]})
    return replace(new, rows=rows, settings={**kept.settings, "added": added})


def write(study: Study, result: Result, out: Path) -> None:
    """Write a result as JSON, Markdown, PNG and PDF, and show it in the terminal."""
    result.save(out / f"{study.name}.json")
    figure = study.draw(result)
    for ending in ("png", "pdf"):
        save(figure, out / f"{study.name}.{ending}")
    write_text(out / f"{study.name}.md", study.markdown(result))
    study.show(result)
    report.say(f"Everything is in {out / study.name}.json, the page in .md, the figure in .png and .pdf.")


def write_findings(out: Path) -> None:
    """Report which of the paper's findings hold according to the results in a folder, and write the report there."""
    result = findings.read(out)
    result.save(out / "findings.json")
    write_text(out / "findings.md", findings.markdown(result))
    report.show(findings.lines(result), "What the findings rest on")
    report.show(result.rows, "Do the paper's findings hold here?", caption="\n".join(result.notes))
    report.say(f"The findings are in {out / 'findings.json'} and {out / 'findings.md'}.")
