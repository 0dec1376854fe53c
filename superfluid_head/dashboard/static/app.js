// Puts the page together: asks for the key, follows the head's stream, draws once a frame at most, and does what people ask.

import { Charts } from "./charts.js";
import { byId, el, setData, setText } from "./dom.js";
import { FleetMap, showLegend } from "./map.js";
import { Happenings, Queues } from "./queues.js";
import { Sessions } from "./sessions.js";
import { Store } from "./store.js";
import { ask, Refused, Stream } from "./stream.js";
import { showUnknown, showVerdict } from "./verdict.js";
import { clock } from "./words.js";

const KEY = "superfluid-key";
const FRESH_S = 15;
const TOAST_MS = 6_000;

let key = sessionStorage.getItem(KEY) ?? "";
let store = new Store();
let stream = null;
let isDrawing = false;

const map = new FleetMap(askDrain);
const queues = new Queues();
const happenings = new Happenings();
const charts = new Charts();
const sessions = new Sessions({ setClass, cancel: askCancel, why: showWhy });

// --- drawing ---

function draw() {
  isDrawing = false;
  const { state } = store;
  happenings.update(store.happened(byId("placements").checked));
  if (state === null) return;
  const { byClass, byNode } = store.running();
  showVerdict(state);
  map.update(state, byNode);
  queues.update(state, byClass);
  charts.update(store.points, state.slot_s, state.head.now);
  sessions.update(state, (request) => store.movesOf(request), byId("filter").value);
  byId("figure-rate").title = `as of ${clock(state.head.now)}`;
}

function drawSoon() {
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(draw);
}

function setLive(state, words) {
  setData(byId("live"), "state", state);
  setText(byId("live-words"), words);
  byId("console").classList.toggle("stale", state === "lost");
}

// --- the stream ---

function follow() {
  stream?.close();
  store = new Store();
  setLive("off", "Connecting");
  stream = new Stream(key, {
    live: () => setLive("live", "Live"),
    state: (state) => {
      if (store.state === null) {
        showLegend(state.classes);
        openConsole();
      }
      store.takeState(state);
      drawSoon();
    },
    event: (event) => {
      const move = store.takeEvent(event);
      if (move !== null && store.state !== null && store.state.head.now - move.at < FRESH_S) map.move(move);
      drawSoon();
    },
    lost: (words) => {
      setLive("lost", "Trying again");
      if (store.state !== null) showUnknown(`The figures are from ${clock(store.state.head.now)}: ${words}.`);
    },
    refused: (refusal) => openDoor(key ? refusal : null),
  }).start();
}

// --- the door ---

function openDoor(refusal) {
  stream?.close();
  sessionStorage.removeItem(KEY);
  key = "";
  setLive("off", "Not connected");
  byId("console").hidden = true;
  byId("leave").hidden = true;
  byId("door").hidden = false;
  const words = refusal?.status === 403 ? "This key is not an admin's. The dashboard needs one that is." : refusal?.message;
  setText(byId("door-error"), words ?? "");
  byId("key").value = "";
  byId("key").focus();
}

function openConsole() {
  const wasDoor = !byId("door").hidden;
  byId("door").hidden = true;
  byId("console").hidden = false;
  byId("leave").hidden = key === "";
  if (wasDoor) byId("main").focus({ preventScroll: true });
}

async function enter(event) {
  event.preventDefault();
  const given = byId("key").value.trim();
  if (!given) return;
  setText(byId("door-error"), "");
  try {
    await ask(given, "GET", "/v1/fleet");
  } catch (error) {
    if (error instanceof Refused) openDoor(error);
    else setText(byId("door-error"), error.message);
    return;
  }
  key = given;
  sessionStorage.setItem(KEY, key);
  follow();
}

// --- what people ask for ---

let toastTimer = 0;

function toast(words, isBad = false) {
  setText(byId("toast"), words);
  byId("toast").classList.toggle("bad", isBad);
  byId("toast").classList.add("shown");
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => byId("toast").classList.remove("shown"), TOAST_MS);
}

async function doing(words, verb, path, body) {
  try {
    await ask(key, verb, path, body);
    toast(words);
  } catch (error) {
    toast(`Not done: ${error.message}`, true);
    drawSoon();
  }
}

const part = encodeURIComponent;

function setClass(session, name) {
  doing(`${session.id} is ${name} from now on.`, "POST", `/v1/sessions/${part(session.id)}/qos`, { class: name });
}

function confirmed(title, words, yes, then) {
  setText(byId("ask-title"), title);
  setText(byId("ask-words"), words);
  setText(byId("ask-yes"), yes);
  const dialog = byId("ask");
  dialog.returnValue = "no";
  dialog.onclose = () => dialog.returnValue === "yes" && then();
  dialog.showModal();
}

function askCancel(session) {
  const words = `${session.id} of ${session.tenant} ends at once; its client gets an error.`;
  confirmed("Cancel this session?", words, "Cancel the session", () =>
    doing(`${session.id} is cancelled.`, "DELETE", `/v1/sessions/${part(session.id)}`),
  );
}

function askDrain(node) {
  const path = `/v1/fleet/nodes/${part(node.name)}`;
  if (node.is_draining) {
    doing(`${node.name} is used again.`, "POST", `${path}/undrain`);
    return;
  }
  const words = `${node.name} gets no new sessions. What runs there may finish for a while, then moves to other nodes without its readers noticing.`;
  confirmed(`Drain ${node.name}?`, words, "Drain the node", () => doing(`${node.name} drains.`, "POST", `${path}/drain`, {}));
}

async function showWhy(session) {
  setText(byId("why-request"), session.request_id);
  const list = byId("why-list");
  list.replaceChildren(el("p", {}, "Asking the head"));
  byId("why").showModal();
  try {
    const found = await ask(key, "GET", `/v1/fleet/requests/${part(session.request_id)}`);
    list.replaceChildren(...found.placements.map(placement));
  } catch (error) {
    list.replaceChildren(el("p", {}, error.message));
  }
}

function placement(each) {
  const first = each.first_ms === null ? "no token yet" : `first token after ${each.first_ms} ms`;
  return el(
    "section",
    {},
    el("h3", {}, `${each.node}: ${each.reason}`),
    el("p", {}, `Choice ${each.choice}, placement ${each.epoch}, ${each.policy}; waited ${each.waited_ms} ms, ${first}.`),
    el("ul", { class: "mono" }, ...each.scores.map((line) => el("li", {}, line))),
  );
}

byId("door-form").addEventListener("submit", enter);
byId("leave").addEventListener("click", () => openDoor(null));
byId("placements").addEventListener("change", drawSoon);
byId("filter").addEventListener("input", drawSoon);
follow();
