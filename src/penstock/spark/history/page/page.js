import { block, dollars, drawChart, drawHeat, duration, hideTip, interval, legend, middleCut, moment, number, percent, showTip, tipped } from "./charts.js";

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const span = { start: data.start, length: data.length, points: data.points };
const ENDED = [["completed", "--good"], ["failed", "--bad"], ["cancelled", "--calm"]];
const ARRIVED = [["enqueued", "--in"], ["retried", "--warn"]];
const PERCENTILES = [["p50", "--p50"], ["p95", "--p95"], ["p99", "--p99"]];
const entries = (pairs) => pairs.map(([name, color]) => ({ name, color }));
const total = (values) => values.reduce((sum, value) => sum + (value || 0), 0);
const most = (values) => values.reduce((found, value) => Math.max(found, value || 0), 0);

// Values for every point. Where nothing happened a count is 0, a percentile is unknown, and a backlog stays as it was.
function dense(series, name, empty) {
  const values = new Array(data.points).fill(empty);
  if (series) series.at.forEach((point, n) => { if (series[name][n] != null) values[point] = series[name][n]; });
  return values;
}
function backlog(queue, name) {
  const sums = new Array(data.points).fill(0);
  for (const one of queue ? [queue] : Object.keys(data.series).filter(Boolean)) {
    const ends = dense(data.series[one], "backlog", null), values = dense(data.series[one], name, null);
    let open = 0;
    values.forEach((value, n) => { sums[n] += value ?? open; open = ends[n] ?? open; });
  }
  return sums;
}
function peak(values) {
  const high = most(values);
  return high ? `, at most ${number(high)} at ${moment(at(values.indexOf(high)), data.length)}` : "";
}
const at = (point) => data.start + point * data.length;

function throughput(series) {
  const bars = ENDED.map(([name, color]) => ({ name, color, shape: "bar", values: dense(series, name, 0) }));
  const lines = ARRIVED.map(([name, color]) => ({ name, color, shape: "line", values: dense(series, name, 0) }));
  legend($("throughput-legend"), entries([...ENDED, ...ARRIVED]));
  drawChart($("throughput"), {
    span, series: [...bars, ...lines], format: number,
    label: `Throughput, jobs per ${data.grain}: ` + bars.map((bar) => `${number(total(bar.values))} ${bar.name}`).join(", ") + peak(bars[0].values),
  });
}
function timing(what, series) {
  const lines = PERCENTILES.map(([end, color]) => ({ name: end, color, shape: "line", values: dense(series, `${what}_${end}`, null) }));
  legend($(`${what}-legend`), entries(PERCENTILES));
  drawChart($(what), {
    span, series: lines, format: duration, isDuration: true,
    label: `${what === "wait" ? "Wait" : "Run"} time: ` + lines.map((line) => `${line.name} up to ${duration(most(line.values))}`).join(", "),
  });
}
function backlogs(queue) {
  const highs = backlog(queue, "backlog_max"), ends = backlog(queue, "backlog");
  const series = [
    { name: `most in the ${data.grain}`, color: "--in", shape: "area", values: highs },
    { name: "at its end", color: "--calm", shape: "line", values: ends },
  ];
  legend($("backlog-legend"), series);
  drawChart($("backlog"), { span, series, format: number, label: `Backlog: ${number(ends[ends.length - 1])} open jobs at the end${peak(highs)}` });
}

// Lists

const chosen = (rows, queue) => rows.filter((row) => !queue || (row.queues ? row.queues.includes(queue) : row.queue === queue));
function emptied(host, rows, text) {
  host.textContent = "";
  if (!rows.length) block(host, "none", text);
  return host;
}
function listRow(host, name, below) {
  const row = block(host, "row"), label = block(row, "name");
  middleCut(label, name || "(none)");
  if (below) block(label, "below", below, "small");
  return row;
}
function causes(queue) {
  const rows = chosen(data.causes, queue).slice(0, 10), host = emptied($("causes"), rows, "Nothing failed.");
  const kinds = [["failed", "--bad", "failed for good"], ["retried", "--warn", "failed, then retried"]];
  legend($("causes-legend"), kinds.map(([, color, name]) => ({ name, color })));
  const highest = most(rows.map((row) => row.failed + row.retried));
  for (const cause of rows) {
    const row = listRow(host, cause.name, [queue ? "" : cause.queue, ...cause.tasks].filter(Boolean).join(" · ")), bar = block(row, "bar");
    for (const [name, color] of kinds) {
      if (!cause[name]) continue;
      const piece = block(bar, "");
      piece.style.width = `${100 * cause[name] / highest}%`;
      piece.style.background = `var(${color})`;
    }
    block(row, "value", number(cause.failed + cause.retried));
    tipped(row, cause.name, kinds.map(([name, color, text]) => ({ name: text, color, text: number(cause[name]) })), cause.example);
  }
}
function ranked(id, rows, queue, none) {
  const shown = chosen(rows, queue), host = emptied($(id), shown, none);
  const highest = Math.max(most(shown.map((row) => row.run_p99)), 1), place = (ms) => 100 * (ms || 0) / highest;
  for (const item of shown) {
    const row = listRow(host, item.name, queue ? "" : item.queue), dots = block(row, "dots"), stretch = block(dots, "stretch");
    stretch.style.left = `${place(item.run_p50)}%`;
    stretch.style.width = `${place(item.run_p99) - place(item.run_p50)}%`;
    for (const [end, color] of PERCENTILES) {
      const dot = block(dots, "dot");
      dot.style.left = `${place(item[`run_${end}`])}%`;
      dot.style.background = `var(${color})`;
    }
    block(row, "value", `p95 ${duration(item.run_p95)}`);
    tipped(row, item.name, [
      ...PERCENTILES.map(([end, color]) => ({ name: `run ${end}`, color, text: duration(item[`run_${end}`]) })),
      { name: "wait p95", color: "--in", text: duration(item.wait_p95) },
      ...[...ENDED.slice(0, 2), ARRIVED[1]].map(([name, color]) => ({ name, color, text: number(item[name]) })),
    ]);
  }
}
function workers(queue) {
  const rows = chosen(data.workers, queue), host = emptied($("workers"), rows, "No worker ran a job.");
  const highest = most(rows.flatMap((row) => row.busy));
  for (const worker of rows) {
    const values = new Array(data.points).fill(0), mean = worker.busy_ms / (data.to - data.from);
    worker.at.forEach((point, n) => { values[point] = worker.busy[n]; });
    const row = listRow(host, worker.name, `${number(worker.completed)} completed, ${number(worker.failed)} failed`);
    const heat = drawHeat(row, span, values, highest, `${worker.name}: ${number(mean)} jobs at a time on average`);
    block(row, "value", `${mean > 0 && mean < .1 ? "< 0.1" : number(mean)} at a time`);
    row.onpointermove = (event) => {
      const box = heat.getBoundingClientRect(), part = (event.clientX - box.left) / box.width;
      const point = Math.max(0, Math.min(data.points - 1, Math.floor(part * data.points)));
      showTip(event.clientX, event.clientY, worker.name, [
        { name: moment(at(point), data.length), color: "--good", text: `${number(values[point])} at a time` },
        { name: "stalled", color: "--bad", text: number(worker.stalled) },
      ], worker.queues.join(", "));
    };
    row.onpointerleave = hideTip;
  }
}
function tiles(series, queue) {
  const sum = (name) => total(series ? series[name] : []), highest = (name) => (series ? most(series[name]) : null);
  const median = (name) => {
    const known = (series ? series[name] : []).filter((value) => value != null).sort((a, b) => a - b);
    return known.length ? known[Math.floor(known.length / 2)] : null;
  };
  const done = sum("completed"), failed = sum("failed"), ended = done + failed, spent = sum("usd"), ends = backlog(queue, "backlog");
  const shown = [
    ["Completed", number(done), `${number(done * data.length / (data.to - data.from))} per ${data.grain}`],
    ["Failed", number(failed), ended ? `${percent(failed / ended)} of finished jobs` : "", failed > 0],
    ["Retried", number(sum("retried")), `${number(sum("stalled"))} stalled`],
    ["Wait p95, typical", duration(median("wait_p95")), `p99 up to ${duration(highest("wait_p99"))}`],
    ["Run p95, typical", duration(median("run_p95")), `p99 up to ${duration(highest("run_p99"))}`],
    ["Backlog", number(ends[ends.length - 1]), `${number(most(backlog(queue, "backlog_max")))} at most`],
  ];
  if (spent) shown.push(["Spent", dollars(spent), ended ? `${dollars(spent / ended)} per job` : ""]);
  $("tiles").textContent = "";
  for (const [name, value, below, isAlarm] of shown) {
    const tile = block($("tiles"), isAlarm ? "tile alarm" : "tile");
    for (const [tag, text] of [["span", name], ["b", value], ["i", below]]) block(tile, "", text, tag);
  }
}

function draw() {
  const queue = $("queue").value, series = data.series[queue];
  tiles(series, queue);
  throughput(series);
  timing("wait", series);
  timing("run", series);
  backlogs(queue);
  causes(queue);
  legend($("tasks-legend"), entries(PERCENTILES));
  ranked("tasks", data.tasks, queue, "No task ran.");
  ranked("groups", data.groups, queue, "");
  $("groups").parentElement.hidden = !data.groups.length;
  $("tasks").parentElement.classList.toggle("wide", !data.groups.length);
  workers(queue);
}
function begin() {
  $("title").textContent = data.title;
  $("span").textContent = interval(data.from, data.to, data.length);
  $("per").textContent = `jobs per ${data.grain}`;
  $("synced").textContent = `Synced ${moment(data.synced)}.`;
  for (const [queue, first, last] of data.losses) block($("notes"), "", `Events ${first} to ${last} of ${queue} were trimmed before they could be read. Figures that need them are too low.`);
  for (const [queue, first, last] of data.changes) block($("notes"), "", `The store of ${queue} lost its latest history: events ${first} to ${last} happened, but it no longer has them.`);
  $("queue").add(new Option("all queues", ""));
  for (const queue of Object.keys(data.series).filter(Boolean)) $("queue").add(new Option(queue, queue));
  $("queue").onchange = draw;
  const root = document.documentElement, isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = location.hash === "#dark" || (location.hash !== "#light" && isDark) ? "dark" : "light";
  $("theme").onclick = () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; };
  let waiting = 0;
  addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(draw); });
  draw();
  root.dataset.drawn = "yes";
}
begin();
