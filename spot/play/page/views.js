// Views of the page, for undo, bookmarks and restoring, with one or two panels.

import * as address from "./address.js";
import { $, app, link, note } from "./app.js";
import { curve } from "./curve.js";
import { Panel } from "./panel.js";
import { place, thumbnail } from "./place.js";
import { OBJECTIVES, searchShown, stopWork, targetShown } from "./search.js";
import { activate, changed, hooks, modelShown, setPositions, useModel } from "./show.js";

// The controls whose values are part of a view, by id.
const CONTROLS = ["prior", "seed", "scale", "target", "class", "objective", "preset", "steps"];

export async function begin() {
  const { about } = app;
  $("prior").replaceChildren(...about.priors.map(({ name, map }) => new Option(map ? `${name}, by ${about.saliency} saliency` : name, name)));
  $("objective").replaceChildren(...about.objectives.filter((name) => name in OBJECTIVES).map((name) => new Option(`${name}: ${OBJECTIVES[name]}`, name)));
  $("preset").replaceChildren(...Object.keys(about.presets).map((name) => new Option(name, name)));
  $("tokens").max = about.limit;
  $("strip").replaceChildren(...about.samples.map(thumbnail));
  curve($("curve"), { values: [], steps: 5 });
  const wanted = address.view(location.hash);
  const known = wanted?.panels.every(({ model }) => about.models.includes(model));
  if (wanted && !known) note("This link is for a model that the server was not started with.");
  if (!(known && (await restore(wanted)))) await start(about.samples[0].id);
}

/** A new view: the first model on a picture, with its default prior and at most 25 tokens. */
async function start(picture) {
  app.picture = picture;
  const panel = addPanel();
  if (!(await useModel(panel, app.about.models[0]))) return;
  $("prior").value = panel.info.prior;
  $("tokens").value = Math.min(25, panel.info.tokens);
  await place({ remembered: false });
}

function addPanel() {
  const panel = new Panel(app.panels.length, hooks);
  app.panels.push(panel);
  $("panels").append(panel.element);
  activate(panel);
  arrange();
  return panel;
}

const snapshot = () => ({
  picture: app.picture,
  panels: app.panels.map(({ model, positions, searched }) => ({ model, positions, searched })),
});

const settings = () => ({
  selected: app.active.stage.selected,
  ...Object.fromEntries(CONTROLS.map((id) => [id, $(id).value])),
});

/** Show a view. Returns false if its picture or a model is not available. */
export async function restore({ picture, panels, selected, ...fields }) {
  stopWork();
  app.picture = picture;
  for (const id of CONTROLS) if (id in fields) $(id).value = fields[id];
  while (app.panels.length > panels.length) dropPanel();
  for (const [i, { model, positions, searched = null }] of panels.entries()) {
    const panel = app.panels[i] ?? addPanel();
    const fresh = panel.model !== model || panel.picture !== picture;
    panel.stage.positions = positions;
    panel.searched = searched;
    if (fresh && !(await useModel(panel, model))) {
      const failed = app.panels.splice(0);
      arrange();
      failed.forEach((each) => each.element.remove());
      app.active = null;
      return false;
    }
    panel.stage.show({ trajectory: searched?.trajectory ?? null, adversarial: searched?.adversarial ?? false });
  }
  activate(app.panels[0]);
  if (selected !== undefined && Number(selected) < app.active.positions.length) app.active.stage.selected = Number(selected);
  app.panels.forEach((panel) => changed(panel));
  targetShown();
  searchShown();
  return true;
}

function dropPanel() {
  app.panels.pop().element.remove();
  activate(app.panels[0]);
  arrange();
}

/** Show one or two panels beside the controls. "Why here?" and the samples move to where there is room. */
function arrange() {
  const two = app.panels.length > 1;
  const [alone] = two ? [] : app.panels;
  $("panels").classList.toggle("two", two);
  $("compare").setAttribute("aria-pressed", two);
  (alone?.find(".side") ?? document.querySelector("aside")).append($("why-section"));
  (alone?.element ?? document.querySelector(".pictures")).append($("strip"));
}

/** Save the view for undo before a change. Changes of one gesture are one entry. */
export function remember(gesture = null) {
  const same = gesture !== null && app.gesture?.name === gesture && performance.now() - app.gesture.time < 1200;
  app.gesture = { name: gesture, time: performance.now() };
  if (same) return;
  app.past.push(snapshot());
  app.past = app.past.slice(-200);
  app.future = [];
  showHistory();
}

export async function travel(from, to) {
  if (!from.length) return;
  to.push(snapshot());
  app.gesture = null;
  await restore(from.pop());
  showHistory();
}

export function showHistory() {
  $("undo").disabled = !app.past.length;
  $("redo").disabled = !app.future.length;
}

let writing = 0;
export function writeAddress() {
  clearTimeout(writing);
  writing = setTimeout(() => {
    if (!app.panels.every((panel) => panel.positions.length)) return;
    app.address = address.fragment({ ...snapshot(), ...settings() });
    history.replaceState(null, "", app.address);
  }, 100);
}

export async function compare() {
  remember();
  stopWork();
  if (app.panels.length > 1) {
    dropPanel();
    modelShown(app.active);
  } else {
    const { model, positions } = app.panels[0];
    const panel = addPanel();
    if (await useModel(panel, model)) setPositions(panel, positions);
  }
  writeAddress();
}
