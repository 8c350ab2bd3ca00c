// The WebSocket. Each request has a slot; the newest request replaces older ones, here and on the server.

const RETRY = 1000;

export class Link {
  constructor() {
    this.slots = new Map();
    this.number = 0;
  }

  /** Hooks: opened(about) after each connection, closed() when it is lost, failed(sentence) for errors, and busy(true
   * or false) when work begins and when no request is pending. */
  connect(hooks) {
    this.hooks = hooks;
    const socket = new WebSocket(`ws://${location.host}/live`);
    socket.onmessage = (event) => this.take(JSON.parse(event.data));
    socket.onclose = () => {
      this.socket = null;
      this.slots.clear();
      this.reportBusy();
      hooks.closed();
      setTimeout(() => this.connect(hooks), RETRY);
    };
    this.socket = socket;
  }

  get ready() {
    return this.socket?.readyState === WebSocket.OPEN;
  }

  /** Send a request at once, replacing the slot's running one. The answer may have several parts. */
  start(slot, request, answer) {
    if (!this.ready) return;
    const id = (this.number += 1);
    this.slots.set(slot, { id, answer });
    this.reportBusy();
    this.socket.send(JSON.stringify({ slot, id, ...request }));
  }

  /** Send a request when the slot's last one is answered. Only the newest waiting request is sent. */
  latest(slot, request, answer) {
    const busy = this.slots.get(slot);
    if (busy) busy.next = [request, answer];
    else this.start(slot, request, answer);
  }

  /** Send a request and return a promise of the answer. */
  ask(slot, request) {
    return new Promise((resolve) => this.start(slot, request, resolve));
  }

  stop(slot) {
    if (!this.slots.delete(slot) || !this.ready) return;
    this.reportBusy();
    this.socket.send(JSON.stringify({ slot, id: 0, kind: "stop" }));
  }

  take({ slot, id, error, ...answer }) {
    if (slot === "about") return this.hooks.opened(answer);
    const running = this.slots.get(slot);
    if (error) this.hooks.failed(error);
    if (!running || running.id !== id) return;
    const unfinished = !error && "part" in answer && !answer.done;
    if (!unfinished) this.slots.delete(slot);
    if (running.next && !this.slots.has(slot)) this.start(slot, ...running.next);
    running.answer(error ? { error } : answer);
    this.reportBusy();
  }

  reportBusy() {
    this.hooks.busy(this.slots.size > 0);
  }
}

/** Fetch a path, or POST a body to it. Returns the response, or null after reporting the error. */
export async function httpRequest(path, failed, options = {}) {
  try {
    const response = await fetch(path, options.body ? { method: "POST", ...options } : options);
    if (response.ok) return response;
    failed((await response.json()).error ?? `The server refused: ${response.status}`);
  } catch {
    failed("The server does not answer.");
  }
  return null;
}
