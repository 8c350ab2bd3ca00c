// The view as the URL's fragment, for bookmarks. Positions are exact, as float32.

function packed(positions) {
  const bytes = new Uint8Array(new Float32Array(positions.flat()).buffer);
  return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join("")).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

function unpacked(text, columns) {
  const raw = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
  if (!raw.length || raw.length % (4 * columns)) return null;
  const numbers = Array.from(new Float32Array(Uint8Array.from(raw, (letter) => letter.charCodeAt(0)).buffer));
  if (!numbers.every(Number.isFinite)) return null;
  return Array.from({ length: numbers.length / columns }, (_, i) => numbers.slice(columns * i, columns * (i + 1)));
}

/** The fragment of a view {picture, panels: [{model, positions}], …settings}. */
export function fragment({ picture, panels, ...settings }) {
  const fields = new URLSearchParams({ picture });
  for (const { model, positions } of panels) {
    fields.append("model", model);
    fields.append("at", `${positions[0].length}.${packed(positions)}`);
  }
  for (const [name, value] of Object.entries(settings)) if (value !== null && value !== "") fields.set(name, value);
  return `#${fields}`;
}

/** The view of a fragment, or null if the fragment is invalid. */
export function view(text) {
  try {
    const fields = new URLSearchParams(text.replace(/^#/, ""));
    const models = fields.getAll("model");
    const panels = fields.getAll("at").map((at, i) => {
      const [columns, data] = at.split(".");
      return { model: models[i], positions: unpacked(data, Number(columns)) };
    });
    if (!fields.get("picture") || !panels.length || panels.length > 2) return null;
    if (!panels.every(({ model, positions }) => model && positions)) return null;
    const settings = Object.fromEntries([...fields].filter(([name]) => !["picture", "model", "at"].includes(name)));
    return { picture: fields.get("picture"), panels, ...settings };
  } catch {
    return null;
  }
}
