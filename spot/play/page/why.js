// Overlays on the picture: saliency, and the field of "Why here?".

import { $, app, labelOf, link, note, viewOf } from "./app.js";
import { difference, differenceGradient, heat } from "./colors.js";
import { percent } from "./panel.js";
import { stopWork } from "./search.js";
import { setPositions } from "./show.js";
import { remember } from "./views.js";

export function overlay(panel) {
  const { field } = panel;
  let shown = null;
  if (field?.values) {
    const numbers = field.values.flat().filter((value) => value !== null);
    const gains = field.values.map((row) => row.map((value) => (value === null ? null : value - field.here)));
    // Clip the largest 2 % of the differences; otherwise they would use the whole colour scale.
    const sizes = gains.flat().filter((gain) => gain !== null).map(Math.abs).sort((a, b) => a - b);
    field.most = Math.max(sizes[Math.floor(0.98 * (sizes.length - 1))], 1e-3);
    [field.low, field.high] = [Math.min(...numbers), Math.max(...numbers)];
    const best = field.values.flat().indexOf(field.high);
    // The field spans from the centre of the first pixel to that of the last.
    field.best = [Math.floor(best / field.side), best % field.side].map((at, i) =>
      Math.fround((0.5 + (at / (field.side - 1)) * (panel.info.size[i] - 1)) / panel.info.size[i]));
    shown = { canvas: difference(gains, field.most), alpha: 1, inset: 0.5, best: field.done ? field.best : null };
  } else if (panel.checked("saliency") && panel.saliency) {
    shown = { canvas: heat(panel.saliency), alpha: 0.62, inset: 0 };
  }
  panel.stage.show({ overlay: shown, dim: panel.checked("dim") });
}

export async function showSaliency(panel) {
  if (panel.checked("saliency") && !panel.saliency) {
    const answer = await link.ask(`saliency${panel.number}`, { kind: "saliency", picture: app.picture, model: panel.model });
    if (!answer.error) panel.saliency = answer.values;
  }
  overlay(panel);
}

/** Remove the field of a panel, and stop computing it. */
export function dropField(panel) {
  if (!panel.field) return;
  panel.field = null;
  link.stop("field");
  overlay(panel);
  whyShown();
}

export function why() {
  const panel = app.active;
  const token = panel.stage.selected;
  if (token === null) return note("Select a token first: click it, or press full stop.");
  const label = labelOf(panel) ?? panel.prediction.top[0].index;
  stopWork();
  panel.field = { token, name: panel.info.classes[label], values: null, part: 0, done: false };
  link.start("field", { kind: "field", ...viewOf(panel), token, label }, (answer) => {
    if (answer.error || !panel.field) return;
    Object.assign(panel.field, answer);
    overlay(panel);
    whyShown();
  });
  whyShown();
}

export function whyShown() {
  const { field, stage } = app.active ?? {};
  const running = Boolean(field) && !field.done;
  $("why").disabled = !stage || stage.selected === null || running;
  $("why-stop").hidden = !running;
  $("legend").hidden = !field?.values;
  $("why-best").hidden = !field?.done;
  if (!field) {
    const token = stage?.selected ?? null;
    $("why-text").textContent = token === null ? "Select a token to compare its position with others." : `Show the label's probability with token ${token + 1} at other positions.`;
    return;
  }
  const progress = field.done ? "Green: the best position." : `${Math.round(100 * field.part)} % done.`;
  $("why-text").textContent = `With token ${field.token + 1} there, ${field.name} is more (orange) or less (blue) probable. ${progress}`;
  if (!field.values) return;
  $("legend").querySelector("i").style.background = differenceGradient(field.low - field.here, field.high - field.here, field.most);
  $("legend-low").textContent = percent(Math.exp(field.low));
  $("legend-high").textContent = percent(Math.exp(field.high));
}

export function moveToBest() {
  const panel = app.active;
  const { token, best } = panel.field;
  remember();
  panel.stage.selected = token;
  setPositions(panel, panel.positions.with(token, [...best, ...panel.positions[token].slice(2)]));
  whyShown();
}
