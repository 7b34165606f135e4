"use strict";
// Elements and numbers. Text is always set as text: nothing from a run is read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(3)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (value !== 0 && size < 1e-3) return value.toExponential(1).replaceAll("-", "−");
  const digits = size >= 1000 || Number.isInteger(value) ? 0 : size >= 100 ? 1 : size >= 1 ? 2 : 3;
  return value.toLocaleString("en-US", { maximumFractionDigits: digits }).replace("-", "−");
}

const percent = (share) => (share > 0 && share < 0.01 ? "<1%" : `${Math.round(share * 100)}%`);

function table(head, rows, numeric = [], classes = () => null) {
  const cell = (tag) => (value, at) => el(tag, { class: numeric.includes(at) ? "number" : null }, value ?? "");
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": head.filter(Boolean).join(", ") },
    el("table", {},
      el("thead", {}, el("tr", {}, head.map(cell("th")))),
      el("tbody", {}, rows.map((row) => el("tr", { class: classes(row) }, row.map(cell("td")))))));
}

function section(id, title, about, ...children) {
  return el("section", { id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title` }, title), about && el("p", { class: "about" }, about), children);
}

function select(label, options, change) {
  const box = el("select", { onchange: change }, options.map(([value, text]) => el("option", { value }, text)));
  return [el("label", {}, label, box), box];
}
