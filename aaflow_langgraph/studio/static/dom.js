// Elements, made so that nothing from outside is ever read as markup: text only goes through text nodes, and no character of it is obeyed.

import { plain } from "./format.js";

const SAID = new Set(["title", "aria-label"]);
const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [key, to] of Object.entries(value)) element.style.setProperty(`--${key}`, to);
    else element.setAttribute(name, value === true ? "" : SAID.has(name) ? plain(value) : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(plain(child)));
  }
  return element;
}

export const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
export const svg = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);
export const at = (id) => document.getElementById(id);

/** Replace what is in an element and keep the focus on what has the same data-key. */
export function show(element, ...children) {
  const focused = element.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : plain(child))));
  if (focused !== undefined) {
    const again = [...element.querySelectorAll("[data-key]")].find((one) => one.dataset.key === focused);
    again?.focus({ preventScroll: true });
  }
}
