// Figures and happenings as a person reads them.

export const CLASS_MARKS = { interactive: "I", completion: "C", agent: "A", background: "B" };

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const precise = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const time = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });

export function count(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${precise.format(value / 1e6)}M`;
  if (size >= 1e4) return `${precise.format(value / 1e3)}k`;
  return plain.format(value);
}

export const rate = (value) => (value > 0 && value < 10 ? precise.format(value) : count(value));

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10) return `${precise.format(value)} ms`;
  if (value < 1_000) return `${plain.format(value)} ms`;
  if (value < 60_000) return `${precise.format(value / 1_000)} s`;
  return `${precise.format(value / 60_000)} min`;
}

/** Two durations in a row, the unit once if it is the same. */
export function spread(low, high) {
  const [first, second] = [milliseconds(low), milliseconds(high)];
  const [number, unit] = first.split(" ");
  return second.endsWith(` ${unit}`) ? `${number} · ${second}` : `${first} · ${second}`;
}

export function age(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 120) return `${whole} s`;
  if (whole < 7_200) return `${Math.floor(whole / 60)} min`;
  if (whole < 172_800) return `${Math.floor(whole / 3_600)} h`;
  return `${Math.floor(whole / 86_400)} d`;
}

export const clock = (seconds) => time.format(new Date(seconds * 1_000));

export const percent = (part, whole) => (whole > 0 ? Math.round((100 * part) / whole) : 0);

export const several = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

const SAID = {
  "node-up": (e) => ["good", e.node, `is up and serves ${e.models || "no model"}`],
  "node-down": (e) => ["bad", e.node, `is down: ${e.reason}`],
  "node-leaving": (e) => ["warn", e.node, "takes no new sessions"],
  "node-returned": (e) => ["good", e.node, "takes sessions again"],
  "node-rests": (e) => ["warn", e.node, `rests after faults: ${e.reason}`],
  "node-forgotten": (e) => ["plain", e.node, "is forgotten"],
  drain: (e) => ["warn", e.node, "was told to drain"],
  undrain: (e) => ["good", e.node, "is used again"],
  fault: (e) => ["warn", e.node, `fault: ${e.reason}`],
  link: (e) => ["plain", e.node, `${several(e.links, "link")}`],
  "link-lost": (e) => ["plain", e.node, `lost a link: ${e.reason}`],
  reloaded: () => ["plain", "", "the list of nodes was read again"],
  missed: (e) => ["warn", "", `${several(e.events, "event")} missed: this page read too slowly`],
};

/** What an event says: how grave it is, whom it is about, and the words. */
export function said(event) {
  if (event.kind === "moved") {
    const to = event.to ? ` to ${event.to}` : "";
    const kept = event.delivered ? `, ${several(event.delivered, "token")} kept` : "";
    return ["move", event.request, `moves from ${event.node ?? "its node"}${to}: ${event.reason}${kept}`];
  }
  if (event.kind === "placed") return ["plain", event.request, `on ${event.node} (${event.reason})`];
  const words = SAID[event.kind];
  return words ? words(event) : ["plain", event.node ?? "", event.kind];
}
