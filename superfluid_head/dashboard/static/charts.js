// Three charts of the last minutes, drawn by hand: a point a slot, gaps where nothing was measured, and the same as a table.

import { byId, el, setText, shape } from "./dom.js";
import { clock, milliseconds, rate } from "./words.js";

const SLOTS_MIN = 24;
const SLOTS_MAX = 120;
const WIDTH_LEAST = 240;
const HEIGHT = 160;
const EDGE = { left: 52, right: 10, top: 12, bottom: 24 };
const ROWS = 10;

const KINDS = [
  {
    id: "ttft",
    title: "First token",
    words: milliseconds,
    least: 10,
    series: [
      { name: "p50", line: "strong", of: (point) => point.ttft_ms.p50 },
      { name: "p95", line: "soft", of: (point) => point.ttft_ms.p95 },
    ],
  },
  {
    id: "itl",
    title: "Between tokens",
    words: milliseconds,
    least: 5,
    series: [
      { name: "p50", line: "strong", of: (point) => point.itl_ms.p50 },
      { name: "p95", line: "soft", of: (point) => point.itl_ms.p95 },
    ],
  },
  {
    id: "rate",
    title: "Tokens a second",
    words: rate,
    least: 10,
    series: [{ name: "tokens/s", line: "strong", isArea: true, of: (point) => point.tokens_per_s }],
  },
];

/** The least round number that is not below `value`: 1, 2, 2.5, 5 times a power of ten. */
export function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  for (const step of [1, 2, 2.5, 5, 10]) if (value <= step * power * (1 + 1e-9)) return step * power;
  return 10 * power;
}

const y = (value, top) => HEIGHT - EDGE.bottom - (value / top) * (HEIGHT - EDGE.top - EDGE.bottom);

/** Neighbouring slots make a line; a slot without neighbours is a dot of its own. */
export function runs(points, of) {
  const found = [];
  let previous = null;
  for (const point of points) {
    const value = of(point);
    if (value === null || value === undefined) continue;
    if (previous !== null && point.slot === previous + 1) found.at(-1).push([point.slot, value]);
    else found.push([[point.slot, value]]);
    previous = point.slot;
  }
  return found;
}

class Chart {
  constructor(kind) {
    this.kind = kind;
    const place = (name) => shape("g", { class: name });
    this.grid = place("grid");
    this.lines = place("lines");
    this.cursor = shape("line", { class: "cursor", y1: EDGE.top, y2: HEIGHT - EDGE.bottom, visibility: "hidden" });
    this.picture = shape(
      "svg",
      { class: "chart", role: "img", "aria-label": kind.title },
      this.grid,
      this.lines,
      this.cursor,
    );
    this.now = el("p", { class: "chart-now" });
    this.rows = el("tbody");
    const heads = kind.series.map((series) => el("th", { scope: "col" }, series.name));
    const keys = kind.series.map((series) => el("li", {}, el("span", { class: `key ${series.line}`, "aria-hidden": "true" }), series.name));
    this.root = el(
      "section",
      { class: "panel chart-panel", "aria-labelledby": `chart-${kind.id}` },
      el("div", { class: "panel-head" }, el("h2", { id: `chart-${kind.id}` }, kind.title), el("ul", { class: "keys", "aria-label": "Lines" }, ...keys)),
      this.picture,
      this.now,
      el("details", {}, el("summary", {}, "As a table"), el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Time"), ...heads)), this.rows)),
    );
    this.points = [];
    this.last = 0;
    this.root.querySelector("details").addEventListener("toggle", () => this.tabulate());
    this.picture.addEventListener("pointermove", (event) => this.point(event));
    this.picture.addEventListener("pointerleave", () => this.forget());
  }

  x(slot) {
    return EDGE.left + ((slot - this.last + this.slots - 1) / (this.slots - 1)) * (this.width - EDGE.left - EDGE.right);
  }

  /** The window is as long as there is something to see, within two to ten minutes. */
  update(points, last, slotSeconds) {
    this.points = points.filter((point) => point.slot > last - SLOTS_MAX);
    this.last = last;
    const wanted = this.points.length ? last - this.points[0].slot + 1 : 0;
    this.slots = Math.min(SLOTS_MAX, Math.max(SLOTS_MIN, Math.ceil(wanted / SLOTS_MIN) * SLOTS_MIN));
    this.minutes = `${Math.round((this.slots * slotSeconds) / 60)} min`;
    const values = this.kind.series.flatMap((series) => this.points.map(series.of)).filter((value) => value !== null && value !== undefined);
    this.top = ceiling(Math.max(this.kind.least, ...values));
    this.draw();
    if (this.root.querySelector("details").open) this.tabulate();
    const latest = this.words(this.points.findLast((point) => this.words(point)));
    this.picture.setAttribute("aria-label", `${this.kind.title}, the last ${this.minutes}. ${latest || "Nothing was measured."}`);
    if (this.cursor.getAttribute("visibility") === "hidden") setText(this.now, latest || `Nothing measured in ${this.minutes}`);
  }

  /** In the picture's own pixels, so that letters keep their size. */
  draw() {
    this.width = Math.max(WIDTH_LEAST, this.picture.clientWidth);
    this.picture.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const ticks = [0, 0.5, 1].map((share) => share * this.top);
    const right = this.width - EDGE.right;
    this.grid.replaceChildren(
      ...ticks.flatMap((value) => [
        shape("line", { x1: EDGE.left, x2: right, y1: y(value, this.top), y2: y(value, this.top) }),
        shape("text", { x: EDGE.left - 8, y: y(value, this.top) + 4, "text-anchor": "end" }, this.kind.words(value)),
      ]),
      shape("text", { x: EDGE.left, y: HEIGHT - 6 }, `${this.minutes} ago`),
      shape("text", { x: right, y: HEIGHT - 6, "text-anchor": "end" }, "now"),
    );
    this.lines.replaceChildren(...[...this.kind.series].reverse().flatMap((series) => this.drawSeries(series)));
  }

  drawSeries(series) {
    const drawn = [];
    for (const run of runs(this.points, series.of)) {
      const at = run.map(([slot, value]) => [this.x(slot).toFixed(1), y(value, this.top).toFixed(1)]);
      if (at.length === 1) {
        drawn.push(shape("circle", { class: `dot ${series.line}`, cx: at[0][0], cy: at[0][1], r: 2.5 }));
        continue;
      }
      const line = at.map(([px, py]) => `${px} ${py}`).join("L");
      const floor = y(0, this.top).toFixed(1);
      if (series.isArea) drawn.push(shape("path", { class: "area", d: `M${at[0][0]} ${floor}L${line}L${at.at(-1)[0]} ${floor}Z` }));
      drawn.push(shape("path", { class: `line ${series.line}`, d: `M${line}` }));
    }
    return drawn;
  }

  words(point) {
    if (point === undefined) return "";
    const parts = this.kind.series.map((series) => [series, series.of(point)]).filter(([, value]) => value !== null && value !== undefined);
    return parts.length ? `${clock(point.at)}  ${parts.map(([series, value]) => `${series.name} ${this.kind.words(value)}`).join("  ")}` : "";
  }

  tabulate() {
    const recent = this.points.slice(-ROWS).reverse();
    this.rows.replaceChildren(
      ...recent.map((point) => el("tr", {}, el("th", { scope: "row" }, clock(point.at)), ...this.kind.series.map((series) => el("td", {}, this.kind.words(series.of(point)))))),
    );
  }

  point(event) {
    const box = this.picture.getBoundingClientRect();
    const wanted = ((event.clientX - box.left) / box.width) * this.width;
    let nearest;
    for (const each of this.points) {
      if (!this.words(each)) continue;
      if (nearest === undefined || Math.abs(this.x(each.slot) - wanted) < Math.abs(this.x(nearest.slot) - wanted)) nearest = each;
    }
    if (nearest === undefined) return;
    const at = this.x(nearest.slot);
    for (const [name, value] of [["x1", at], ["x2", at], ["visibility", "visible"]]) this.cursor.setAttribute(name, value);
    setText(this.now, this.words(nearest));
  }

  forget() {
    this.cursor.setAttribute("visibility", "hidden");
  }
}

export class Charts {
  constructor() {
    this.charts = KINDS.map((kind) => new Chart(kind));
    byId("charts").replaceChildren(...this.charts.map((chart) => chart.root));
  }

  /** `now` is the head's time: the charts' right end, also while nothing is measured. */
  update(points, slotSeconds, now) {
    const newest = points.at(-1);
    const last = newest === undefined ? 0 : newest.slot + Math.max(0, Math.floor((now - newest.at) / slotSeconds));
    for (const chart of this.charts) chart.update(points, last, slotSeconds);
  }
}
