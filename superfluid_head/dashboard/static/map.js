// The fleet as a map: a tile a node, its KV pool a vessel that fills, its lanes cells with the class that runs in them, and a
// path from node to node for every session that moves.

import { byId, el, Keyed, prefersStill, setData, setText, shape } from "./dom.js";
import { CLASS_MARKS, count, percent, rate, several } from "./words.js";

const NODES_SHOWN_MAX = 256;
const COMPACT_FROM = 13;
const CELLS_MAX = 48;
const PATHS_MAX = 16;
const FLIGHT_MS = 1_100;
const PATH_MS = 6_000;

const STATES = { up: "up", down: "down", hung: "engine hangs", draining: "draining", suspect: "late" };

export class FleetMap {
  /** `onDrain(node)` is called when somebody asks to drain a node, or to use it again. */
  constructor(onDrain) {
    this.onDrain = onDrain;
    this.tiles = new Keyed(byId("tiles"), () => this.make());
    this.paths = [];
  }

  make() {
    const part = { node: null, cells: [] };
    part.level = el("span", { class: "level" });
    part.cached = el("span", { class: "level cached" });
    part.vessel = el("div", { class: "vessel", role: "img" }, part.cached, part.level);
    part.name = el("h3", { class: "tile-name" });
    part.state = el("span", { class: "state" });
    part.where = el("p", { class: "tile-where" });
    part.lanes = el("div", { class: "lanes", role: "img" });
    part.laneWords = el("span", { class: "lane-words" });
    part.kv = el("dd");
    part.rate = el("dd");
    part.prefill = el("dd");
    part.queue = el("dd");
    part.detail = el("p", { class: "tile-detail" });
    part.drain = el("button", { type: "button", class: "quiet small" });
    part.drain.addEventListener("click", () => this.onDrain(part.node));
    part.root = el(
      "li",
      { class: "tile" },
      part.vessel,
      el(
        "div",
        { class: "tile-body" },
        el("div", { class: "tile-head" }, part.name, part.state),
        part.where,
        el("div", { class: "lane-row" }, part.lanes, part.laneWords),
        el(
          "dl",
          { class: "tile-figures" },
          el("div", {}, el("dt", {}, "KV"), part.kv),
          el("div", {}, el("dt", {}, "tokens/s"), part.rate),
          el("div", {}, el("dt", {}, "prefill/s"), part.prefill),
          el("div", {}, el("dt", {}, "queue"), part.queue),
        ),
        part.detail,
        part.drain,
      ),
    );
    return part;
  }

  update(state, byNode) {
    const shown = state.nodes.slice(0, NODES_SHOWN_MAX);
    const more = state.nodes.length - shown.length;
    byId("tiles").classList.toggle("compact", shown.length >= COMPACT_FROM);
    this.tiles.update(shown, (node) => node.name, (part, node) => this.fill(part, node, byNode.get(node.name) ?? []));
    byId("map-note").hidden = more <= 0;
    setText(byId("map-note"), more > 0 ? `${several(more, "more node")} not shown.` : "");
  }

  fill(part, node, sessions) {
    part.node = node;
    const used = percent(node.blocks_used, node.blocks);
    const cached = percent(Math.min(node.blocks, node.blocks_used + node.blocks_cached), node.blocks);
    setData(part.root, "state", node.state);
    setText(part.name, node.name);
    part.name.title = node.name;
    setText(part.state, node.is_up && node.circuit !== "closed" ? `${STATES[node.state] ?? node.state}, rests` : STATES[node.state] ?? node.state);
    setText(part.where, node.models.join(", ") || node.address);
    part.where.title = [node.models.join(", "), node.address].filter(Boolean).join(" at ");
    part.level.style.height = `${used}%`;
    part.cached.style.height = `${cached}%`;
    setData(part.vessel, "high", used >= 90);
    part.vessel.setAttribute("aria-label", `KV pool ${used} percent used, ${Math.max(0, cached - used)} percent cached`);
    setText(part.kv, node.blocks ? `${used}%` : "–");
    setText(part.rate, rate(node.tokens_per_s));
    setText(part.prefill, node.prefill_rate ? count(node.prefill_rate) : "–");
    setText(part.queue, count(node.queued));
    setText(part.detail, node.detail);
    part.detail.hidden = !node.detail;
    setText(part.drain, node.is_draining ? "Use again" : "Drain");
    part.drain.setAttribute("aria-label", `${node.is_draining ? "Use again" : "Drain"}: ${node.name}`);
    part.drain.hidden = !node.is_draining && !node.is_up;
    this.fillLanes(part, node, sessions);
  }

  /** One cell a lane: first those whose session this head knows, then those that are busy with somebody else's, then the free. */
  fillLanes(part, node, sessions) {
    const total = Math.min(node.lanes, CELLS_MAX);
    while (part.cells.length > total) part.cells.pop().remove();
    while (part.cells.length < total) {
      const cell = el("span", { class: "cell" });
      part.cells.push(cell);
      part.lanes.append(cell);
    }
    const known = sessions.slice(0, node.lanes_busy);
    part.cells.forEach((cell, place) => {
      const kind = place < known.length ? known[place].class : place < node.lanes_busy ? "other" : "free";
      setData(cell, "class", kind);
      setText(cell, CLASS_MARKS[kind] ?? "");
    });
    part.lanes.setAttribute("aria-label", `${node.lanes_busy} of ${several(node.lanes, "lane")} busy`);
    setText(part.laneWords, `${node.lanes_busy}/${node.lanes}`);
  }

  /** Draws a session's way from one tile to another; it fades by itself. */
  move({ from, to }) {
    const [start, end] = [this.tiles.parts.get(from), this.tiles.parts.get(to)];
    if (start === undefined || end === undefined || start === end) return;
    while (this.paths.length >= PATHS_MAX) this.paths.shift().remove();
    byId("paths").toggleAttribute("hidden", false);
    const line = way(byId("map").getBoundingClientRect(), start.root.getBoundingClientRect(), end.root.getBoundingClientRect());
    const trail = shape("path", { class: "trail", d: line, pathLength: 1 });
    const dot = shape("circle", { class: "comet", r: 6, cx: 0, cy: 0 });
    const group = shape("g", {}, trail, dot);
    byId("paths").append(group);
    this.paths.push(group);
    if (prefersStill()) {
      dot.remove();
    } else {
      fly(dot, trail);
      trail.animate([{ strokeDashoffset: 1 }, { strokeDashoffset: 0 }], { duration: FLIGHT_MS, easing: "ease-in-out" });
      group.animate([{ opacity: 1 }, { opacity: 1, offset: 0.5 }, { opacity: 0 }], { duration: PATH_MS });
    }
    end.root.classList.add("arrived");
    setTimeout(() => {
      group.remove();
      this.paths = this.paths.filter((each) => each !== group);
      byId("paths").toggleAttribute("hidden", this.paths.length === 0);
      end.root.classList.remove("arrived");
    }, PATH_MS);
  }
}

function way(frame, a, b) {
  const x1 = a.left - frame.left + a.width / 2;
  const y1 = a.top - frame.top + a.height / 2;
  const x2 = b.left - frame.left + b.width / 2;
  const y2 = b.top - frame.top + b.height / 2;
  const bend = Math.min(80, 24 + Math.hypot(x2 - x1, y2 - y1) / 5);
  const length = Math.hypot(x2 - x1, y2 - y1) || 1;
  const cx = (x1 + x2) / 2 + ((y2 - y1) / length) * bend;
  const cy = (y1 + y2) / 2 - ((x2 - x1) / length) * bend;
  return `M${x1} ${y1}Q${cx} ${cy} ${x2} ${y2}`;
}

function fly(dot, trail) {
  const length = trail.getTotalLength();
  let began = null;
  const step = (now) => {
    began ??= now;
    const share = Math.min(1, (now - began) / FLIGHT_MS);
    const eased = share < 0.5 ? 2 * share * share : 1 - (2 - 2 * share) ** 2 / 2;
    const at = trail.getPointAtLength(length * eased);
    dot.setAttribute("cx", at.x);
    dot.setAttribute("cy", at.y);
    if (share === 1) dot.remove();
    else if (dot.isConnected) requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
}

export function showLegend(classes) {
  const entries = [...classes.map((name) => [name, name]), ["other", "another's"], ["free", "free"]];
  byId("legend").replaceChildren(
    ...entries.map(([kind, words]) =>
      el("li", {}, el("span", { class: "cell", "data-class": kind, "aria-hidden": "true" }, CLASS_MARKS[kind] ?? ""), words),
    ),
  );
}
