// The only way into the document: elements, attributes and text. No markup is ever made from a string.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, String(value));
  }
  node.append(...children);
  return node;
}

export const el = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);

export const shape = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

/** Writes only what changed, so that nothing that a person selected or a reader announces is touched for nothing. */
export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

export function setData(node, name, value) {
  const wanted = String(value);
  if (node.dataset[name] !== wanted) node.dataset[name] = wanted;
}

/** Keeps a list of elements in step with keyed data: elements stay the same ones, so focus and open menus stay too. */
export class Keyed {
  /** `next` says where the focus goes when the element that had it is gone. */
  constructor(parent, make, next = () => null) {
    this.parent = parent;
    this.make = make;
    this.next = next;
    this.parts = new Map();
  }

  update(items, keyOf, fill) {
    const wanted = new Set(items.map(keyOf));
    for (const [key, part] of this.parts) {
      if (wanted.has(key)) continue;
      const hadFocus = part.root.contains(document.activeElement);
      part.root.remove();
      this.parts.delete(key);
      if (hadFocus) this.next()?.focus();
    }
    let before = this.parent.firstElementChild;
    for (const item of items) {
      const key = keyOf(item);
      let part = this.parts.get(key);
      if (part === undefined) {
        part = this.make(item);
        this.parts.set(key, part);
      }
      if (part.root === before) before = before.nextElementSibling;
      else this.parent.insertBefore(part.root, before);
      fill(part, item);
    }
  }
}

export const prefersStill = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
