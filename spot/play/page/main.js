// The playground: what the page does when something is asked of it. Drawing is in stage.js and panel.js.

import * as address from "./address.js";
import { difference, differenceGradient, heat } from "./colors.js";
import { curve } from "./curve.js";
import { Link, post } from "./link.js";
import { Panel, count, percent } from "./panel.js";

const STEP_TIME = matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : 90; // ms that a step of a search is shown
const OBJECTIVES = {
  descent: "make it more probable",
  obfuscate: "make a wrong label probable",
  agree: "agree with the dense ViT",
  entropy: "be surer of anything",
};

const $ = (id) => document.getElementById(id);
const app = { about: null, picture: null, panels: [], active: null, past: [], future: [], steps: [], gesture: null };

// ---- telling

function note(text) {
  if ([...$("notes").children].some((line) => line.textContent === text)) return;
  const line = document.createElement("p");
  line.textContent = text;
  line.addEventListener("click", () => line.remove());
  $("notes").append(line);
  setTimeout(() => line.remove(), 9000);
}

let speaking = 0;
function speak(panel) {
  clearTimeout(speaking);
  speaking = setTimeout(() => {
    const [first] = panel.prediction?.top ?? [];
    if (first) $("spoken").textContent = `${first.name}, ${percent(first.p)}`;
  }, 700);
}

// ---- the connection

const link = new Link({
  failed: note,
  closed() {
    $("offline").hidden = app.about === null;
    searching(false);
    $("why-stop").hidden = true;
  },
  async opened(about) {
    $("offline").hidden = true;
    const first = app.about === null;
    app.about = about;
    if (first) await begin();
    else app.panels.forEach(refresh);
  },
});

async function begin() {
  const { about } = app;
  $("prior").replaceChildren(...about.priors.map(({ name, map }) => new Option(map ? `${name} (by ${about.saliency} saliency)` : name, name)));
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

/** A fresh view: the first model on a picture, with a few of its own tokens. */
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

// ---- views: what can be undone, bookmarked and restored

const snapshot = () => ({
  picture: app.picture,
  panels: app.panels.map(({ model, positions, searched }) => ({ model, positions, searched })),
});

const settings = () => ({
  selected: app.active.stage.selected,
  prior: $("prior").value,
  seed: $("seed").value,
  target: $("target").value,
  class: $("class").value,
  objective: $("objective").value,
  preset: $("preset").value,
  steps: $("steps").value,
});

/** Show a view; false if its picture or a model cannot be had. */
async function restore({ picture, panels, selected, ...fields }) {
  stopWork();
  app.picture = picture;
  for (const [name, value] of Object.entries(fields)) if ($(name)) $(name).value = value;
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
    panel.stage.show({ trajectory: searched?.trajectory ?? null, away: searched?.away ?? false });
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

/** One panel beside the controls, or two. "Why here?" and the samples stand where there is room. */
function arrange() {
  const two = app.panels.length > 1;
  const [alone] = two ? [] : app.panels;
  $("panels").classList.toggle("two", two);
  $("compare").setAttribute("aria-pressed", two);
  (alone?.find(".side") ?? document.querySelector("aside")).append($("why-section"));
  (alone?.element ?? document.querySelector(".pictures")).append($("strip"));
}

/** Keep the view as it is before a change. Small changes of one gesture are one entry. */
function remember(gesture = null) {
  const same = gesture !== null && app.gesture?.name === gesture && performance.now() - app.gesture.time < 1200;
  app.gesture = { name: gesture, time: performance.now() };
  if (same) return;
  app.past.push(snapshot());
  app.past = app.past.slice(-200);
  app.future = [];
  showHistory();
}

async function travel(from, to) {
  if (!from.length) return;
  to.push(snapshot());
  app.gesture = null;
  await restore(from.pop());
  showHistory();
}

function showHistory() {
  $("undo").disabled = !app.past.length;
  $("redo").disabled = !app.future.length;
}

let writing = 0;
function writeAddress() {
  clearTimeout(writing);
  writing = setTimeout(() => {
    if (!app.panels.every((panel) => panel.positions.length)) return;
    app.address = address.fragment({ ...snapshot(), ...settings() });
    history.replaceState(null, "", app.address);
  }, 200);
}

// ---- models and pictures

async function useModel(panel, model) {
  panel.model = model;
  panel.offer(app.about.models);
  const info = await link.ask(`model${panel.number}`, { kind: "model", model });
  if (info.error) return false;
  Object.assign(panel, { info, field: null, saliency: null, price: null });
  panel.stage.show({ size: info.size, window: info.window, sizes: info.sizes, trajectory: null });
  if (panel === app.active) modelShown(panel);
  return showPicture(panel);
}

async function showPicture(panel) {
  const kind = panel.checked("pixels") ? "pixels" : "sharp";
  const response = await fetch(`/picture/${app.picture}?${new URLSearchParams({ model: panel.model, kind })}`).catch(() => null);
  if (!response?.ok) {
    note(response ? (await response.json()).error : "The server does not answer.");
    return false;
  }
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

function thumbnail({ id, name, label }) {
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

async function upload(file) {
  const response = await post("/picture", file, note, { "x-name": encodeURIComponent(file.name || "pasted.png") });
  if (!response) return;
  const { picture, name } = await response.json();
  if (!app.about.samples.some(({ id }) => id === picture)) {
    app.about.samples.unshift({ id: picture, name, label: null });
    $("strip").prepend(thumbnail(app.about.samples[0]));
  }
  await usePicture(picture);
}

// ---- predictions

/** What is known of the picture. */
const sample = () => app.about.samples.find(({ id }) => id === app.picture) ?? { name: "", label: null };

/** The class that search, field and curve are about, or null. */
function labelOf(panel) {
  const kind = $("target").value;
  const named = (name) => panel.info.classes.findIndex((each) => each.toLowerCase() === name.trim().toLowerCase());
  const own = kind === "own" ? named(sample().label ?? "") : -1;
  if (own >= 0) return own;
  if (kind === "own" || kind === "dense") return panel.prediction?.dense?.[0].index ?? null;
  if (kind === "none") return null;
  const index = named($("class").value);
  return index < 0 ? null : index;
}

/** Ask again for what depends on the panel's positions. */
function refresh(panel) {
  if (!panel.info || !panel.positions.length) return;
  const request = { picture: app.picture, model: panel.model, positions: panel.positions };
  link.latest(`predict${panel.number}`, { kind: "predict", ...request, token: panel.stage.selected }, (answer) => {
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
  const request = { kind: "cost", picture: app.picture, model: panel.model, positions: panel.positions };
  link.latest(`cost${panel.number}`, request, (answer) => {
    if (!answer.error) panel.cost({ ...answer, model: request.model });
  });
}

/** Positions are new: forget what was said of the old ones. */
function changed(panel, { keepField = false } = {}) {
  if (panel.field && !keepField) {
    panel.field = null;
    link.stop("field");
    whyShown();
  }
  overlay(panel);
  refresh(panel);
  writeAddress();
  if (panel === app.active) $("tokens").value = panel.positions.length;
}

function setPositions(panel, positions, { trajectory = null, keepSearch = false } = {}) {
  if (!keepSearch) panel.searched = null;
  panel.stage.show({ positions, trajectory });
  changed(panel);
  searchShown();
}

const hooks = {
  changed(panel, positions, selected, how) {
    remember(["drag", "key", "size"].includes(how) ? `${how}${panel.number}.${selected}` : null);
    if (app.searching) stopWork();
    panel.stage.selected = selected;
    setPositions(panel, positions);
    whyShown();
  },
  selected(panel, index) {
    if (panel.field && panel.field.token !== index) {
      panel.field = null;
      link.stop("field");
      overlay(panel);
    }
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

function activate(panel) {
  if (app.active === panel) return;
  app.active = panel;
  for (const each of app.panels) each.element.classList.toggle("active", each === panel);
  if (panel.info) modelShown(panel);
}

function modelShown(panel) {
  $("classes").replaceChildren(...[...new Set(panel.info.classes)].map((name) => new Option(name)));
  for (const element of document.querySelectorAll(".scaled")) element.hidden = !panel.info.sizes;
  if (panel.positions.length) $("tokens").value = panel.positions.length;
  searchShown();
  whyShown();
}

// ---- placement

async function place({ remembered = true } = {}) {
  const panel = app.active;
  const [tokens, seed] = [Number($("tokens").value), Number($("seed").value)];
  const request = { kind: "place", picture: app.picture, model: panel.model, prior: $("prior").value, tokens, seed };
  if (panel.info.sizes) request.scale = Number($("scale").value);
  const answer = await link.ask(`place${panel.number}`, request);
  if (answer.error) {
    $("tokens").value = panel.positions.length || 25;
    return;
  }
  if (remembered) remember();
  stopWork();
  setPositions(panel, answer.positions);
}

function snap() {
  const { info, positions } = app.active;
  remember();
  setPositions(app.active, positions.map(([y, x, ...scale]) => [
    ...[y, x].map((value, i) => Math.fround((Math.min(Math.max(Math.floor(value * info.grid[i]), 0), info.grid[i] - 1) + 0.5) / info.grid[i])),
    ...scale,
  ]));
}

/** Use positions from JSON text; returns what is wrong with them, or null. */
async function usePasted(text) {
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

async function keep(path, name) {
  const panel = app.active;
  const trajectory = panel.searched?.trajectory.length ? panel.searched.trajectory : [panel.positions];
  const about = { picture: app.picture, model: panel.model, trajectory, label: panel.searched?.label ?? labelOf(panel), objective: panel.searched?.away ? "ascent" : "descent" };
  const response = await post(path, JSON.stringify(about), note);
  if (response) download(await response.blob(), name);
}

async function loadPlacements(file) {
  const response = await post(`/placements/${app.picture}`, file, note);
  if (!response) return;
  const { trajectory } = await response.json();
  remember();
  setPositions(app.active, trajectory.at(-1), { trajectory: trajectory.length > 1 ? trajectory : null });
}

// ---- search

function searching(running) {
  app.searching = running;
  $("stop").hidden = !running;
  for (const name of ["search", "ascend"]) $(name).disabled = running;
  if (app.active?.info) searchShown();
}

function stopWork() {
  for (const slot of ["search", "control", "field"]) link.stop(slot);
  app.steps = [];
  searching(false);
  if (app.panels.some((panel) => panel.field)) {
    for (const panel of app.panels) {
      panel.field = null;
      overlay(panel);
    }
  }
  whyShown();
}

function search(objective) {
  const panel = app.active;
  const label = labelOf(panel);
  if (label === null && app.about.labelled.includes(objective)) {
    return note($("target").value === "class" ? "This class is not one of the model's; pick one from the list." : `To ${objective === "ascent" ? "ascend" : "search by " + objective}, pick a label; agree and entropy need none.`);
  }
  remember();
  stopWork();
  const away = objective === "ascent";
  panel.searched = { trajectory: [], values: [], others: [], away, label, name: "", steps: 1 };
  const request = { kind: "search", picture: app.picture, model: panel.model, positions: panel.positions, label, objective, preset: $("preset").value, seed: Number($("seed").value) };
  if ($("steps").value) request.steps = Number($("steps").value);
  searching(true);
  link.start("search", request, (answer) => {
    if (answer.error) return searching(false);
    app.steps.push(answer);
    if (!app.showing) showStep(panel);
  });
}

/** Show the steps that have arrived, one after another, slowly enough to be seen. */
function showStep(panel) {
  const answer = app.steps.shift();
  app.showing = Boolean(answer);
  if (!answer || !panel.searched) return;
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
  panel.stage.show({ positions: searched.trajectory.at(-1), trajectory: [...searched.trajectory], away: searched.away });
  panel.predict({ ...panel.prediction, top: answer.top }, answer.class);
  searchShown();
  setTimeout(() => showStep(panel), STEP_TIME);
}

function searchShown() {
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
    $("search-text").textContent = "Moves the tokens a few steps to where the label becomes more probable.";
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

function goToStep(step) {
  const panel = app.active;
  panel.searched.now = step;
  setPositions(panel, panel.searched.trajectory[step], { trajectory: panel.searched.trajectory, keepSearch: true });
}

async function control() {
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

function targetShown() {
  for (const element of document.querySelectorAll(".named")) element.hidden = $("target").value !== "class";
  const free = $("target").value === "none";
  for (const option of $("objective").options) option.disabled = free && app.about.labelled.includes(option.value);
  if ($("objective").selectedOptions[0]?.disabled) $("objective").value = "agree";
  $("ascend").disabled = free || app.searching;
  app.panels.forEach((panel) => panel.prediction && panel.predict(panel.prediction, labelOf(panel)));
}

// ---- fields over the picture

function overlay(panel) {
  const { field } = panel;
  let shown = null;
  if (field?.values) {
    const numbers = field.values.flat().filter((value) => value !== null);
    const gains = field.values.map((row) => row.map((value) => (value === null ? null : value - field.here)));
    // The strongest hundredth of the differences would leave no colour for the others.
    const sizes = gains.flat().filter((gain) => gain !== null).map(Math.abs).sort((a, b) => a - b);
    field.most = Math.max(sizes[Math.floor(0.98 * (sizes.length - 1))], 1e-3);
    [field.low, field.high] = [Math.min(...numbers), Math.max(...numbers)];
    const best = field.values.flat().indexOf(field.high);
    field.best = panel.stage.inside([Math.floor(best / field.side) / (field.side - 1), (best % field.side) / (field.side - 1)]);
    shown = { canvas: difference(gains, field.most), alpha: 1, inset: 0.5, best: field.done ? field.best : null };
  } else if (panel.checked("saliency") && panel.saliency) {
    shown = { canvas: heat(panel.saliency), alpha: 0.62, inset: 0 };
  }
  panel.stage.show({ overlay: shown, dim: panel.checked("dim") });
}

async function showSaliency(panel) {
  if (panel.checked("saliency") && !panel.saliency) {
    const answer = await link.ask(`saliency${panel.number}`, { kind: "saliency", picture: app.picture, model: panel.model });
    if (!answer.error) panel.saliency = answer.values;
  }
  overlay(panel);
}

function why() {
  const panel = app.active;
  const token = panel.stage.selected;
  if (token === null) return note("Select a token first: click it, or press full stop.");
  const label = labelOf(panel) ?? panel.prediction.top[0].index;
  stopWork();
  panel.field = { token, name: panel.info.classes[label], values: null, part: 0, done: false };
  const request = { kind: "field", picture: app.picture, model: panel.model, positions: panel.positions, token, label };
  link.start("field", request, (answer) => {
    if (answer.error || !panel.field) return;
    Object.assign(panel.field, answer);
    overlay(panel);
    whyShown();
  });
  whyShown();
}

function whyShown() {
  const { field, stage } = app.active ?? {};
  const running = Boolean(field) && !field.done;
  $("why").disabled = !stage || stage.selected === null || running;
  $("why-stop").hidden = !running;
  $("legend").hidden = !field?.values;
  $("why-best").hidden = !field?.done;
  if (!field) {
    $("why-text").textContent = stage?.selected === null ? "Select a token: how probable would the label be if it stood elsewhere?" : `How probable would the label be if token ${(stage?.selected ?? 0) + 1} stood elsewhere?`;
    return;
  }
  const progress = field.done ? "Green: the best place." : `${Math.round(100 * field.part)} % done.`;
  $("why-text").textContent = `If token ${field.token + 1} stood there, ${field.name} would be more (orange) or less (blue) probable. ${progress}`;
  if (!field.values) return;
  $("legend").querySelector("i").style.background = differenceGradient(field.low - field.here, field.high - field.here, field.most);
  $("legend-low").textContent = percent(Math.exp(field.low));
  $("legend-high").textContent = percent(Math.exp(field.high));
}

function moveToBest() {
  const panel = app.active;
  const { token, best } = panel.field;
  remember();
  panel.stage.selected = token;
  setPositions(panel, panel.positions.with(token, [...best, ...panel.positions[token].slice(2)]));
  whyShown();
}

async function compare() {
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

// ---- controls

const actions = {
  open: () => $("file").click(),
  undo: () => travel(app.past, app.future),
  redo: () => travel(app.future, app.past),
  compare,
  "save-picture": () => keep("/drawn", "spot-search.png"),
  theme() {
    const dark = document.documentElement.dataset.theme === "dark";
    localStorage.setItem("spot-theme", dark ? "light" : "dark");
    theme();
  },
  help: () => $("keys").showModal(),
  place: () => place(),
  snap,
  clear() {
    remember();
    app.active.stage.selected = 0;
    setPositions(app.active, [[0.5, 0.5]]);
  },
  async copy() {
    const text = JSON.stringify({ model: app.active.model, positions: app.active.positions });
    try {
      await navigator.clipboard.writeText(text);
      note(`Copied ${count(app.active.positions.length, "position")}.`);
    } catch {
      openJson(text);
    }
  },
  paste: () => openJson(""),
  "save-file": () => keep("/placements", "placements.safetensors"),
  "load-file": () => $("placements").click(),
  search: () => search($("objective").value),
  ascend: () => search("ascent"),
  control,
  stop: stopWork,
  why,
  "why-best": moveToBest,
  "why-stop": stopWork,
  async "json-use"() {
    $("json-trouble").textContent = (await usePasted($("json-text").value)) ?? "";
    if (!$("json-trouble").textContent) $("json").close();
  },
};

function openJson(text) {
  $("json-text").value = text;
  $("json-trouble").textContent = "";
  $("json").showModal();
  $("json-text").select();
}

function theme() {
  const wanted = localStorage.getItem("spot-theme");
  document.documentElement.dataset.theme = wanted ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

for (const [name, action] of Object.entries(actions)) $(name).addEventListener("click", () => (app.active || name === "help" || name === "theme") && action());
for (const name of ["prior", "tokens", "seed", "scale"]) $(name).addEventListener("change", () => app.active && place());
for (const name of ["target", "class"]) $(name).addEventListener("change", () => app.active && (targetShown(), writeAddress()));
for (const name of ["objective", "preset", "steps"]) $(name).addEventListener("change", () => app.active && (searchShown(), writeAddress()));
$("step").addEventListener("input", (event) => goToStep(Number(event.target.value)));

for (const [name, use] of [["file", upload], ["placements", loadPlacements]]) {
  $(name).addEventListener("change", async (event) => {
    const [file] = event.target.files;
    event.target.value = "";
    if (file) await use(file);
  });
}

const useFile = (file) => (file.name.endsWith(".safetensors") ? loadPlacements(file) : upload(file));
addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("dropping");
});
addEventListener("dragleave", (event) => event.relatedTarget || document.body.classList.remove("dropping"));
addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  const [file] = event.dataTransfer.files;
  if (file && app.active) useFile(file);
});
addEventListener("paste", async (event) => {
  if (event.target.matches?.("input, textarea") || !app.active) return;
  const [file] = event.clipboardData.files;
  const text = event.clipboardData.getData("text");
  if (file) useFile(file);
  else if (text.trim()) {
    const trouble = await usePasted(text);
    if (trouble) note(trouble);
  }
});
addEventListener("keydown", (event) => {
  if (event.target.matches?.("input, textarea, select") || document.querySelector("dialog[open]") || !app.active) return;
  const key = event.key.toLowerCase();
  const control = event.ctrlKey || event.metaKey;
  if (control && key === "z") (event.shiftKey ? actions.redo : actions.undo)();
  else if (control && key === "y") actions.redo();
  else if (control || event.altKey) return;
  else if (key === "s" && !app.searching) actions.search();
  else if (key === "w") why();
  else if (key === "escape") stopWork();
  else return;
  event.preventDefault();
});
addEventListener("hashchange", () => {
  if (location.hash === app.address) return;
  const wanted = address.view(location.hash);
  if (wanted && wanted.panels.every(({ model }) => app.about?.models.includes(model))) {
    remember();
    restore(wanted);
  }
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme);
theme();
showHistory();
