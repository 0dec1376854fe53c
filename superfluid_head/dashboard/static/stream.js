// The head's event stream, read with fetch: an EventSource cannot carry the key. Comes back by itself, later each time.

const SILENCE_MS = 15_000;
const RETRY_MS = [500, 1_000, 2_000, 4_000, 8_000, 15_000];
const BUFFER_CHARS_MAX = 8 * 1024 * 1024;
const EVERY_MS = 1_000;

/** Raised for replies after which trying again with the same key is no use. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function headersFor(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function reason(reply) {
  try {
    return String((await reply.json()).error.message).slice(0, 300);
  } catch {
    return `the head answered ${reply.status}`;
  }
}

/** One request to the head. Throws Error with words for a person, Refused for a key that will not do. */
export async function ask(key, verb, path, body) {
  const headers = headersFor(key);
  if (body !== undefined) headers["content-type"] = "application/json";
  const reply = await fetch(path, {
    method: verb,
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
    credentials: "omit",
    signal: AbortSignal.timeout(20_000),
  });
  if (reply.status === 401 || reply.status === 403) throw new Refused(reply.status, await reason(reply));
  if (!reply.ok) throw new Error(await reason(reply));
  return reply.json();
}

function parsed(block) {
  const found = { id: "", name: "", data: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith("data: ")) found.data += line.slice(6);
    else if (line.startsWith("event: ")) found.name = line.slice(7);
    else if (line.startsWith("id: ")) found.id = line.slice(4);
  }
  return found;
}

export class Stream {
  /** `on` has: state(object), event(object), live(), lost(words), refused(Refused). */
  constructor(key, on) {
    this.key = key;
    this.on = on;
    this.last = "";
    this.tries = 0;
    this.isClosed = false;
  }

  start() {
    this.run();
    return this;
  }

  close() {
    this.isClosed = true;
    this.abort?.abort();
    clearTimeout(this.timer);
    this.wake?.();
  }

  async run() {
    while (!this.isClosed) {
      let words = "the head closed the stream";
      try {
        await this.read();
      } catch (error) {
        if (this.isClosed) return;
        if (error instanceof Refused) {
          this.on.refused(error);
          return;
        }
        words = error.name === "AbortError" ? "the head has gone silent" : error.message;
      }
      if (this.isClosed) return;
      this.on.lost(words);
      const pause = RETRY_MS[Math.min(this.tries, RETRY_MS.length - 1)];
      this.tries += 1;
      await new Promise((resolve) => {
        this.wake = resolve;
        this.timer = setTimeout(resolve, pause);
      });
    }
  }

  async read() {
    this.abort = new AbortController();
    const patience = () => {
      clearTimeout(this.watch);
      this.watch = setTimeout(() => this.abort.abort(), SILENCE_MS);
    };
    patience();
    try {
      const headers = headersFor(this.key);
      if (this.last) headers["last-event-id"] = this.last;
      const reply = await fetch(`/v1/fleet/events?every_ms=${EVERY_MS}&since=0`, {
        headers,
        cache: "no-store",
        credentials: "omit",
        signal: this.abort.signal,
      });
      if (reply.status === 401 || reply.status === 403) throw new Refused(reply.status, await reason(reply));
      if (!reply.ok) throw new Error(await reason(reply));
      const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      let buffer = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        patience();
        buffer += value;
        if (buffer.length > BUFFER_CHARS_MAX) throw new Error("an event is too large");
        const blocks = buffer.split("\n\n");
        buffer = blocks.pop();
        for (const block of blocks) this.take(block);
      }
    } finally {
      clearTimeout(this.watch);
    }
  }

  take(block) {
    const found = parsed(block);
    if (!found.data || found.data === "[DONE]") return;
    const data = JSON.parse(found.data);
    if (found.id) this.last = found.id;
    if (found.name === "state") {
      this.tries = 0;
      this.on.live();
      this.on.state(data);
    } else {
      this.on.event(data);
    }
  }
}
