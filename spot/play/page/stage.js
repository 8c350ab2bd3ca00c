// The picture with its windows: drawing, mouse, touch and keys. Positions are [y, x] fractions, or [y, x, scale].

import { pathColor } from "./colors.js";

const FINE = 0.1; // pixels moved by an arrow key
const SLOP = 4; // screen pixels before a click becomes a drag
const SIZES = [0.5, 8];

export class Stage {
  /** hooks: changed(positions, how), selected(index), ended(). `how` is "drag", "add", "remove", "key" or "size". */
  constructor(canvas, hooks) {
    Object.assign(this, { canvas, hooks, positions: [], selected: null, image: null, size: [1, 1], window: 1 });
    Object.assign(this, { trajectory: null, adversarial: false, overlay: null, dim: true, sizes: false, grip: null });
    this.pictures = Object.fromEntries(["bright", "dark", "grey"].map((name) => [name, document.createElement("canvas")]));
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", () => this.up());
    canvas.addEventListener("pointercancel", () => this.up());
    canvas.addEventListener("dblclick", (event) => this.remove(this.at(this.place(event))));
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("focus", () => this.hooks.selected(this.selected));
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  show(fields) {
    Object.assign(this, fields);
    if (this.selected !== null && this.selected >= this.positions.length) this.selected = null;
    this.canvas.style.aspectRatio = `${this.size[1]} / ${this.size[0]}`;
    this.draw();
  }

  // ---- geometry

  /** The place of an event, as a fraction [y, x]. */
  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width];
  }

  /** The nearest token whose window contains a place, or null. The selected token takes precedence. */
  at([y, x]) {
    let best = null;
    let nearest = Infinity;
    this.positions.forEach(([v, u, scale = 1], i) => {
      const [dy, dx] = [Math.abs(y - v) * this.size[0], Math.abs(x - u) * this.size[1]];
      const reach = Math.max((this.window * scale) / 2, 6 * this.size[1] / this.canvas.clientWidth);
      const distance = i === this.selected ? 0 : Math.hypot(dy, dx);
      if (Math.max(dy, dx) <= reach && distance < nearest) [best, nearest] = [i, distance];
    });
    return best;
  }

  /** Clamp a place to the centres of the outermost pixels. */
  inside([y, x]) {
    const [h, w] = this.size.map((length) => 0.5 / length);
    return [Math.fround(Math.min(Math.max(y, h), 1 - h)), Math.fround(Math.min(Math.max(x, w), 1 - w))];
  }

  /** The handle of the selected token, as a fraction [y, x]. */
  handle() {
    if (!this.sizes || this.selected === null) return null;
    const [y, x, scale = 1] = this.positions[this.selected];
    const half = (this.window * scale) / 2;
    return [y + half / this.size[0], x + half / this.size[1]];
  }

  // ---- input

  down(event) {
    if (event.button) return;
    const place = this.place(event);
    const handle = this.handle();
    const near = (a, b) => Math.hypot((a[0] - b[0]) * this.canvas.clientHeight, (a[1] - b[1]) * this.canvas.clientWidth) < 10;
    if (handle && near(place, handle)) this.grip = { sizing: true, moved: true };
    else {
      const hit = event.shiftKey ? null : this.at(place);
      if (hit === null) return this.add(place);
      const [y, x] = this.positions[hit];
      this.grip = { offset: [y - place[0], x - place[1]], from: [event.clientX, event.clientY], moved: false };
      this.select(hit);
    }
    this.canvas.setPointerCapture(event.pointerId);
  }

  move(event) {
    const place = this.place(event);
    if (!this.grip) {
      this.canvas.classList.toggle("over", this.at(place) !== null);
      return;
    }
    if (this.grip.sizing) {
      const [y, x] = this.positions[this.selected];
      const half = Math.max(Math.abs(place[0] - y) * this.size[0], Math.abs(place[1] - x) * this.size[1]);
      return this.resize((2 * half) / this.window, "drag");
    }
    const { offset, from } = this.grip;
    if (!this.grip.moved && Math.hypot(event.clientX - from[0], event.clientY - from[1]) < SLOP) return;
    this.grip.moved = true;
    this.canvas.classList.add("dragging");
    this.put(this.selected, [place[0] + offset[0], place[1] + offset[1]], "drag");
  }

  up() {
    this.canvas.classList.remove("dragging");
    if (this.grip?.moved) this.hooks.ended();
    this.grip = null;
  }

  wheel(event) {
    if (!this.sizes) return;
    const hit = this.at(this.place(event));
    if (hit === null) return;
    event.preventDefault();
    this.select(hit);
    this.resize((this.positions[hit][2] ?? 1) * Math.exp(-event.deltaY / 600), "size");
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const step = event.shiftKey ? 1 : FINE;
    const arrows = { ArrowUp: [-step, 0], ArrowDown: [step, 0], ArrowLeft: [0, -step], ArrowRight: [0, step] };
    const last = this.positions.length - 1;
    if (event.key in arrows && this.selected !== null) {
      const [dy, dx] = arrows[event.key];
      const [y, x] = this.positions[this.selected];
      this.put(this.selected, [y + dy / this.size[0], x + dx / this.size[1]], "key");
    } else if (event.key === "Delete" || event.key === "Backspace") this.remove(this.selected);
    else if (event.key === "a" || event.key === "Insert") this.add([0.5, 0.5]);
    else if (event.key === ".") this.select(this.selected === null || this.selected === last ? 0 : this.selected + 1);
    else if (event.key === ",") this.select(this.selected ? this.selected - 1 : last);
    else if ((event.key === "+" || event.key === "-") && this.sizes && this.selected !== null)
      this.resize((this.positions[this.selected][2] ?? 1) * (event.key === "+" ? 1.05 : 1 / 1.05), "size");
    else {
      if (event.key === "Escape") this.select(null);
      return;
    }
    event.preventDefault();
  }

  select(index) {
    this.selected = index;
    this.draw();
    this.hooks.selected(index);
  }

  put(index, place, how) {
    const scale = this.positions[index].slice(2);
    this.change(this.positions.with(index, [...this.inside(place), ...scale]), index, how);
  }

  resize(scale, how) {
    const [y, x] = this.positions[this.selected];
    const kept = Math.fround(Math.min(Math.max(scale, SIZES[0]), SIZES[1]));
    this.change(this.positions.with(this.selected, [y, x, kept]), this.selected, how);
  }

  add(place) {
    const scale = this.positions.at(-1)?.slice(2) ?? [];
    this.change([...this.positions, [...this.inside(place), ...scale]], this.positions.length, "add");
  }

  remove(index) {
    if (index === null || this.positions.length < 2) return;
    this.change(this.positions.toSpliced(index, 1), null, "remove");
  }

  change(positions, selected, how) {
    // If one token has a scale, all tokens need one.
    const columns = Math.max(...positions.map((place) => place.length));
    this.hooks.changed(positions.map((place) => (place.length < columns ? [...place, 1] : place)), selected, how);
  }

  // ---- drawing

  /** Draw in the next frame, once for all changes until then. */
  draw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.paint();
    });
  }

  /** The image at the canvas's size: original, dimmed and greyscale. Redrawn only after a change. */
  prepare(width, height) {
    const made = this.pictures;
    if (made.image === this.image && made.bright.width === width && made.bright.height === height) return;
    made.image = this.image;
    for (const [canvas, filter] of [[made.bright, "none"], [made.dark, "brightness(0.4)"], [made.grey, "grayscale(1) brightness(0.8)"]]) {
      Object.assign(canvas, { width, height });
      const pen = canvas.getContext("2d");
      pen.filter = filter;
      pen.imageSmoothingEnabled = this.image.width >= 1.5 * this.size[1];
      pen.imageSmoothingQuality = "high";
      pen.drawImage(this.image, 0, 0, width, height);
    }
  }

  paint() {
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [this.canvas.clientWidth * ratio, this.canvas.clientHeight * ratio].map(Math.round);
    if (!width || !height || !this.image) return;
    if (this.canvas.width !== width || this.canvas.height !== height) Object.assign(this.canvas, { width, height });
    const pen = this.canvas.getContext("2d");
    const unit = width / this.size[1]; // screen pixels of one image pixel
    const thin = Math.max(1, ratio);
    this.prepare(width, height);
    const dimmed = this.dim && !this.overlay;
    pen.drawImage(this.pictures[this.overlay ? "grey" : dimmed ? "dark" : "bright"], 0, 0);
    const boxes = this.positions.map(([y, x, scale = 1]) => {
      const side = this.window * scale * unit;
      return [x * width - side / 2, y * height - side / 2, side, side];
    });
    if (this.overlay) {
      pen.imageSmoothingEnabled = true;
      pen.imageSmoothingQuality = "high";
      pen.globalAlpha = this.overlay.alpha;
      // The outermost values of a field belong to the outermost pixels, those of a map to cells.
      const { canvas, inset } = this.overlay;
      pen.drawImage(canvas, inset, inset, canvas.width - 2 * inset, canvas.height - 2 * inset, 0, 0, width, height);
      pen.globalAlpha = 1;
    } else if (dimmed) {
      for (const [x, y, side] of boxes) {
        const [left, top] = [Math.max(x, 0), Math.max(y, 0)];
        const [wide, high] = [Math.min(x + side, width) - left, Math.min(y + side, height) - top];
        if (wide > 0 && high > 0) pen.drawImage(this.pictures.bright, left, top, wide, high, left, top, wide, high);
      }
    }
    const line = (box, color, wide) => {
      pen.strokeStyle = color;
      pen.lineWidth = wide;
      pen.strokeRect(...box);
    };
    const faint = this.overlay || boxes.length > 150;
    for (const box of boxes) {
      if (!faint) line(box, "rgb(0 0 0 / 45%)", 3 * thin);
      line(box, faint ? "rgb(255 255 255 / 45%)" : "rgb(255 255 255 / 92%)", thin);
    }
    if (this.trajectory?.length > 1) this.drawPaths(pen, width, height, thin);
    if (this.selected !== null && boxes[this.selected]) {
      line(boxes[this.selected], "rgb(0 0 0 / 55%)", 5 * thin);
      line(boxes[this.selected], "#ffb000", 2.5 * thin);
      const [y, x] = this.positions[this.selected];
      this.dot(pen, x * width, y * height, 3 * thin, "#ffb000");
      const handle = this.handle();
      if (handle) this.dot(pen, handle[1] * width, handle[0] * height, 5.5 * thin, "#ffb000");
    }
    if (this.overlay?.best) {
      const [y, x] = this.overlay.best;
      line([x * width - 6 * thin, y * height - 6 * thin, 12 * thin, 12 * thin], "rgb(0 0 0 / 60%)", 4 * thin);
      line([x * width - 6 * thin, y * height - 6 * thin, 12 * thin, 12 * thin], "#7df9c0", 2 * thin);
    }
  }

  drawPaths(pen, width, height, thin) {
    const steps = this.trajectory.length - 1;
    pen.lineCap = "round";
    this.trajectory[0].forEach((_, token) => {
      const points = this.trajectory.map((places) => places[token]).map(([y, x]) => [x * width, y * height]);
      for (const [wide, color] of [[4.5 * thin, () => "rgb(255 255 255 / 55%)"], [2.4 * thin, (i) => pathColor(steps > 1 ? i / (steps - 1) : 1, this.adversarial)]]) {
        pen.lineWidth = wide;
        for (let i = 0; i < steps; i += 1) {
          pen.strokeStyle = color(i);
          pen.beginPath();
          pen.moveTo(...points[i]);
          pen.lineTo(...points[i + 1]);
          pen.stroke();
        }
      }
      this.dot(pen, ...points[0], 2 * thin, pathColor(0, this.adversarial));
      this.dot(pen, ...points[steps], 3 * thin, pathColor(1, this.adversarial));
    });
  }

  dot(pen, x, y, radius, color) {
    pen.beginPath();
    pen.arc(x, y, radius, 0, 2 * Math.PI);
    pen.fillStyle = color;
    pen.fill();
    pen.lineWidth = 1;
    pen.strokeStyle = "rgb(0 0 0 / 70%)";
    pen.stroke();
  }
}
