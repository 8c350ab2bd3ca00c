// The playground's event handlers: buttons, keys, files and drops.

import * as address from "./address.js";
import { $, app, link, note } from "./app.js";
import { count } from "./panel.js";
import { loadPlacements, openJson, place, saveFrom, snap, upload, usePasted } from "./place.js";
import { control, goToStep, search, searching, searchShown, stopWork, targetShown } from "./search.js";
import { refresh, setPositions } from "./show.js";
import { begin, compare, remember, restore, showHistory, travel, writeAddress } from "./views.js";
import { moveToBest, why } from "./why.js";

const actions = {
  open: () => $("file").click(),
  undo: () => travel(app.past, app.future),
  redo: () => travel(app.future, app.past),
  compare,
  "save-picture": () => saveFrom("/drawn", "spot-search.png"),
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
  "save-file": () => saveFrom("/placements", "placements.safetensors"),
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

for (const [name, action] of Object.entries(actions)) $(name).addEventListener("click", () => (app.active || name === "help") && action());
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
showHistory();
link.connect({
  failed: note,
  busy: (working) => document.querySelector("main").setAttribute("aria-busy", working),
  closed() {
    $("offline").hidden = app.about === null;
    searching(false);
    $("why-stop").hidden = true;
  },
  async opened(about) {
    $("offline").hidden = true;
    const first = app.about === null;
    app.about = { ...about, samples: app.about?.samples ?? about.samples }; // uploads stay in the strip
    if (first) await begin();
    else app.panels.forEach(refresh);
  },
});
