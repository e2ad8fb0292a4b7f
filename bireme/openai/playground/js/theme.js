// Light and dark: the system's choice until the user makes one.

import { announce } from "./announcer.js";
import { icon } from "./dom.js";
import { remember } from "./storage.js";

const SYSTEM = matchMedia("(prefers-color-scheme: dark)");

/** Make the button switch between light and dark. */
export function bindTheme(button) {
  const root = document.documentElement;
  const current = () => root.dataset.theme ?? (SYSTEM.matches ? "dark" : "light");
  const show = () => {
    const other = current() === "dark" ? "light" : "dark";
    button.setAttribute("aria-label", `Use the ${other} theme`);
    button.title = `Use the ${other} theme`;
    button.replaceChildren(icon(other === "dark" ? "moon" : "sun"));
  };
  button.addEventListener("click", () => {
    root.dataset.theme = current() === "dark" ? "light" : "dark";
    remember("theme", root.dataset.theme);
    announce(`${root.dataset.theme} theme`);
    show();
  });
  SYSTEM.addEventListener("change", show);
  show();
}
