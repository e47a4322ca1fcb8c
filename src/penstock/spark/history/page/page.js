"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const COUNTS = [["completed", "--good"], ["failed", "--bad"], ["cancelled", "--calm"]];
const LINES = [["enqueued", "--in"], ["retried", "--warn"]];
const ENDS = [["p50", "--p50"], ["p95", "--p95"], ["p99", "--p99"]];
const MARGIN = { left: 52, right: 14, top: 10, bottom: 24 };

const short = (value) => String(Number(value.toPrecision(3)));
const number = (value) => value == null ? "–" : value >= 1e6 ? short(value / 1e6) + " M"
  : value >= 1e4 ? short(value / 1e3) + " k" : Number.isInteger(value) ? value.toLocaleString("en") : value.toPrecision(3);
const duration = (ms) => ms == null ? "–" : ms < 1000 ? (ms < 10 ? short(ms) : Math.round(ms)) + " ms"
  : ms < 60000 ? short(ms / 1000) + " s" : ms < 3600000 ? short(ms / 60000) + " min" : short(ms / 3600000) + " h";
const share = (value) => value == null ? "–" : value < 10 ? value.toFixed(2) : value.toFixed(1);
const iso = (ms) => new Date(ms).toISOString();
const moment = (ms) => data.grain === "day" ? iso(ms).slice(0, 10) : iso(ms).slice(0, 16).replace("T", " ");
const at = (point) => data.start + point * data.length;

function element(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.appendChild(made);
  return made;
}
function block(parent, kind, text) {
  const made = document.createElement("div");
  made.className = kind;
  if (text != null) made.textContent = text;
  parent.appendChild(made);
  return made;
}

// A value for each point; where nothing happened, what `empty` says: 0, null, or "keep" for the value before.
function dense(series, name, empty) {
  const values = new Array(data.points).fill(empty === 0 ? 0 : null);
  if (series) series.at.forEach((point, n) => { if (series[name][n] != null) values[point] = series[name][n]; });
  if (empty === "keep") for (let n = 1, last = values[0] ?? 0; n < values.length; n++) last = values[n] = values[n] ?? last;
  if (empty === "keep") values[0] = values[0] ?? 0;
  return values;
}
function backlog(queue) {
  const queues = queue ? [queue] : Object.keys(data.series).filter(Boolean);
  const sums = new Array(data.points).fill(0);
  for (const name of queues) dense(data.series[name], "backlog", "keep").forEach((value, n) => { sums[n] += value; });
  return sums;
}
const total = (values) => values.reduce((sum, value) => sum + (value || 0), 0);

function ticks(most, isTime) {
  const steps = isTime ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 30000, 60000, 120000, 300000, 600000, 1200000, 1800000, 3600000, 7200000, 14400000, 43200000, 86400000] : null;
  let step = 1;
  if (steps) step = steps.find((candidate) => most / candidate <= 5) || most / 4;
  else { const power = 10 ** Math.floor(Math.log10(Math.max(most, 1) / 4)); step = Math.max([1, 2, 5, 10].map((n) => n * power).find((n) => most / n <= 5), 1); }
  const found = [];
  for (let value = 0; value <= most + step * .999; value += step) found.push(value);
  return found;
}

function frame(host, most, format, isTime) {
  host.textContent = "";
  const width = host.clientWidth || 600, height = host.clientHeight || 210;
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" }, host);
  const marks = ticks(Math.max(most, 1), isTime), top = marks[marks.length - 1];
  const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
  const x = (point) => MARGIN.left + (data.points > 1 ? point / (data.points - 1) : .5) * inner.width;
  const y = (value) => MARGIN.top + (1 - value / top) * inner.height;
  for (const value of marks) {
    element("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }, svg);
    element("text", { x: MARGIN.left - 8, y: y(value) + 4, "text-anchor": "end" }, svg).textContent = format(value);
  }
  const labels = Math.max(2, Math.min(Math.floor(inner.width / 110), data.points));
  const days = data.points * data.length > 2 * 86400000;
  for (let n = 0; n < labels; n++) {
    const point = labels > 1 ? Math.round(n * (data.points - 1) / (labels - 1)) : 0;
    const text = iso(at(point));
    element("text", { x: x(point), y: height - 6, "text-anchor": n === 0 ? "start" : n === labels - 1 ? "end" : "middle" }, svg).textContent =
      data.grain === "day" ? text.slice(5, 10) : days ? text.slice(5, 13).replace("T", " ") + "h" : text.slice(11, 16);
  }
  return { svg, x, y, width, height, inner };
}

function path(values, chart, floor) {
  let drawn = "", open = false;
  values.forEach((value, n) => {
    if (value == null) { open = false; return; }
    const lone = !open && values[n + 1] == null;
    drawn += `${open ? "L" : "M"}${chart.x(n).toFixed(1)} ${chart.y(value).toFixed(1)}` + (lone ? "h.01" : "");
    open = true;
  });
  return floor == null ? drawn : `M${chart.x(0)} ${chart.y(floor)}` + drawn.replace("M", "L") + `L${chart.x(values.length - 1)} ${chart.y(floor)}Z`;
}

function hover(host, chart, rows) {
  const cross = element("line", { class: "cross", y1: MARGIN.top, y2: chart.height - MARGIN.bottom, visibility: "hidden" }, chart.svg);
  const dots = rows.map(([, color]) => element("circle", { r: 3.5, fill: `var(${color})`, visibility: "hidden" }, chart.svg));
  const leave = () => { cross.setAttribute("visibility", "hidden"); dots.forEach((dot) => dot.setAttribute("visibility", "hidden")); $("tip").hidden = true; };
  host.onpointerleave = leave;
  host.onpointermove = (event) => {
    const box = host.getBoundingClientRect();
    const part = (event.clientX - box.left - MARGIN.left) / chart.inner.width;
    const point = Math.max(0, Math.min(data.points - 1, Math.round(part * (data.points - 1))));
    cross.setAttribute("x1", chart.x(point)); cross.setAttribute("x2", chart.x(point)); cross.setAttribute("visibility", "visible");
    rows.forEach(([, , values, , place], n) => {
      const value = (place || values)[point];
      dots[n].setAttribute("visibility", value == null ? "hidden" : "visible");
      if (value != null) { dots[n].setAttribute("cx", chart.x(point)); dots[n].setAttribute("cy", chart.y(value)); }
    });
    tell(event, moment(at(point)), rows.map(([name, color, values, format]) => [name, color, format(values[point])]));
  };
}
function tell(event, head, rows, below) {
  const tip = $("tip");
  tip.textContent = "";
  const title = document.createElement("b"); title.textContent = head; tip.appendChild(title);
  for (const [name, color, value] of rows) {
    const row = block(tip, "");
    const label = document.createElement("span"); label.textContent = name; label.style.setProperty("--c", `var(${color})`); row.appendChild(label);
    const shown = document.createElement("span"); shown.textContent = value; row.appendChild(shown);
  }
  if (below) { const note = document.createElement("em"); note.textContent = below; tip.appendChild(note); }
  tip.hidden = false;
  const left = event.clientX + 16 + tip.offsetWidth > innerWidth ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 8)) + "px";
}
function tipped(node, head, rows, below) {
  node.onpointermove = (event) => tell(event, head, rows, below);
  node.onpointerleave = () => { $("tip").hidden = true; };
}
function legend(id, entries) {
  $(id).textContent = "";
  for (const [name, color] of entries) {
    const made = document.createElement("span"); made.textContent = name; made.style.setProperty("--c", `var(${color})`); $(id).appendChild(made);
  }
}

function throughput(series) {
  const host = $("throughput");
  const stacks = COUNTS.map(([name, color]) => [name, color, dense(series, name, 0)]);
  const lines = LINES.map(([name, color]) => [name, color, dense(series, name, 0)]);
  const tops = [];
  stacks.reduce((base, [, , values]) => { const top = values.map((value, n) => value + base[n]); tops.push([base, top]); return top; }, new Array(data.points).fill(0));
  const most = Math.max(...tops[tops.length - 1][1], ...lines.flatMap(([, , values]) => values));
  const chart = frame(host, most, number);
  const wide = Math.max(1, chart.inner.width / Math.max(data.points, 1) - (data.points > 150 ? .4 : 2));
  stacks.forEach(([, color, values], k) => {
    let bars = "";
    values.forEach((value, n) => {
      if (!value) return;
      const x = Math.min(Math.max(chart.x(n) - wide / 2, MARGIN.left), chart.width - MARGIN.right - wide);
      bars += `M${x.toFixed(1)} ${chart.y(tops[k][0][n]).toFixed(1)}V${chart.y(tops[k][1][n]).toFixed(1)}h${wide.toFixed(1)}V${chart.y(tops[k][0][n]).toFixed(1)}Z`;
    });
    element("path", { d: bars, fill: `var(${color})`, opacity: .9 }, chart.svg);
  });
  for (const [, color, values] of lines) element("path", { d: path(values, chart), fill: "none", stroke: `var(${color})`, "stroke-width": 1.8, "stroke-linejoin": "round" }, chart.svg);
  legend("throughput-legend", [...COUNTS, ...LINES]);
  hover(host, chart, [...stacks.map(([name, color, values], k) => [name, color, values, number, tops[k][1]]), ...lines.map((line) => [...line, number])]);
}
function timing(what, series) {
  const host = $(what);
  const lines = ENDS.map(([end, color]) => [end, color, dense(series, `${what}_${end}`, null)]);
  const chart = frame(host, Math.max(0, ...lines.flatMap(([, , values]) => values.map((value) => value || 0))), duration, true);
  for (const [, color, values] of [...lines].reverse()) element("path", { d: path(values, chart), fill: "none", stroke: `var(${color})`, "stroke-width": 1.8, "stroke-linejoin": "round", "stroke-linecap": "round" }, chart.svg);
  legend(`${what}-legend`, ENDS);
  hover(host, chart, lines.map((line) => [...line, duration]));
}
function backlogs(queue) {
  const values = backlog(queue), host = $("backlog");
  const chart = frame(host, Math.max(...values, 1), number);
  element("path", { d: path(values, chart, 0), fill: "var(--in)", opacity: .16 }, chart.svg);
  element("path", { d: path(values, chart), fill: "none", stroke: "var(--in)", "stroke-width": 1.8, "stroke-linejoin": "round" }, chart.svg);
  legend("backlog-legend", [["open jobs", "--in"]]);
  hover(host, chart, [["open jobs", "--in", values, number]]);
}
function named(parent, name, below) {
  const row = block(parent, "row"), label = block(row, "name", name || "(none)");
  if (below) { const small = document.createElement("small"); small.textContent = below; label.appendChild(small); }
  label.title = name;
  return row;
}
const chosen = (rows, queue) => rows.filter((row) => !queue || (row.queues ? row.queues.includes(queue) : row.queue === queue));
function empty(host, rows, text) {
  host.textContent = "";
  if (!rows.length) block(host, "none", text);
  return rows.length === 0;
}
function causes(queue) {
  const rows = chosen(data.causes, queue).slice(0, 10), host = $("causes");
  legend("causes-legend", [["failed for good", "--bad"], ["failed, then retried", "--warn"]]);
  if (empty(host, rows, "Nothing failed.")) return;
  const most = Math.max(...rows.map((row) => row.failed + row.retried));
  for (const cause of rows) {
    const row = named(host, cause.name, queue ? cause.tasks.join(", ") : `${cause.queue} · ${cause.tasks.join(", ")}`), bar = block(row, "bar");
    for (const [name, color] of [["failed", "--bad"], ["retried", "--warn"]]) {
      if (!cause[name]) continue;
      const piece = block(bar, ""); piece.style.width = `${100 * cause[name] / most}%`; piece.style.background = `var(${color})`;
    }
    block(row, "value", number(cause.failed + cause.retried));
    tipped(row, cause.name, [["failed for good", "--bad", number(cause.failed)], ["then retried", "--warn", number(cause.retried)]], cause.example);
  }
}
function ranked(id, rows, queue, none) {
  const host = $(id), shown = chosen(rows, queue);
  if (empty(host, shown, none)) return;
  const most = Math.max(...shown.map((row) => row.run_p99 || 0), 1), place = (ms) => 100 * (ms || 0) / most;
  for (const item of shown) {
    const row = named(host, item.name, queue ? null : item.queue), dots = block(row, "dots");
    const stretch = block(dots, "stretch"); stretch.style.left = `${place(item.run_p50)}%`; stretch.style.width = `${place(item.run_p99) - place(item.run_p50)}%`;
    for (const [end, color] of ENDS) { const dot = block(dots, "dot"); dot.style.left = `${place(item[`run_${end}`])}%`; dot.style.background = `var(${color})`; }
    block(row, "value", duration(item.run_p95));
    tipped(row, item.name, [...ENDS.map(([end, color]) => [`run ${end}`, color, duration(item[`run_${end}`])]),
      ["wait p95", "--in", duration(item.wait_p95)], ["completed", "--good", number(item.completed)], ["failed", "--bad", number(item.failed)], ["retried", "--warn", number(item.retried)]]);
  }
}
function workers(queue) {
  const rows = chosen(data.workers, queue), host = $("workers");
  if (empty(host, rows, "No worker has run anything.")) return;
  const most = Math.max(...rows.flatMap((row) => row.busy), 1e-9);
  for (const worker of rows) {
    const row = named(host, worker.name, `${number(worker.completed)} done, ${number(worker.failed)} failed`);
    const svg = element("svg", { class: "heat", viewBox: `0 0 ${data.points} 1`, preserveAspectRatio: "none" }, row);
    element("rect", { x: 0, y: 0, width: data.points, height: 1, fill: "var(--ground)" }, svg);
    worker.at.forEach((point, n) => { if (worker.busy[n] > 0) element("rect", { x: point, y: 0, width: 1, height: 1, fill: `rgba(var(--heat), ${(.12 + .88 * worker.busy[n] / most).toFixed(3)})` }, svg); });
    block(row, "value", `⌀ ${share(worker.busy_ms / (data.points * data.length))}`);
    const known = new Map(worker.at.map((point, n) => [point, worker.busy[n]]));
    row.onpointermove = (event) => {
      const box = svg.getBoundingClientRect();
      const point = Math.max(0, Math.min(data.points - 1, Math.floor((event.clientX - box.left) / box.width * data.points)));
      tell(event, worker.name, [[moment(at(point)), "--good", `${share(known.get(point) || 0)} at once`], ["stalled", "--bad", number(worker.stalled)]], worker.queues.join(", "));
    };
    row.onpointerleave = () => { $("tip").hidden = true; };
  }
}
function tiles(series, queue) {
  const sum = (name) => total(series ? series[name] : []);
  const done = sum("completed"), failed = sum("failed"), ended = done + failed;
  const worst = (name) => series ? Math.max(...series[name].map((value) => value || 0)) : null;
  const typical = (name) => { const known = (series ? series[name] : []).filter((value) => value != null).sort((a, b) => a - b); return known.length ? known[Math.floor(known.length / 2)] : null; };
  const open = backlog(queue);
  const shown = [
    ["Completed", number(done), `${number(done / Math.max(data.points * data.length / 60000, 1))} a minute`],
    ["Failed", number(failed), ended ? `${(100 * failed / ended).toPrecision(2)} % of what ended` : "", failed > 0],
    ["Retried", number(sum("retried")), `${number(sum("stalled"))} stalled`],
    ["Wait p95, typical", duration(typical("wait_p95")), `p99 up to ${duration(worst("wait_p99"))}`],
    ["Run p95, typical", duration(typical("run_p95")), `p99 up to ${duration(worst("run_p99"))}`],
    ["Backlog", number(open[open.length - 1]), `${number(Math.max(...open))} at most`],
  ];
  if (sum("usd")) shown.push(["Spent", "$ " + sum("usd").toFixed(2), `${ended ? "$ " + (sum("usd") / ended).toPrecision(2) + " a job" : ""}`]);
  $("tiles").textContent = "";
  for (const [name, value, below, alarm] of shown) {
    const tile = block($("tiles"), alarm ? "tile alarm" : "tile");
    for (const [tag, text] of [["span", name], ["b", value], ["i", below]]) { const made = document.createElement(tag); made.textContent = text; tile.appendChild(made); }
  }
}

function draw() {
  const queue = $("queue").value, series = data.series[queue];
  tiles(series, queue); throughput(series); timing("wait", series); timing("run", series); backlogs(queue); causes(queue);
  legend("tasks-legend", ENDS);
  ranked("tasks", data.tasks, queue, "No task has run."); ranked("groups", data.groups, queue, "No groups."); workers(queue);
}
function begin() {
  $("title").textContent = data.title;
  $("span").textContent = `${moment(data.start)} – ${moment(at(data.points))} UTC`;
  $("per").textContent = `jobs per ${data.grain}`;
  $("synced").textContent = `Synced ${iso(data.synced).slice(0, 19).replace("T", " ")}.`;
  for (const [queue, first, last] of data.losses) block($("notes"), "", `Events ${first} to ${last} of ${queue} were gone before they could be read: what they tell of is incomplete.`);
  for (const [queue, first, last] of data.changes) block($("notes"), "", `The store of ${queue} went back in time: it no longer knew of events ${first} to ${last}.`);
  $("queue").add(new Option("all queues", ""));
  for (const queue of Object.keys(data.series).filter(Boolean)) $("queue").add(new Option(queue, queue));
  $("queue").onchange = draw;
  const root = document.documentElement;
  root.dataset.theme = location.hash === "#dark" || (location.hash !== "#light" && matchMedia("(prefers-color-scheme: dark)").matches) ? "dark" : "light";
  $("theme").onclick = () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; };
  let waiting = 0;
  addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(draw); });
  draw();
  root.dataset.drawn = "yes";
}
begin();
