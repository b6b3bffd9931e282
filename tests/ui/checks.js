// Accessibility and layout checks. The body of a function that returns a list of problems.

const problems = [];
const seen = (element) => {
  const box = element.getBoundingClientRect();
  const style = getComputedStyle(element);
  return box.width > 1 && box.height > 1 && style.visibility !== "hidden" && style.display !== "none";
};
const name = (element) =>
  (element.getAttribute("aria-label") || element.labels?.[0]?.textContent || element.textContent || "").trim();
const called = (element) => element.tagName.toLowerCase() + (element.id ? "#" + element.id : "") + " \"" + element.textContent.trim().slice(0, 30) + "\"";

// === structure ===

if (!document.documentElement.lang) problems.push("the document has no language");
if (!document.title) problems.push("the document has no title");
for (const tag of ["header", "main", "h1"]) {
  if (document.querySelectorAll(tag).length !== 1) problems.push("expected exactly one " + tag);
}
let level = 0;
for (const heading of document.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
  if (heading.closest("dialog:not([open])")) continue;
  const own = Number(heading.tagName[1]);
  if (own > level + 1) problems.push("a heading level is skipped before " + called(heading));
  if (!heading.textContent.trim()) problems.push("a heading is empty");
  level = own;
}
const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
for (const id of new Set(ids)) if (ids.filter((other) => other === id).length > 1) problems.push("duplicate id " + id);
for (const attribute of ["aria-labelledby", "aria-controls", "for"]) {
  for (const element of document.querySelectorAll("[" + attribute + "]")) {
    if (!document.getElementById(element.getAttribute(attribute))) problems.push(attribute + " of " + called(element) + " refers to no element");
  }
}

// === names ===

for (const element of document.querySelectorAll("button, a, input, [role=progressbar]")) {
  if (!element.hidden && !name(element)) problems.push(called(element) + " has no name");
  if (element.tabIndex > 0) problems.push(called(element) + " has a positive tabindex");
}
for (const table of document.querySelectorAll("table")) {
  if (!table.caption?.textContent.trim()) problems.push("a table has no caption");
  for (const head of table.querySelectorAll("th")) {
    if (!head.scope) problems.push("a head of " + table.id + " has no scope");
    if (!name(head)) problems.push("a head of " + table.id + " is empty");
  }
  if (!table.closest("[hidden]") && !table.querySelector("tbody th")) problems.push("the table " + table.id + " has no rows with a name");
}
for (const picture of document.querySelectorAll("svg, .bar, .fill")) {
  if (!picture.closest("[aria-hidden=true]")) problems.push("a graphic is neither hidden nor named");
}
for (const control of document.querySelectorAll("button, input")) {
  const box = control.getBoundingClientRect();
  if (seen(control) && (box.height < 24 || box.width < 24)) problems.push(called(control) + " is smaller than 24 px");
}

// === contrast ===

const channel = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const color = (text) => {
  const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number);
  return [r, g, b, a];
};
const over = (top, below) => top.slice(0, 3).map((value, index) => value * top[3] + below[index] * (1 - top[3]));
const ground = (element) => {
  const layers = [];
  for (let at = element; at; at = at.parentElement) layers.push(color(getComputedStyle(at).backgroundColor));
  return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
let texts = 0;
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.textContent.trim() || !seen(element) || element.closest("script, noscript, .unseen")) continue;
  texts += 1;
  const style = getComputedStyle(element);
  const behind = ground(element);
  const [dark, light] = [luminance(over(color(style.color), behind)), luminance(behind)].sort((a, b) => a - b);
  const ratio = (light + 0.05) / (dark + 0.05);
  const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && Number(style.fontWeight) >= 700);
  if (ratio < (large ? 3 : 4.5)) problems.push(called(element) + " has a contrast of " + ratio.toFixed(2));
}
if (texts < 60) problems.push("only " + texts + " visible texts: the page is not drawn");

// === fit ===

const page = document.documentElement;
if (page.scrollWidth > page.clientWidth) problems.push("it scrolls sideways: " + page.scrollWidth + " in " + page.clientWidth);
for (const box of document.querySelectorAll(".station, .panel, .now, .top")) {
  const edge = box.getBoundingClientRect().right + 0.5;
  for (const inside of box.querySelectorAll("*")) {
    if (!inside.closest(".flow, .unseen, svg") && inside.getBoundingClientRect().right > edge) problems.push(called(inside) + " overflows its box");
  }
}
for (const text of document.querySelectorAll("dt, dd, th, td, .flow span, button")) {
  if (seen(text) && text.scrollWidth > text.clientWidth + 1 && getComputedStyle(text).display !== "inline" && !text.querySelector(".unseen")) {
    problems.push(called(text) + " is cut off");
  }
}
return problems;
