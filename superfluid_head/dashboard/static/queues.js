// What runs and waits by class, and what happens, newest first.

import { byId, el, Keyed, setData, setText } from "./dom.js";
import { CLASS_MARKS, clock, count, said } from "./words.js";

const LINES_MAX = 60;
const WHO_CHARS_MAX = 24;
const MARKS = { good: "✓", warn: "!", bad: "×", move: "→", plain: "·" };
const MEANINGS = { good: "good", warn: "warning", bad: "failure", move: "move", plain: "note" };

export class Queues {
  constructor() {
    this.rows = new Keyed(byId("queues"), () => {
      const part = {};
      part.mark = el("span", { class: "cell", "aria-hidden": "true" });
      part.name = el("span", {});
      part.numbers = [0, 1, 2].map(() => {
        const bar = el("span", { class: "queue-bar", "aria-hidden": "true" });
        const number = el("span", { class: "queue-number" });
        return { bar, number, root: el("td", {}, number, bar) };
      });
      part.root = el("tr", {}, el("th", { scope: "row" }, part.mark, part.name), ...part.numbers.map((each) => each.root));
      return part;
    });
  }

  update(state, byClass) {
    const rows = state.classes.map((name, place) => ({
      name,
      numbers: [
        byClass.get(name) ?? 0,
        state.waiting[place] ?? 0,
        state.nodes.reduce((sum, node) => sum + (node.queued_by_class[place] ?? 0), 0),
      ],
    }));
    const most = Math.max(4, ...rows.flatMap((row) => row.numbers));
    this.rows.update(rows, (row) => row.name, (part, row) => {
      setData(part.mark, "class", row.name);
      setText(part.mark, CLASS_MARKS[row.name] ?? "");
      setText(part.name, row.name);
      row.numbers.forEach((value, place) => {
        const { bar, number, root } = part.numbers[place];
        setText(number, count(value));
        setData(bar, "class", row.name);
        bar.style.width = `${(100 * value) / most}%`;
        setData(root, "zero", value === 0);
      });
    });
  }
}

const shortened = (name) => (name.length > WHO_CHARS_MAX ? `${name.slice(0, WHO_CHARS_MAX - 1)}…` : name);

export class Happenings {
  constructor() {
    this.lines = new Keyed(byId("events"), () => {
      const part = { mark: el("span", { class: "event-mark", role: "img" }), at: el("time"), who: el("span", { class: "event-who" }), words: el("span") };
      part.root = el("li", {}, part.mark, part.at, el("p", {}, part.who, " ", part.words));
      return part;
    });
  }

  update(events) {
    this.lines.update(events.slice(0, LINES_MAX), (event) => `${event.at}-${event.worker ?? 0}-${event.sequence}`, (part, event) => {
      const [level, who, words] = said(event);
      setData(part.root, "level", level);
      setText(part.mark, MARKS[level]);
      part.mark.setAttribute("aria-label", MEANINGS[level]);
      setText(part.at, clock(event.at));
      setText(part.who, shortened(who));
      part.who.title = who;
      setText(part.words, words);
    });
  }
}
