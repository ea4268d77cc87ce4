// Runs before anything is drawn, so that no page flashes in the other theme.
"use strict";
try {
  const chosen = localStorage.getItem("hybridtrain-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch (_error) { /* a browser may forbid a file to remember */ }
