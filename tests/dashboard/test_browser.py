"""The dashboard in a real Chromium before a real fleet: what it shows, by keyboard, by axe-core, on a phone, and while nodes die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.conftest import KEY, NODES, Fleet

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(120)]

PATIENCE_MS = 20_000
AXE_RUN = """axe.run(document, {resultTypes: ["violations"]}).then((found) =>
  found.violations.map((each) => `${each.id}: ${each.help}: ${each.nodes.map((node) => node.target).slice(0, 3).join(" | ")}`))"""


class Screen:
    """A page in a context of its own, and what it complained about."""

    def __init__(self, browser: Any, fleet: Fleet, **options: Any) -> None:
        size = {"width": 1440, "height": 900}
        self.context = browser.new_context(**{"viewport": size, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.fleet = fleet
        self.complaints: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._on_console)

    def _on_console(self, message: Any) -> None:
        is_expected = "Failed to load resource" in message.text or "net::ERR" in message.text
        if message.type in ("error", "warning") and not is_expected:
            self.complaints.append(message.text)

    def open(self, path: str = "/") -> Any:
        self.page.goto(self.fleet.url + path)
        self.page.wait_for_selector("#door:not([hidden])")
        return self.page

    def enter(self, path: str = "/") -> Any:
        page = self.open(path)
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector(".tile >> nth=2")
        return page

    def says(self, selector: str, words: str) -> None:
        """Wait until an element holds these words."""
        self.page.locator(selector).filter(has_text=words).first.wait_for()

    def violations(self, axe: str) -> list[str]:
        self.page.evaluate(axe)
        return list(self.page.evaluate(AXE_RUN))


@pytest.fixture
def screen(browser: Any, fleet: Fleet) -> Iterator[Screen]:
    made = Screen(browser, fleet)
    yield made
    made.context.close()
    assert not made.complaints


def class_of(fleet: Fleet, session: str) -> str | None:
    return next((s["class"] for s in fleet.get("/v1/sessions")["data"] if s["id"] == session), None)


def becomes(fleet: Fleet, session: str, wanted: str | None) -> bool:
    for _ in range(60):
        if class_of(fleet, session) == wanted:
            return True
        fleet.rig.sleep(0.05)
    return False


def test_a_wrong_key_is_told_and_the_right_one_stays_in_the_tab(screen: Screen) -> None:
    page = screen.open()
    assert page.evaluate("document.activeElement.id") == "key"
    page.fill("#key", "another-key")
    page.keyboard.press("Enter")
    screen.says("#door-error", "Missing or wrong API key")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector(".tile >> nth=2")
    kept = "[JSON.stringify({...sessionStorage}), JSON.stringify({...localStorage}), document.cookie, location.href]"
    session, local, cookie, address = page.evaluate(kept)
    assert KEY in session
    assert KEY not in local + cookie + address
    page.reload()
    page.wait_for_selector(".tile >> nth=2")
    page.click("#leave")
    page.wait_for_selector("#door:not([hidden])")
    assert page.evaluate("sessionStorage.length") == 0


def test_it_shows_the_fleet_live_in_light_and_dark_and_axe_finds_nothing(
    screen: Screen, axe: str, shots: Path
) -> None:
    page = screen.open()
    assert screen.violations(axe) == []
    page = screen.enter()
    screen.says("#live", "Live")
    for name in NODES:
        screen.says(".tile-name", name)
    page.wait_for_selector("#sessions tr >> nth=3")
    page.wait_for_selector(".line.strong >> nth=2")
    assert page.inner_text("#figure-rate") != "0"
    assert screen.violations(axe) == []
    page.screenshot(path=shots / "light.png")
    light = page.evaluate("getComputedStyle(document.body).color")
    page.click("#theme")
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("getComputedStyle(document.body).color") != light
    assert screen.violations(axe) == []
    page.screenshot(path=shots / "dark.png")
    page.locator("summary").first.click()
    page.wait_for_selector("details[open] tbody tr")
    assert screen.violations(axe) == []


def test_the_system_decides_between_light_and_dark_until_somebody_does(screen: Screen) -> None:
    page = screen.open()
    page.emulate_media(color_scheme="light")
    light = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") != light
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == light


def test_a_phone_shows_it_without_scrolling_sideways(
    browser: Any, fleet: Fleet, axe: str, shots: Path
) -> None:
    phone = Screen(browser, fleet, viewport={"width": 360, "height": 740}, has_touch=True)
    page = phone.enter("/dashboard")
    page.wait_for_selector("#sessions tr >> nth=1")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    small = page.evaluate(
        "[...document.querySelectorAll('button, select, input')].filter((each) => each.checkVisibility()"
        " && each.type !== 'checkbox' && each.getBoundingClientRect().height < 32).map((each) => each.id)"
    )
    assert small == []
    assert phone.violations(axe) == []
    page.screenshot(path=shots / "phone.png")
    assert not phone.complaints
    phone.context.close()


def test_everything_is_reached_and_done_by_keyboard(screen: Screen, fleet: Fleet, axe: str) -> None:
    page = screen.enter()
    page.reload()
    page.wait_for_selector("#sessions tr >> nth=1")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"

    session, wanted = fleet.long_session(), "background"
    page.fill("#filter", session)
    page.wait_for_selector(f'select[aria-label="Class of {session}"]')
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.ariaLabel") == f"Class of {session}"
    page.keyboard.type(wanted[0])
    assert becomes(fleet, session, wanted)
    screen.says("#toast", f"{session} is {wanted} from now on")

    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("#why[open] h3")
    assert "node-" in page.inner_text("#why-list")
    assert screen.violations(axe) == []
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.ariaLabel") == f"Why there: {session}"

    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("#ask[open]")
    assert screen.violations(axe) == []
    page.keyboard.press("Escape")
    assert class_of(fleet, session) == wanted, "nothing was cancelled"
    page.keyboard.press("Enter")
    page.wait_for_selector("#ask[open]")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert becomes(fleet, session, None)
    screen.says("#toast", "is cancelled")
    page.wait_for_selector("#filter:focus")


def test_a_node_is_drained_and_used_again(screen: Screen, fleet: Fleet) -> None:
    page = screen.enter()
    page.click('button[aria-label="Drain: node-2"]')
    page.click("#ask-yes")
    screen.says('.tile[data-state="draining"]', "node-2")
    screen.says("#events", "node-2 was told to drain")
    page.click('button[aria-label="Use again: node-2"]')
    screen.says('.tile[data-state="up"]', "node-2")


def test_a_node_that_dies_is_seen_and_its_sessions_are_seen_to_move(
    screen: Screen, fleet: Fleet, shots: Path
) -> None:
    page = screen.enter()
    screen.says('.tile[data-state="up"]', "node-1")
    fleet.failures.clear()
    while not any("node-1" in each["nodes"] for each in fleet.get("/v1/sessions")["data"]):
        fleet.rig.sleep(0.05)
    fleet.rig.named("node-1").kill()
    page.wait_for_selector("#paths .trail", state="attached")
    page.screenshot(path=shots / "moves.png")
    screen.says('.tile[data-state="down"]', "node-1")
    screen.says("#verdict-title", "2 of 3 nodes serve")
    screen.says("#spoken", "node-1 is down")
    screen.says("#events", "moves from node-1 to node-")
    assert page.inner_text("#figure-moves") != "0"
    fleet.restart("node-1")
    screen.says('.tile[data-state="up"]', "node-1")
    page.wait_for_selector("#paths[hidden]", state="attached")
    assert fleet.failures == []


def test_without_motion_nothing_moves_and_moves_are_seen_all_the_same(
    browser: Any, fleet: Fleet
) -> None:
    still = Screen(browser, fleet, reduced_motion="reduce")
    page = still.enter()
    assert page.evaluate("document.getAnimations().length") == 0
    moved = """async () => {
      const { FleetMap } = await import("/dashboard/map.js");
      const map = new FleetMap(() => {});
      const state = { nodes: ["a", "b"].map((name) => ({ name, state: "up", is_up: true, models: [], address: "", lanes: 1,
        lanes_busy: 0, blocks: 1, blocks_used: 0, blocks_cached: 0, tokens_per_s: 0, prefill_rate: 0, queued: 0, circuit: "closed" })) };
      map.update(state, new Map());
      for (let time = 0; time < 40; time += 1) map.move({ from: "a", to: "b" });
      return [map.paths.length, document.querySelectorAll("#paths .comet").length, document.getAnimations().length];
    }"""
    trails, comets, animations = page.evaluate(moved)
    assert (trails, comets, animations) == (16, 0, 0)
    assert not still.complaints
    still.context.close()


def test_what_the_page_keeps_is_bounded(screen: Screen) -> None:
    page = screen.open()
    kept = """async () => {
      const { Store } = await import("/dashboard/store.js");
      const store = new Store();
      const state = (slot) => ({ head: { started: 1 }, sessions: [], points: [{ slot, at: slot }] });
      for (let number = 0; number < 9000; number += 1) {
        store.takeState(state(number));
        store.takeEvent({ kind: "moved", request: `r${number}`, choice: 0, sequence: 2 * number, node: "a" });
        if (number % 2) store.takeEvent({ kind: "placed", request: `r${number}`, choice: 0, sequence: 2 * number + 1, node: "b" });
      }
      return [store.points.length, store.events.length, store.placements.length, store.moves.size, store.leaving.size, store.happened(true).length];
    }"""
    assert page.evaluate(kept) == [120, 120, 60, 2_048, 2_047, 120]


def test_names_from_elsewhere_stay_text(screen: Screen) -> None:
    page = screen.open()
    shown = """async () => {
      const { Happenings } = await import("/dashboard/queues.js");
      const evil = "<img src=x onerror=window.stolen=1>";
      new Happenings().update([{ kind: "node-down", node: evil, reason: evil, at: 1, sequence: 1 }]);
      return [document.querySelectorAll("#events img").length, document.getElementById("events").textContent.includes(evil), window.stolen ?? 0];
    }"""
    assert page.evaluate(shown) == [0, True, 0]


def test_a_head_that_is_gone_is_told_and_the_page_comes_back_with_it(
    screen: Screen, fleet: Fleet
) -> None:
    page = screen.enter()
    screen.says("#live", "Live")
    place = fleet.url.removeprefix("http://")
    fleet.head.kill()
    screen.says("#live", "Trying again")
    screen.says("#verdict-title", "Out of touch")
    assert page.locator("#console.stale").count() == 1
    fleet.head = fleet.start_head(place)
    screen.says("#live", "Live")
    screen.says(".tile-name", "node-0")
    assert page.locator("#console.stale").count() == 0
