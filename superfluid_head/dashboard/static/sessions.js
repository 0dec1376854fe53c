// What runs and waits, a row a session: another class, an end, and why it runs where it does.

import { byId, el, Keyed, setData, setText } from "./dom.js";
import { age, CLASS_MARKS, count, several } from "./words.js";

const ROWS_MAX = 100;

export class Sessions {
  /** `act` has: setClass(session, name), cancel(session), why(session). */
  constructor(act) {
    this.act = act;
    this.classes = [];
    this.rows = new Keyed(byId("sessions"), () => this.make(), () => byId("filter"));
  }

  make() {
    const part = { session: null };
    const cell = (label, kind, ...inner) => el("td", { role: "cell", "data-label": label, class: kind }, ...inner);
    part.id = el("span", { class: "mono" });
    part.kind = el("span", { class: "session-kind" });
    part.mark = el("span", { class: "cell", "aria-hidden": "true" });
    part.choose = el("select", {}, ...this.classes.map((name) => el("option", { value: name }, name)));
    part.choose.addEventListener("change", () => this.act.setClass(part.session, part.choose.value));
    part.where = el("span");
    part.tenant = el("span");
    part.prompt = el("span");
    part.output = el("span");
    part.age = el("span");
    part.moves = el("span");
    part.why = el("button", { type: "button", class: "quiet small" }, "Why there");
    part.why.addEventListener("click", () => this.act.why(part.session));
    part.cancel = el("button", { type: "button", class: "quiet small danger-text" }, "Cancel");
    part.cancel.addEventListener("click", () => this.act.cancel(part.session));
    part.root = el(
      "tr",
      { role: "row" },
      el("th", { scope: "row", role: "rowheader", class: "session-id" }, part.id, part.kind),
      cell("Class", "session-class", part.mark, part.choose),
      cell("Where", "session-where", part.where),
      cell("Tenant", "session-tenant", part.tenant),
      cell("Prompt", "number", part.prompt),
      cell("Output", "number", part.output),
      cell("Age", "number", part.age),
      cell("Moves", "number", part.moves),
      cell("", "session-tools", part.why, part.cancel),
    );
    return part;
  }

  update(state, movesOf, filter) {
    this.classes = state.classes;
    const wanted = filter.trim().toLowerCase();
    const matching = state.sessions.filter((each) => !wanted || text(each).includes(wanted));
    const shown = matching.slice(0, ROWS_MAX);
    this.rows.update(shown, (session) => session.id, (part, session) => this.fill(part, session, state.head.now, movesOf));
    byId("sessions-empty").hidden = shown.length > 0;
    setText(byId("sessions-empty"), state.sessions.length ? "No session matches." : "Nothing runs and nothing waits.");
    const hidden = state.sessions_total - shown.length;
    setText(byId("sessions-note"), `${several(state.sessions_total, "session")}${hidden > 0 ? `, ${shown.length} shown` : ""}`);
  }

  fill(part, session, now, movesOf) {
    part.session = session;
    setData(part.root, "state", session.state);
    setText(part.id, session.id);
    part.id.title = `${session.id}, request ${session.request_id}`;
    setText(part.kind, `${session.model}${session.stream ? "" : ", not streamed"}${session.choices > 1 ? `, ${session.choices} choices` : ""}`);
    setData(part.mark, "class", session.class);
    setText(part.mark, CLASS_MARKS[session.class] ?? "");
    part.choose.setAttribute("aria-label", `Class of ${session.id}`);
    if (document.activeElement !== part.choose && part.choose.value !== session.class) part.choose.value = session.class;
    setText(part.where, session.nodes.length ? session.nodes.join(", ") : "waits");
    setText(part.tenant, session.tenant);
    setText(part.prompt, count(session.prompt_tokens));
    setText(part.output, count(session.completion_tokens));
    setText(part.age, age(now - session.created));
    setText(part.moves, count(movesOf(session.request_id)));
    part.why.setAttribute("aria-label", `Why there: ${session.id}`);
    part.cancel.setAttribute("aria-label", `Cancel: ${session.id}`);
  }
}

function text(session) {
  return [session.id, session.request_id, session.class, session.tenant, session.model, session.state, ...session.nodes].join(" ").toLowerCase();
}
