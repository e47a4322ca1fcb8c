// Charts over time as SVG: bars, lines and areas on round axes, with a tooltip for pointers and for the keyboard.
// A chart gets its data as `span` = { start, length, points } in milliseconds, and series of one value per point.

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { left: 56, right: 12, top: 10, bottom: 26 };
const SECOND = 1000, MINUTE = 60 * SECOND, HOUR = 60 * MINUTE, DAY = 24 * HOUR;
const WIDEST_BAR = 44;
const DOTS_UP_TO = 60;

// Formats

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const digits = (value, most) => new Intl.NumberFormat("en", { maximumSignificantDigits: most }).format(value);

export function number(value) {
  if (value == null) return "–";
  if (Math.abs(value) >= 1e6) return `${digits(value / 1e6, 3)} M`;
  if (Math.abs(value) >= 1e5) return `${digits(value / 1e3, 3)} k`;
  return Math.abs(value) >= 100 || Number.isInteger(value) ? grouped.format(value) : digits(value, 2);
}

export function duration(ms) {
  if (ms == null) return "–";
  if (ms === 0) return "0";
  if (ms < SECOND) return `${digits(ms, ms < 10 ? 2 : 3)} ms`;
  if (ms < MINUTE) return `${digits(ms / SECOND, 3)} s`;
  if (ms < HOUR) return `${digits(ms / MINUTE, 3)} min`;
  return ms < 2 * DAY ? `${digits(ms / HOUR, 3)} h` : `${digits(ms / DAY, 3)} d`;
}

export const percent = (share) => `${share > 0 && share < .001 ? "< 0.1" : digits(100 * share, 2)} %`;
export const dollars = (usd) => `$${usd === 0 || usd >= 1 ? usd.toFixed(2) : digits(usd, 2)}`;

export function interval(from, to, length) {
  const start = moment(from, length), end = moment(to, length);
  return `${start} to ${start.slice(0, 11) === end.slice(0, 11) ? end.slice(11) || end : end} UTC`;
}

export function moment(ms, length = SECOND) {
  const text = new Date(ms).toISOString();
  if (length >= DAY) return text.slice(0, 10);
  return text.slice(0, length < MINUTE ? 19 : 16).replace("T", " ");
}

// Axes

const TIME_STEPS = [1, 2, 5, 10, 15, 30].map((n) => n * SECOND).concat(
  [1, 2, 5, 10, 15, 30].map((n) => n * MINUTE), [1, 2, 3, 6, 12].map((n) => n * HOUR), [1, 2, 7, 14, 28].map((n) => n * DAY));
const LABEL_WIDTH = 64;
const DURATION_STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500].concat(TIME_STEPS);

function timeTicks(from, to, most) {
  const step = TIME_STEPS.find((candidate) => (to - from) / candidate <= most) || Math.ceil((to - from) / most / DAY) * DAY;
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
  return { step, found };
}

function tickText(at, step) {
  const text = new Date(at).toISOString();
  if (step >= DAY) return text.slice(5, 10);
  if (at % DAY === 0) return text.slice(5, 10);
  return text.slice(11, step < MINUTE ? 19 : 16);
}

function valueTicks(most, isDuration) {
  const power = 10 ** Math.floor(Math.log10(Math.max(most, 1e-9) / 4));
  const steps = isDuration && most > 4 ? DURATION_STEPS : [1, 2, 2.5, 5, 10].map((n) => n * power);
  let step = steps.find((candidate) => most / candidate <= 5) || most / 4;
  if (!isDuration && step < 1) step = 1;
  const found = [];
  for (let value = 0; found.length < 2 || value < most + step * .999; value += step) found.push(value);
  return found;
}

// Elements

function svgElement(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.appendChild(made);
  return made;
}

export function block(parent, kind, text, tag = "div") {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (text != null) made.textContent = text;
  parent.appendChild(made);
  return made;
}

export function legend(host, entries) {
  host.textContent = "";
  for (const { name, color } of entries) block(host, "", name, "span").style.setProperty("--c", `var(${color})`);
}

// A name whose middle gives way: the start and the last characters stay, because ids differ at their ends.
export function middleCut(parent, text, kept = 8) {
  const label = block(parent, "cut");
  label.title = text;
  block(label, "head", text.length > 2 * kept ? text.slice(0, -kept) : text, "span");
  if (text.length > 2 * kept) block(label, "tail", text.slice(-kept), "span");
  return label;
}

// The tooltip

const tip = () => document.getElementById("tip");
export const hideTip = () => { tip().hidden = true; };

export function showTip(x, y, head, rows, below) {
  const box = tip();
  box.textContent = "";
  block(box, "", head, "b");
  for (const { name, color, text } of rows) {
    const row = block(box, "");
    block(row, "", name, "span").style.setProperty("--c", `var(${color})`);
    block(row, "", text, "span");
  }
  if (below) block(box, "", below, "em");
  box.hidden = false;
  const left = x + 16 + box.offsetWidth > innerWidth ? Math.max(4, x - 16 - box.offsetWidth) : x + 16;
  box.style.left = `${left}px`;
  box.style.top = `${Math.max(4, Math.min(y + 12, innerHeight - box.offsetHeight - 8))}px`;
}

export function tipped(node, head, rows, below) {
  node.onpointermove = (event) => showTip(event.clientX, event.clientY, head, rows, below);
  node.onpointerleave = hideTip;
}

// Drawing

// Draw series over a span: { name, color, shape: "bar" | "line" | "area", values, format }. Bars stack in their order.
export function drawChart(host, { span, series, format, isDuration = false, label }) {
  host.textContent = "";
  const stacked = stackBars(series, span.points);
  const most = Math.max(1e-9, ...series.flatMap((one) => (stacked.get(one) || one.values).map((value) => value || 0)));
  const chart = drawFrame(host, span, most, format, isDuration);
  chart.svg.setAttribute("aria-label", label);
  let floor = new Array(span.points).fill(0);
  for (const one of series) {
    if (one.shape !== "bar") continue;
    drawBars(chart, one, floor, stacked.get(one), span);
    floor = stacked.get(one);
  }
  for (const one of series) if (one.shape !== "bar") drawLine(chart, one, span);
  followPointer(host, chart, span, series, stacked, format);
}

function stackBars(series, points) {
  const stacked = new Map();
  let top = new Array(points).fill(0);
  for (const one of series) {
    if (one.shape !== "bar") continue;
    top = one.values.map((value, n) => (value || 0) + top[n]);
    stacked.set(one, top);
  }
  return stacked;
}

function drawFrame(host, span, most, format, isDuration) {
  const width = host.clientWidth || 600, height = host.clientHeight || 210;
  const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
  const svg = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" }, host);
  const marks = valueTicks(most, isDuration), top = marks[marks.length - 1];
  const y = (value) => MARGIN.top + (1 - value / top) * inner.height;
  for (const value of marks) {
    svgElement("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }, svg);
    svgElement("text", { x: MARGIN.left - 8, y: y(value) + 4, "text-anchor": "end" }, svg).textContent = format(value);
  }
  const total = span.points * span.length;
  const atMs = (ms) => MARGIN.left + (ms - span.start) / total * inner.width;
  const ticks = timeTicks(span.start, span.start + total, Math.max(2, Math.floor(inner.width / LABEL_WIDTH)));
  for (const ms of ticks.found) {
    const x = atMs(ms);
    // A label at the right edge would have to move towards the one before it.
    if (x > width - MARGIN.right - 24 && ticks.found.length > 1) continue;
    svgElement("line", { class: "grid", x1: x, x2: x, y1: height - MARGIN.bottom, y2: height - MARGIN.bottom + 4 }, svg);
    svgElement("text", { x, y: height - 6, "text-anchor": "middle" }, svg).textContent = tickText(ms, ticks.step);
  }
  // The middle of a period: what happened in it belongs to no instant of it.
  return { svg, y, width, height, inner, x: (point) => atMs(span.start + (point + .5) * span.length) };
}

function drawBars(chart, { color, values }, floor, top, span) {
  const band = chart.inner.width / span.points;
  const wide = Math.max(1, Math.min(WIDEST_BAR, band - (band > 4 ? 2 : .3)));
  let bars = "";
  values.forEach((value, n) => {
    if (!value) return;
    const left = (chart.x(n) - wide / 2).toFixed(1), low = chart.y(floor[n]).toFixed(1);
    bars += `M${left} ${low}V${chart.y(top[n]).toFixed(1)}h${wide.toFixed(1)}V${low}Z`;
  });
  svgElement("path", { d: bars, fill: `var(${color})` }, chart.svg);
}

// The line passes over a few points without a value, and breaks where there are many. Dots show where values are.
function drawLine(chart, { color, values, shape }, span) {
  const known = values.map((value, n) => [n, value]).filter(([, value]) => value != null);
  if (!known.length) return;
  const widest = Math.max(3, span.points / 20);
  const line = known.map(([n, value], k) => {
    const goesOn = k > 0 && n - known[k - 1][0] <= widest;
    return `${goesOn ? "L" : "M"}${chart.x(n).toFixed(1)} ${chart.y(value).toFixed(1)}`;
  }).join("");
  if (shape === "area") {
    const end = chart.x(known[known.length - 1][0]).toFixed(1), start = chart.x(known[0][0]).toFixed(1);
    svgElement("path", { d: `${line}L${end} ${chart.y(0)}L${start} ${chart.y(0)}Z`, fill: `var(${color})`, opacity: .16 }, chart.svg);
  }
  svgElement("path", { d: line, class: "line", stroke: `var(${color})` }, chart.svg);
  if (known.length > DOTS_UP_TO || known.length === span.points) return;
  for (const [n, value] of known) svgElement("circle", { cx: chart.x(n), cy: chart.y(value), r: 2.5, fill: `var(${color})` }, chart.svg);
}

function followPointer(host, chart, span, series, stacked, format) {
  const cross = svgElement("line", { class: "cross", y1: MARGIN.top, y2: chart.height - MARGIN.bottom, visibility: "hidden" }, chart.svg);
  let at = -1;
  const show = (point, x, y) => {
    at = Math.max(0, Math.min(span.points - 1, point));
    for (const end of ["x1", "x2"]) cross.setAttribute(end, chart.x(at));
    cross.setAttribute("visibility", "visible");
    const rows = series.map((one) => ({ name: one.name, color: one.color, text: (one.format || format)(one.values[at]) }));
    showTip(x, y, moment(span.start + at * span.length, span.length), rows);
  };
  const hide = () => { cross.setAttribute("visibility", "hidden"); hideTip(); };
  host.tabIndex = 0;
  host.onpointermove = (event) => {
    const part = (event.clientX - host.getBoundingClientRect().left - MARGIN.left) / chart.inner.width;
    show(Math.floor(part * span.points), event.clientX, event.clientY);
  };
  host.onpointerleave = host.onblur = hide;
  host.onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step) return;
    event.preventDefault();
    const box = host.getBoundingClientRect(), next = at < 0 ? (step > 0 ? 0 : span.points - 1) : at + step;
    show(next, box.left + chart.x(Math.max(0, Math.min(span.points - 1, next))), box.top + 40);
  };
}

// How busy one thing was in each period: the darker, the busier.
export function drawHeat(parent, span, values, most, label) {
  const svg = svgElement("svg", { class: "heat", viewBox: `0 0 ${span.points} 1`, preserveAspectRatio: "none", "shape-rendering": "crispEdges", role: "img", "aria-label": label }, parent);
  svgElement("rect", { x: 0, y: 0, width: span.points, height: 1, fill: "var(--ground)" }, svg);
  values.forEach((value, n) => {
    if (value > 0) svgElement("rect", { x: n, y: 0, width: 1, height: 1, fill: "var(--good)", "fill-opacity": (.15 + .85 * value / most).toFixed(3) }, svg);
  });
  return svg;
}
