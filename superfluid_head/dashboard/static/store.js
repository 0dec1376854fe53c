// What the page knows: the last state, the points of the charts, what happened. Everything here is bounded.

const EVENTS_MAX = 120;
const PLACEMENTS_MAX = 60;
const POINTS_MAX = 120;
const REQUESTS_MAX = 2_048;

function capped(map, key, value) {
  map.delete(key);
  map.set(key, value);
  if (map.size > REQUESTS_MAX) map.delete(map.keys().next().value);
}

const newestFirst = (a, b) => b.at - a.at || b.sequence - a.sequence;

export class Store {
  constructor() {
    this.state = null;
    this.starts = [];
    this.points = [];
    this.events = [];
    this.placements = [];
    this.moves = new Map();
    this.leaving = new Map();
  }

  takeState(state) {
    const starts = (state.workers ?? [state.head]).map((each) => each.started);
    const isSame = starts.some((each) => this.starts.includes(each));
    this.starts = starts;
    if (!isSame) {
      this.points = [];
      this.events = [];
      this.placements = [];
    }
    this.state = state;
    const bySlot = new Map(this.points.map((point) => [point.slot, point]));
    for (const point of state.points) bySlot.set(point.slot, point);
    this.points = [...bySlot.values()].sort((a, b) => a.slot - b.slot).slice(-POINTS_MAX);
  }

  /** Keeps an event; returns a move as { from, to, request } once both its ends are known, else null. */
  takeEvent(event) {
    if (event.kind === "placed") {
      this.placements = [event, ...this.placements].slice(0, PLACEMENTS_MAX);
      return this.arrived(event);
    }
    this.events = [event, ...this.events].sort(newestFirst).slice(0, EVENTS_MAX);
    if (event.kind === "moved") {
      const choice = `${event.request} ${event.choice}`;
      capped(this.moves, event.request, (this.moves.get(event.request) ?? 0) + 1);
      capped(this.leaving, choice, event);
    }
    return null;
  }

  arrived(event) {
    const choice = `${event.request} ${event.choice}`;
    const left = this.leaving.get(choice);
    if (left === undefined) return null;
    this.leaving.delete(choice);
    left.to = event.node;
    return { from: left.node, to: event.node, request: event.request, at: event.at };
  }

  movesOf(request) {
    return this.moves.get(request) ?? 0;
  }

  happened(withPlacements) {
    if (!withPlacements) return this.events;
    return [...this.events, ...this.placements].sort(newestFirst).slice(0, EVENTS_MAX);
  }

  /** How many sessions of each class run, and which classes are on which node, as far as this head knows. */
  running() {
    const byClass = new Map();
    const byNode = new Map();
    for (const session of this.state.sessions) {
      if (session.state === "running") byClass.set(session.class, (byClass.get(session.class) ?? 0) + 1);
      for (const node of session.nodes) {
        if (!byNode.has(node)) byNode.set(node, []);
        byNode.get(node).push(session);
      }
    }
    return { byClass, byNode };
  }
}
