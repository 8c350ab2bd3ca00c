// One model on the picture: stage, prediction, cost and loupe. Display only, without control logic.

import { Stage } from "./stage.js";

export function percent(p) {
  if (p < 0.00005) return "<0.01\u00a0%";
  return p > 0.9995 ? ">99.9\u00a0%" : `${(100 * p).toFixed(p < 0.0995 ? 2 : 1)}\u00a0%`;
}
const giga = (macs) => (macs >= 1e8 ? `${(macs / 1e9).toFixed(2)} G` : `${(macs / 1e6).toFixed(1)} M`);

export class Panel {
  constructor(number, hooks) {
    const part = document.getElementById("panel").content.cloneNode(true);
    this.element = part.querySelector(".panel");
    this.find = (name) => this.element.querySelector(name);
    this.number = number;
    this.find(".letter").textContent = "AB"[number];
    this.element.setAttribute("aria-label", `Panel ${"AB"[number]}`);
    this.stage = new Stage(this.find(".stage"), {
      changed: (positions, selected, how) => hooks.changed(this, positions, selected, how),
      selected: (index) => hooks.selected(this, index),
      ended: () => hooks.ended(this),
    });
    this.element.addEventListener("pointerdown", () => hooks.activated(this), true);
    this.element.addEventListener("focusin", () => hooks.activated(this));
    this.find(".model").addEventListener("change", (event) => hooks.modelChosen(this, event.target.value));
    for (const name of ["dim", "saliency", "pixels"])
      this.find(`.${name}`).addEventListener("change", () => hooks.toggled(this, name));
    // The displayed state. The stage holds the positions.
    Object.assign(this, { model: null, info: null, prediction: null, searched: null, field: null, saliency: null, price: null });
  }

  get positions() {
    return this.stage.positions;
  }

  offer(models) {
    this.find(".model").replaceChildren(...models.map((name) => new Option(name, name, false, name === this.model)));
  }

  checked(name) {
    return this.find(`.${name}`).checked;
  }

  /** Show a prediction. `label` is the class index of the search. */
  predict(prediction, label) {
    this.prediction = prediction;
    this.find(".count").textContent = count(this.positions.length, "token");
    this.find(".all-count").textContent = `all ${this.info.grid[0] * this.info.grid[1]} patches`;
    const list = this.find(".top");
    prediction.top.forEach((row, i) => {
      const item = list.children[i] ?? list.appendChild(line());
      item.dataset.index = row.index;
      item.dataset.p = row.p;
      item.classList.toggle("label", row.index === label);
      item.querySelector(".name").textContent = row.name;
      item.querySelector(".name").title = row.name;
      item.querySelector(".p").textContent = percent(row.p);
      const [own, all] = item.querySelectorAll("b");
      own.style.width = `${100 * row.p}%`;
      all.style.width = `${100 * (row.dense ?? 0)}%`;
    });
    while (list.children.length > prediction.top.length) list.lastChild.remove();
    const [first, second] = prediction.dense ?? [];
    if (first) {
      this.find(".dense").textContent = `The dense ViT predicts ${first.name} ${percent(first.p)}${second ? `, ${second.name} ${percent(second.p)}` : ""}.`;
    }
  }

  cost(price) {
    this.price = price;
    const part = price.dense_macs ? ` (${Math.round((100 * price.macs) / price.dense_macs)} % of dense)` : "";
    this.find(".cost-tokens").textContent = price.tokens;
    this.find(".cost-macs").textContent = giga(price.macs) + part;
    this.find(".cost-ms").textContent = `${price.ms.toFixed(price.ms < 10 ? 1 : 0)} ms`;
  }

  /** Show the samples of the selected token. */
  loupe(samples) {
    const canvas = this.find(".loupe canvas");
    const pen = canvas.getContext("2d");
    const note = this.find(".loupe .note");
    const token = this.stage.selected;
    this.find(".token h2").textContent = token === null ? "Token" : `Token ${token + 1} of ${this.positions.length}`;
    pen.clearRect(0, 0, canvas.width, canvas.height);
    if (token === null || !samples) {
      note.textContent = "Select a token to see its samples.";
      return;
    }
    const bytes = atob(samples.rgb);
    const side = samples.side;
    const cell = canvas.width / side;
    for (let i = 0; i < side * side; i += 1) {
      pen.fillStyle = `rgb(${bytes.charCodeAt(3 * i)} ${bytes.charCodeAt(3 * i + 1)} ${bytes.charCodeAt(3 * i + 2)})`;
      pen.fillRect((i % side) * cell, Math.floor(i / side) * cell, Math.ceil(cell), Math.ceil(cell));
    }
    const [y, x, scale = 1] = this.positions[token];
    const [row, column] = [y * this.info.size[0], x * this.info.size[1]];
    const spacing = scale === 1 ? "one pixel apart" : `${scale.toFixed(2)} pixels apart`;
    const lines = [`row ${row.toFixed(2)}`, `column ${column.toFixed(2)}`, `${side} × ${side} samples`, spacing, this.alignment(row, column)];
    note.replaceChildren(...lines.flatMap((text) => [text, document.createElement("br")]));
  }

  /** Whether a token at pixels (row, column) is aligned to the grid, to whole pixels, or to neither. */
  alignment(row, column) {
    const side = this.info.window;
    const start = [row - side / 2, column - side / 2];
    const whole = start.every((value) => Math.abs(value - Math.round(value)) < 1e-3);
    if (!whole) return "between pixels";
    return start.every((value) => Math.abs(value / side - Math.round(value / side)) < 1e-4) ? "a patch of the grid" : "on whole pixels, off the grid";
  }

  describe() {
    const { selected } = this.stage;
    const where = selected === null ? "none selected" : `token ${selected + 1} at row ${(this.positions[selected][0] * this.info.size[0]).toFixed(1)}, column ${(this.positions[selected][1] * this.info.size[1]).toFixed(1)}`;
    this.stage.canvas.setAttribute("aria-label", `Picture with ${count(this.positions.length, "token")}, ${where}. Arrows move, comma and full stop select, A adds, Delete removes.`);
  }
}

export const count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;

function line() {
  const item = document.createElement("li");
  item.innerHTML = '<span class="name"></span><span class="p"></span><span class="bars" aria-hidden="true"><i><b></b></i><i><b></b></i></span>';
  return item;
}
