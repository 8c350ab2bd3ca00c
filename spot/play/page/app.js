// Shared by all parts of the page: the state, the connection and messages to the user.

import { Link } from "./link.js";
import { percent } from "./panel.js";

export const $ = (id) => document.getElementById(id);
export const link = new Link();
export const app = { about: null, picture: null, panels: [], active: null, past: [], future: [], steps: [], gesture: null };

export function note(text) {
  if ([...$("notes").children].some((line) => line.textContent === text)) return;
  const line = document.createElement("p");
  line.textContent = text;
  line.addEventListener("click", () => line.remove());
  $("notes").append(line);
  setTimeout(() => line.remove(), 9000);
}

let speaking = 0;
export function speak(panel) {
  clearTimeout(speaking);
  speaking = setTimeout(() => {
    const [first] = panel.prediction?.top ?? [];
    if (first) $("spoken").textContent = `${first.name}, ${percent(first.p)}`;
  }, 700);
}

/** What a panel shows, as fields of a request. */
export const viewOf = (panel) => ({ picture: app.picture, model: panel.model, positions: panel.positions });

/** The sample of the current picture. */
export const sample = () => app.about.samples.find(({ id }) => id === app.picture) ?? { name: "", label: null };

/** The class of search, field and curve, or null. */
export function labelOf(panel) {
  const kind = $("target").value;
  const named = (name) => panel.info.classes.findIndex((each) => each.toLowerCase() === name.trim().toLowerCase());
  const own = kind === "own" ? named(sample().label ?? "") : -1;
  if (own >= 0) return own;
  if (kind === "own" || kind === "dense") return panel.prediction?.dense?.[0].index ?? null;
  if (kind === "none") return null;
  const index = named($("class").value);
  return index < 0 ? null : index;
}
