// The content of a panel: its model, its picture, and the prediction for its positions.

import { $, app, labelOf, link, note, sample, speak, viewOf } from "./app.js";
import { httpRequest } from "./link.js";
import { searchShown, stopWork } from "./search.js";
import { remember, writeAddress } from "./views.js";
import { dropField, overlay, showSaliency, whyShown } from "./why.js";

export async function useModel(panel, model) {
  panel.model = model;
  panel.offer(app.about.models);
  const info = await link.ask(`model${panel.number}`, { kind: "model", model });
  if (info.error) return false;
  Object.assign(panel, { info, field: null, saliency: null, price: null });
  panel.stage.show({ size: info.size, window: info.window, sizes: info.sizes, trajectory: null });
  if (panel === app.active) modelShown(panel);
  return showPicture(panel);
}

export async function showPicture(panel) {
  const kind = panel.checked("pixels") ? "pixels" : "sharp";
  const response = await httpRequest(`/picture/${app.picture}?${new URLSearchParams({ model: panel.model, kind })}`, note);
  if (!response) return false;
  const image = await createImageBitmap(await response.blob());
  Object.assign(panel, { saliency: null, picture: app.picture });
  panel.stage.show({ image });
  const { name, label } = sample();
  panel.find(".picture-name").textContent = label ? `${label} (${name})` : name;
  const [own] = $("target").options;
  own.text = label ? `the picture's own: ${label}` : "the picture's own: not known";
  own.disabled = !label;
  if (!label && $("target").value === "own") $("target").value = "dense";
  for (const button of $("strip").children) button.setAttribute("aria-pressed", button.dataset.picture === app.picture);
  if (panel.checked("saliency")) showSaliency(panel);
  return true;
}

/** Request everything that depends on the panel's positions. */
export function refresh(panel) {
  if (!panel.info || !panel.positions.length) return;
  link.latest(`predict${panel.number}`, { kind: "predict", ...viewOf(panel), token: panel.stage.selected }, (answer) => {
    if (answer.error) return;
    panel.prediction = answer;
    panel.predict(answer, labelOf(panel));
    panel.loupe(answer.samples);
    speak(panel);
  });
  panel.describe();
  clearTimeout(panel.pricing);
  if (panel.price?.tokens !== panel.positions.length || panel.price?.model !== panel.model) panel.pricing = setTimeout(() => price(panel), 300);
}

function price(panel) {
  const { model } = panel;
  link.latest(`cost${panel.number}`, { kind: "cost", ...viewOf(panel) }, (answer) => {
    if (!answer.error) panel.cost({ ...answer, model });
  });
}

/** Clear the results of the old positions after a change. */
export function changed(panel) {
  dropField(panel);
  overlay(panel);
  refresh(panel);
  writeAddress();
  if (panel === app.active) countShown(panel);
}

export function setPositions(panel, positions, { trajectory = null, keepSearch = false } = {}) {
  const searched = panel.searched !== null;
  if (!keepSearch) panel.searched = null;
  panel.stage.show({ positions, trajectory });
  changed(panel);
  if (searched) searchShown();
}

export const hooks = {
  changed(panel, positions, selected, how) {
    remember(["drag", "key", "size"].includes(how) ? `${how}${panel.number}.${selected}` : null);
    if (app.searching) stopWork();
    panel.stage.selected = selected;
    setPositions(panel, positions);
    whyShown();
  },
  selected(panel, index) {
    if (panel.field?.token !== index) dropField(panel);
    if (!panel.info) return;
    refresh(panel);
    if (index === null) panel.loupe(null);
    whyShown();
    writeAddress();
  },
  ended() {
    app.gesture = null;
  },
  activated: activate,
  async modelChosen(panel, model) {
    remember();
    stopWork();
    if (await useModel(panel, model)) setPositions(panel, panel.positions);
  },
  toggled(panel, name) {
    if (name === "pixels") showPicture(panel);
    else if (name === "saliency") showSaliency(panel);
    else overlay(panel);
  },
};

export function activate(panel) {
  if (app.active === panel) return;
  app.active = panel;
  for (const each of app.panels) each.element.classList.toggle("active", each === panel);
  if (panel.info) modelShown(panel);
}

/** Show the number of tokens in its input field, unless the field has the focus. */
function countShown(panel) {
  if (document.activeElement !== $("tokens")) $("tokens").value = panel.positions.length;
}

export function modelShown(panel) {
  $("classes").replaceChildren(...[...new Set(panel.info.classes)].map((name) => new Option(name)));
  for (const element of document.querySelectorAll(".scaled")) element.hidden = !panel.info.sizes;
  $("scale").placeholder = `${panel.info.scale}`;
  if (panel.positions.length) countShown(panel);
  searchShown();
  whyShown();
}
