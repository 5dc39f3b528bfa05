// Numbers and times in words, and elements whose texts are texts: nothing here or elsewhere parses HTML.
"use strict";
const Page = {};

// element("p", {class: "quiet"}, "text", child): attributes by name; a child that is no element becomes text.
Page.element = function (tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) made.append(child instanceof Node ? child : String(child));
  }
  return made;
};

Page.byId = (id) => document.getElementById(id);

Page.put = (id, ...children) => Page.byId(id).replaceChildren(...children.flat().filter((child) => child !== null));

Page.number = function (value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(2);
  if (Number.isInteger(value) && size < 1e6) return String(value);
  return value.toFixed(size < 1 ? 3 : size < 100 ? 2 : 0);
};

Page.seconds = function (value) {
  if (value === null || value === undefined) return "–";
  if (value < 100) return value.toFixed(value < 10 ? 1 : 0) + " s";
  const minutes = Math.floor(value / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  if (minutes < 60) return minutes + " min " + String(Math.floor(value % 60)).padStart(2, "0") + " s";
  return days > 1 ? days + " d " + (hours % 24) + " h" : hours + " h " + String(minutes % 60).padStart(2, "0") + " min";
};

Page.bytes = function (value) {
  if (value === null || value === undefined) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000 || unit === "GB") return (unit === "B" ? value.toFixed(0) : value.toPrecision(3)) + " " + unit;
    value /= 1000;
  }
};

Page.dollars = (value) => (value === null || value === undefined ? "–" : "$" + value.toFixed(2));

Page.clock = (unixTime) => new Date(unixTime * 1000).toLocaleString();

Page.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// A table in a region that can be scrolled with the keyboard.   rows: of texts; textual: columns that are words.
Page.table = function (label, head, rows, textual = []) {
  const kind = (i) => (textual.includes(i) ? {class: "text"} : {});
  const top = Page.element("tr", {}, head.map((name, i) => Page.element("th", {scope: "col", ...kind(i)}, name)));
  const body = rows.map((row) => Page.element("tr", {}, row.map((cell, i) => Page.element("td", kind(i), cell))));
  return Page.element("div", {class: "wide tall", tabindex: "0", role: "region", "aria-label": label},
    Page.element("table", {}, Page.element("thead", {}, top), Page.element("tbody", {}, body)));
};

// <details> whose content is made when it is opened first: a table of 1,000 rows costs nothing before.
Page.folded = function (title, make) {
  const details = Page.element("details", {}, Page.element("summary", {}, title));
  details.addEventListener("toggle", () => {
    if (details.open) details.replaceChildren(details.firstElementChild, make());
  });
  return details;
};
