// The search: its steps, its curve, and the control.

import { $, app, labelOf, link, note, viewOf } from "./app.js";
import { curve } from "./curve.js";
import { percent } from "./panel.js";
import { refresh, setPositions } from "./show.js";
import { remember, writeAddress } from "./views.js";
import { dropField, whyShown } from "./why.js";

const STEP_TIME = matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : 90; // display time of a search step, in ms
export const OBJECTIVES = {
  descent: "more probable",
  obfuscate: "a wrong label",
  agree: "as the dense ViT",
  entropy: "more confident",
};

export function searching(running) {
  app.searching = running;
  $("stop").hidden = !running;
  $("control").hidden = running;
  for (const name of ["search", "ascend"]) $(name).disabled = running;
  if (app.active?.info) searchShown();
}

export function stopWork() {
  for (const slot of ["search", "control"]) link.stop(slot);
  app.steps = [];
  searching(false);
  app.panels.forEach(dropField);
  whyShown();
}

export function search(objective) {
  const panel = app.active;
  const label = labelOf(panel);
  if (label === null && app.about.labelled.includes(objective)) {
    return note($("target").value === "class" ? "This class is not one of the model's; pick one from the list." : `To ${objective === "ascent" ? "ascend" : "search by " + objective}, pick a label; agree and entropy need none.`);
  }
  remember();
  stopWork();
  const adversarial = objective === "ascent";
  panel.searched = { trajectory: [], values: [], others: [], adversarial, label, name: "", steps: 1 };
  const request = { kind: "search", ...viewOf(panel), label, objective, preset: $("preset").value, seed: Number($("seed").value) };
  if ($("steps").value) request.steps = Number($("steps").value);
  searching(true);
  link.start("search", request, (answer) => {
    if (answer.error) return searching(false);
    app.steps.push([panel, answer]);
    if (!app.showing) showStep();
  });
}

/** Animate the received steps, one after another. */
function showStep() {
  const [panel, answer] = app.steps.shift() ?? [];
  app.showing = Boolean(answer);
  if (!answer) return;
  if (answer.done) {
    searching(false);
    app.showing = false;
    refresh(panel);
    writeAddress();
    return;
  }
  const { searched } = panel;
  searched.trajectory.push(answer.positions.map((each) => each.map(Math.fround)));
  searched.values.push(answer.p);
  Object.assign(searched, { name: answer.name, label: searched.label ?? answer.class, steps: answer.steps });
  panel.stage.show({ positions: searched.trajectory.at(-1), trajectory: [...searched.trajectory], adversarial: searched.adversarial });
  panel.predict({ ...panel.prediction, top: answer.top }, answer.class);
  searchShown();
  setTimeout(showStep, STEP_TIME);
}

export function searchShown() {
  const { searched, stage } = app.active;
  const length = searched?.trajectory.length ?? 0;
  const now = searched?.now ?? length - 1;
  $("steps").placeholder = app.about.presets[$("preset").value];
  curve($("curve"), searched ? { ...searched, now } : { values: [], steps: Number($("steps").value) || app.about.presets[$("preset").value] });
  $("step-row").hidden = length < 2 || app.searching;
  Object.assign($("step"), { max: Math.max(length - 1, 0), value: now });
  $("step-text").textContent = length ? `${now} of ${searched.steps}, ${percent(searched.values[now])}` : "";
  $("control").disabled = app.searching || length < 2;
  if (!length) {
    $("search-text").textContent = "A search optimises the positions by gradient, in a few steps.";
    return;
  }
  const [first, last] = [searched.values[0], searched.values.at(-1)];
  const far = distance(searched.trajectory[0], searched.trajectory.at(-1), stage.size);
  let text = `${searched.name}: ${percent(first)} → ${percent(last)}; tokens moved by ${far.toFixed(1)} pixels on average.`;
  if (searched.others.length) {
    const mean = searched.others.reduce((sum, p) => sum + p) / searched.others.length;
    text += ` Moved as far in random directions: ${percent(mean)} (${searched.others.length} draws, ${percent(Math.min(...searched.others))} to ${percent(Math.max(...searched.others))}).`;
  }
  $("search-text").textContent = text;
}

const distance = (start, end, size) =>
  start.reduce((sum, [y, x], i) => sum + Math.hypot((end[i][0] - y) * size[0], (end[i][1] - x) * size[1]), 0) / start.length;

export function goToStep(step) {
  const panel = app.active;
  panel.searched.now = step;
  setPositions(panel, panel.searched.trajectory[step], { trajectory: panel.searched.trajectory, keepSearch: true });
}

export async function control() {
  const panel = app.active;
  const { trajectory, label } = panel.searched;
  const ends = [trajectory[0], trajectory.at(-1)];
  panel.draws = (panel.draws ?? -1) + 1;
  const answer = await link.ask("control", { kind: "control", picture: app.picture, model: panel.model, trajectory: ends, label, seed: panel.draws });
  if (answer.error) return;
  remember();
  panel.searched.others = answer.probabilities;
  const positions = answer.positions.map((each) => each.map(Math.fround));
  setPositions(panel, positions, { trajectory: [trajectory[0], positions], keepSearch: true });
}

export function targetShown() {
  for (const element of document.querySelectorAll(".named")) element.hidden = $("target").value !== "class";
  const free = $("target").value === "none";
  for (const option of $("objective").options) option.disabled = free && app.about.labelled.includes(option.value);
  if ($("objective").selectedOptions[0]?.disabled) $("objective").value = "agree";
  $("ascend").disabled = free || app.searching;
  app.panels.forEach((panel) => panel.prediction && panel.predict(panel.prediction, labelOf(panel)));
}
