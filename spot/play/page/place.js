// Placements and pictures from priors, files and the clipboard.

import { $, app, labelOf, link, note } from "./app.js";
import { httpRequest } from "./link.js";
import { searchShown, stopWork } from "./search.js";
import { changed, setPositions, showPicture } from "./show.js";
import { remember } from "./views.js";

async function usePicture(picture) {
  if (picture === app.picture) return;
  remember();
  stopWork();
  app.picture = picture;
  for (const panel of app.panels) {
    Object.assign(panel, { searched: null, field: null });
    panel.stage.trajectory = null;
    await showPicture(panel);
    changed(panel);
  }
  searchShown();
}

export function thumbnail({ id, name, label }) {
  const button = document.createElement("button");
  button.type = "button";
  button.dataset.picture = id;
  button.title = label ? `${label} (${name})` : name;
  button.setAttribute("aria-label", `Sample: ${button.title}`);
  button.setAttribute("aria-pressed", id === app.picture);
  const image = document.createElement("img");
  Object.assign(image, { src: `/thumbnail/${id}`, alt: "", loading: "lazy" });
  button.append(image);
  button.addEventListener("click", () => usePicture(id));
  return button;
}

export async function upload(file) {
  const response = await httpRequest("/picture", note, { body: file, headers: { "x-name": encodeURIComponent(file.name || "pasted.png") } });
  if (!response) return;
  const { picture, name } = await response.json();
  if (!app.about.samples.some(({ id }) => id === picture)) {
    app.about.samples.unshift({ id: picture, name, label: null });
    $("strip").prepend(thumbnail(app.about.samples[0]));
  }
  await usePicture(picture);
}

export async function place({ remembered = true } = {}) {
  const panel = app.active;
  const [tokens, seed] = [Number($("tokens").value), Number($("seed").value)];
  const request = { kind: "place", picture: app.picture, model: panel.model, prior: $("prior").value, tokens, seed };
  const scale = $("scale").value.trim();
  if (panel.info.sizes && scale) request.scale = scale === "auto" ? scale : Number(scale);
  const answer = await link.ask(`place${panel.number}`, request);
  if (answer.error) {
    $("tokens").value = panel.positions.length || 25;
    return;
  }
  if (remembered) remember();
  stopWork();
  setPositions(panel, answer.positions);
}

export function snap() {
  const { info, positions } = app.active;
  remember();
  setPositions(app.active, positions.map(([y, x, ...scale]) => [
    ...[y, x].map((value, i) => Math.fround((Math.min(Math.max(Math.floor(value * info.grid[i]), 0), info.grid[i] - 1) + 0.5) / info.grid[i])),
    ...scale,
  ]));
}

/** Use positions from JSON text. Returns an error message, or null. */
export async function usePasted(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    const constant = text.match(/\b(NaN|-?Infinity)\b/)?.[0];
    return constant ? `Positions must be finite numbers, but ${constant} is among them.` : `This is not JSON: ${error.message}`;
  }
  const positions = Array.isArray(value) ? value : value?.positions;
  if (!Array.isArray(positions)) return "A list of [y, x] is needed, or an object with such a list as “positions”.";
  if (positions.length > app.about.limit) return `The page takes up to ${app.about.limit} tokens, got ${positions.length}.`;
  const panel = app.active;
  const answer = await link.ask("paste", { kind: "predict", picture: app.picture, model: panel.model, positions });
  if (answer.error) return answer.error;
  remember();
  setPositions(panel, positions.map((each) => each.map(Math.fround)));
  return null;
}

function download(blob, name) {
  const anchor = document.createElement("a");
  anchor.href = URL.createObjectURL(blob);
  anchor.download = name;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 1000);
}

/** Save what the server makes of this view: a picture or a placements file. */
export async function saveFrom(path, name) {
  const panel = app.active;
  const trajectory = panel.searched?.trajectory.length ? panel.searched.trajectory : [panel.positions];
  const about = { picture: app.picture, model: panel.model, trajectory, label: panel.searched?.label ?? labelOf(panel), objective: panel.searched?.adversarial ? "ascent" : "descent" };
  const response = await httpRequest(path, note, { body: JSON.stringify(about) });
  if (response) download(await response.blob(), name);
}

export async function loadPlacements(file) {
  const response = await httpRequest(`/placements/${app.picture}`, note, { body: file });
  if (!response) return;
  const { trajectory } = await response.json();
  remember();
  setPositions(app.active, trajectory.at(-1), { trajectory: trajectory.length > 1 ? trajectory : null });
}

export function openJson(text) {
  $("json-text").value = text;
  $("json-trouble").textContent = "";
  $("json").showModal();
  $("json-text").select();
}
