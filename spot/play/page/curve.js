// The label's probability, step by step, as SVG.

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [276, 104, 30, 10, 8, 18];
const NS = "http://www.w3.org/2000/svg";

function draw(name, attributes, text = "") {
  const element = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

/** Draw the probabilities of steps 0 … steps into an element, and those of the control (`others`) at the last step. */
export function curve(element, { values, steps, adversarial = false, others = [], now = values.length - 1 }) {
  const x = (step) => LEFT + ((WIDTH - LEFT - RIGHT) * step) / Math.max(steps, 1);
  const y = (p) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - p);
  const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}` });
  for (const p of [0, 0.5, 1]) {
    svg.append(draw("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(p), y2: y(p) }));
    svg.append(draw("text", { x: LEFT - 5, y: y(p) + 3, "text-anchor": "end" }, `${100 * p}`));
  }
  svg.append(draw("text", { x: LEFT, y: HEIGHT - 4 }, "start"));
  svg.append(draw("text", { x: WIDTH - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, `step ${steps}`));
  svg.append(draw("polyline", { class: `line${adversarial ? " adversarial" : ""}`, points: values.map((p, i) => `${x(i)},${y(p)}`).join(" ") }));
  values.forEach((p, i) => svg.append(draw("circle", { class: `dot${adversarial ? " adversarial" : ""}`, cx: x(i), cy: y(p), r: 2.5 })));
  others.forEach((p, i) => svg.append(draw("circle", { class: "other", cx: x(steps) - 4 + ((i * 5) % 9), cy: y(p), r: 2.5 })));
  if (values[now] !== undefined) svg.append(draw("circle", { class: "now", cx: x(now), cy: y(values[now]), r: 4 }));
  element.replaceChildren(svg);
  const told = values.map((p) => `${Math.round(100 * p)}`).join(", ");
  element.setAttribute("aria-label", values.length ? `The label's probability in percent, step by step: ${told}` : "No search yet");
}
