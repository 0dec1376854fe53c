// Whether the fleet is well, in one line, and the six figures beside it.

import { byId, setData, setText } from "./dom.js";
import { count, percent, rate, several, spread } from "./words.js";

const MARKS = { good: "✓", busy: "≈", warn: "!", bad: "×", unknown: "…" };
const KV_HIGH_PCT = 95;
const NAMED_MAX = 3;

function named(nodes) {
  const names = nodes.slice(0, NAMED_MAX).map((node) => node.name);
  const more = nodes.length - names.length;
  return names.join(", ") + (more > 0 ? ` and ${more} more` : "");
}

function are(nodes, words) {
  return nodes.length ? [`${named(nodes)} ${nodes.length === 1 ? "is" : "are"} ${words}`] : [];
}

/** Returns { level, title, why } from a state; the worst that holds comes first. */
export function judge(state) {
  const nodes = state.nodes;
  const within = (...states) => nodes.filter((node) => states.includes(node.state));
  const lost = within("down", "hung");
  const waiting = state.waiting.reduce((sum, each) => sum + each, 0);
  const lanes = nodes.reduce((sum, node) => sum + node.lanes, 0);
  const busy = nodes.reduce((sum, node) => sum + node.lanes_busy, 0);
  const concerns = [
    ...are(within("down"), "down"),
    ...are(within("hung"), "not answering: its engine hangs"),
    ...are(within("suspect"), "late to answer"),
    ...are(within("draining"), "draining"),
    ...are(nodes.filter((node) => node.is_up && node.circuit !== "closed"), "resting after faults"),
    ...are(nodes.filter((node) => node.blocks && percent(node.blocks_used, node.blocks) >= KV_HIGH_PCT), "almost out of KV blocks"),
    ...state.head.warnings.map(String),
  ];
  const serving = nodes.length - lost.length;
  const why = (calm) => (concerns.length ? `${concerns.join("; ")}.` : calm);
  if (state.head.is_draining) return { level: "warn", title: "This head is shutting down", why: why("Streams finish; new requests are refused.") };
  if (!nodes.length) return { level: "bad", title: "No nodes", why: "This head knows no node yet." };
  if (!state.ready) return { level: "bad", title: "Nothing can be served", why: why("No node serves a model.") };
  if (lost.length) return { level: "warn", title: `${serving} of ${nodes.length} nodes serve`, why: why("") };
  const queue = waiting ? `${several(waiting, "session")} ${waiting === 1 ? "waits" : "wait"} for a lane` : "nothing waits";
  const calm = `${several(nodes.length, "node")}, ${busy} of ${lanes} lanes busy, ${queue}.`;
  if (concerns.length) return { level: "warn", title: "Serving, with care", why: why(calm) };
  if (waiting) return { level: "busy", title: "Busy", why: calm };
  return { level: "good", title: "All well", why: calm };
}

let spoken = "";

export function showVerdict(state) {
  const found = judge(state);
  setData(byId("verdict"), "level", found.level);
  setText(byId("verdict-mark"), MARKS[found.level]);
  setText(byId("verdict-title"), found.title);
  setText(byId("verdict-why"), found.why);
  const words = `${found.level}: ${found.title}`;
  if (words !== spoken) {
    spoken = words;
    setText(byId("spoken"), `${found.title}. ${found.why}`);
    document.title = found.level === "good" ? "Superfluid" : `${found.title} · Superfluid`;
  }
  const both = (each) => (each.count ? spread(each.p50, each.p95) : "–");
  setText(byId("figure-running"), count(state.running));
  setText(byId("figure-waiting"), count(state.waiting.reduce((sum, each) => sum + each, 0)));
  setText(byId("figure-rate"), rate(state.vitals.tokens_per_s));
  setText(byId("figure-ttft"), both(state.vitals.ttft_ms));
  setText(byId("figure-itl"), both(state.vitals.itl_ms));
  setText(byId("figure-moves"), count(state.counters.moves));
}

export function showUnknown(words) {
  setData(byId("verdict"), "level", "unknown");
  setText(byId("verdict-mark"), MARKS.unknown);
  setText(byId("verdict-title"), "Out of touch");
  setText(byId("verdict-why"), words);
  if (spoken !== "unknown") {
    spoken = "unknown";
    setText(byId("spoken"), `Out of touch with the head. ${words}`);
  }
}
