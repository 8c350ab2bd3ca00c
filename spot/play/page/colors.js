// Colour scales, interpolated linearly between a few stops.

const VIRIDIS = [[68, 1, 84], [65, 68, 135], [42, 120, 142], [34, 168, 132], [122, 209, 81], [253, 231, 37]];
const INFERNO = [[0, 0, 4], [66, 10, 104], [147, 38, 103], [221, 81, 58], [252, 165, 10], [252, 255, 164]];

function between(stops, part) {
  const at = Math.min(Math.max(part, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  return stops[low].map((value, i) => Math.round(value + (at - low) * (stops[low + 1][i] - value)));
}

const css = (rgb) => `rgb(${rgb.join(" ")})`;

/** The colour at a fraction of a path: dark purple to bright yellow, or to red for an adversarial search. */
export const pathColor = (part, adversarial) => css(between(adversarial ? [VIRIDIS[0], [220, 50, 32]] : VIRIDIS, part));

/** A small canvas of a saliency map, given as rows of values in [0, 1]. */
export const heat = (values) => painted(values, (value) => [...between(INFERNO, value), 255]);

const [WORSE, BETTER] = [[38, 70, 255], [255, 150, 20]];

/** A small canvas of differences: worse is blue, better is orange, zero is transparent. */
export const difference = (values, most) =>
  painted(values, (value) => [...(value < 0 ? WORSE : BETTER), 195 * Math.min(Math.abs(value) / most, 1)]);

/** The background of a legend for `difference`, from the worst to the best of differences. */
export function differenceGradient(low, high, most) {
  const color = (value) => `rgb(${(value < 0 ? WORSE : BETTER).join(" ")} / ${Math.round(76 * Math.min(Math.abs(value) / most, 1))}%)`;
  const stops = Array.from({ length: 17 }, (_, i) => color(low + ((high - low) * i) / 16));
  return `linear-gradient(to right, ${stops.join(",")})`;
}

function painted(values, color) {
  const canvas = document.createElement("canvas");
  canvas.width = values[0].length;
  canvas.height = values.length;
  const pixels = new ImageData(canvas.width, canvas.height);
  values.flat().forEach((value, i) => value !== null && pixels.data.set(color(value), 4 * i));
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas;
}
