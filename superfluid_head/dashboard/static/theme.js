"use strict";
// Before the first paint: the theme that was chosen here, or the system's. The only thing that outlives the tab.
(() => {
  const KEY = "superfluid-theme";
  const ORDER = ["auto", "light", "dark"];

  function read() {
    try {
      const found = localStorage.getItem(KEY);
      return ORDER.includes(found) ? found : "auto";
    } catch {
      return "auto";
    }
  }

  function show(theme) {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  }

  let theme = read();
  show(theme);

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const label = () => {
      button.textContent = `Theme: ${theme}`;
    };
    label();
    button.addEventListener("click", () => {
      theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
      show(theme);
      label();
      try {
        localStorage.setItem(KEY, theme);
      } catch {
        // private windows may refuse: the choice then lasts as long as the page
      }
    });
  });
})();
