"use strict";
const FIRST = 4, MOST_CHARTS = 24, MOST_TABLE_ROWS = 2000, MOST_SHAPES = 200, PAPER = 660, DECADES = 2, HEIGHT = 248, NEAR = 0.12, MOST_NUMBERS = 3, DIGITS = 4;
const at = id => document.getElementById(id);
// Text of runs enters the page only in these two ways: as a text node, or escaped in Plotly's labels.
const make = (tag, text, settings) => Object.assign(document.createElement(tag), text === undefined ? {} : {textContent: text}, settings);
const label = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const number = value => typeof value === "number" ? value : {"nan": NaN, "inf": Infinity, "-inf": -Infinity}[value];
const state = {shown: [], hidden: new Set(), logX: false, logY: false, means: false, smooth: 1, range: null};
const charts = new Map();  // figures by metric name
let data, metrics, busy = false;

async function unpacked(id) {
  const bytes = Uint8Array.from(atob(at(id).textContent), letter => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

// Symmetric moving mean of the finite values; the geometric mean on a logarithmic axis.
function smoothed(values, points, log) {
  const half = Math.floor(points / 2);
  return values.map((value, index) => {
    if (!Number.isFinite(value)) return value;
    const reach = Math.min(half, index, values.length - 1 - index);
    const near = values.slice(index - reach, index + reach + 1).filter(one => Number.isFinite(one) && (!log || one > 0));
    if (!near.length) return value;
    const sum = near.reduce((before, one) => before + (log ? Math.log(one) : one), 0) / near.length;
    return log ? Math.exp(sum) : sum;
  });
}

// A vertical axis is logarithmic on demand, or if positive values span more than two decades.
function isLog(metric) {
  if (state.logY) return true;
  if (metric.isWide === undefined) {
    let [least, largest] = [Infinity, -Infinity];
    for (const curve of metric.curves) for (const value of curve.values) {
      if (typeof value === "number") [least, largest] = [Math.min(least, value), Math.max(largest, value)];
    }
    metric.isWide = least > 0 && largest / least > 10 ** DECADES;
  }
  return metric.isWide;
}

const isHidden = run => state.hidden.has(run);
const finite = values => values.map(value => Number.isFinite(value) ? value : null);

// Drawn lines of a metric: curves of runs, or means over seeds instead of the runs that they contain.
function linesOf(metric) {
  const means = state.means ? metric.means : [], within = new Set(means.flatMap(mean => mean.runs));
  const lines = [...means, ...metric.curves.filter(curve => !within.has(curve.run)).map(curve => ({...curve, runs: [curve.run]}))];
  return lines.filter(line => !line.runs.every(isHidden)).map(line => ({...line, run: data.runs[line.runs[0]], name: label(nameOf(line))}));
}

const nameOf = line => line.of > 1 ? `${data.runs[line.run].label}: median of ${line.of} runs` : line.group ? `${line.group}: mean of ${line.runs.length} seeds` : data.runs[line.runs[0]].label;

const dashOf = run => run.dash.length ? run.dash.map(length => `${length}px`).join(",") : "solid";

function tracesOf(metric) {
  if (!metric.curves.length) return mapsOf(metric).map(mapTrace);
  const traces = [], log = isLog(metric);
  for (const {run, name, steps, low, high, ...line} of linesOf(metric)) {
    const values = line.values.map(number), smooth = series => finite(state.smooth > 1 ? smoothed(series, state.smooth, log) : series);
    const trace = {type: "scatter", mode: steps.length > 60 ? "lines" : "lines+markers", x: steps, line: {color: run.colour, width: low ? 2.4 : 1.6, dash: dashOf(run)}, name, marker: {size: 4}};
    if (low) {
      const least = Math.min(...[...values, ...high.map(number)].filter(value => value > 0)) / 10, floor = value => log && value <= 0 ? least : value;
      const side = {...trace, mode: "lines", line: {width: 0}, hoverinfo: "skip"};
      trace.text = steps.map((_, index) => `${low[index]} to ${high[index]}`);
      traces.push({...side, y: smooth(low.map(number).map(floor))}, {...side, y: smooth(high.map(number)), fill: "tonexty", fillcolor: `${run.colour}33`});
    } else if (state.smooth > 1) traces.push({...trace, y: finite(values), opacity: 0.25, hoverinfo: "skip"});
    traces.push({...trace, y: smooth(values)});
    const odd = [...values.keys()].filter(index => !Number.isFinite(values[index]));
    if (odd.length) traces.push(marks(odd.map(index => steps[index]), 0.02, "x", run.colour, odd.map(index => `${name}: ${values[index]}`)));
  }
  data.runs.forEach((run, index) => {
    const alerts = isHidden(index) ? [] : run.alerts.filter(alert => metric.name === `${alert.hook}/${alert.metric}` || (!alert.metric && metric.name.startsWith(`${alert.hook}/`)));
    if (alerts.length) traces.push(marks(alerts.map(alert => alert.step), 0.97, "triangle-down", run.colour, alerts.map(alert => label(`${run.label}: ${alert.severity === "warning" ? "" : `${alert.severity}: `}${alert.sentence}${alert.rows ? ` (${alert.rows})` : ""}`))));
  });
  return traces;
}

const mapsOf = metric => metric.maps.filter(map => !isHidden(map.run));

// Heat map of a list of numbers over steps, with runs stacked vertically; on a logarithmic axis colours are log10.
function mapTrace(map, index) {
  const value = item => { const colour = state.logY ? Math.log10(number(item)) : number(item); return Number.isFinite(colour) ? colour : null; };
  const height = Math.max(...map.rows.map(row => row.length));
  const z = Array.from({length: height}, (_, place) => map.rows.map(row => place < row.length ? value(row[place]) : null));
  return {type: "heatmap", x: map.steps, z, yaxis: index ? `y${index + 1}` : "y", coloraxis: "coloraxis", name: label(data.runs[map.run].label)};
}

function mapLayout(metric, layout, axis) {
  const {yaxis2, ...rest} = layout, maps = mapsOf(metric);
  maps.forEach((map, index) => {
    const domain = [1 - (index + 0.9) / maps.length, 1 - index / maps.length];
    rest[index ? `yaxis${index + 1}` : "yaxis"] = {...axis, domain, title: {text: label(data.runs[map.run].label), font: {size: 11}}};
  });
  rest.xaxis = {...rest.xaxis, anchor: "free", position: 0};
  return {...rest, height: Math.max(320, 110 * maps.length), hovermode: "closest", coloraxis: {colorscale: "Viridis", colorbar: {title: {text: state.logY ? "log10" : ""}}}};
}

// Vertical lines at changes of metrics named phase.
function phases() {
  const shapes = [];
  for (const metric of metrics.values()) for (const {run, steps, values} of metric.name.endsWith("/phase") ? metric.curves : []) {
    for (let index = 1; index < steps.length && !isHidden(run); index++) if (values[index] !== values[index - 1]) shapes.push({
      type: "line", xref: "x", yref: "paper", x0: steps[index], x1: steps[index], y0: 0, y1: 1, line: {color: data.runs[run].colour, width: 1, dash: "dot"},
      label: {text: String(values[index]), textposition: "end", textangle: 0, font: {size: 10, color: data.runs[run].colour}},
    });
  }
  return shapes.slice(0, MOST_SHAPES);
}

// Vertical lines at the first steps of findings, with their numbers; and the limits of their measured values.
function findingMarks(metric) {
  const style = getComputedStyle(document.documentElement), colour = kind => style.getPropertyValue(`--${kind}`).trim();
  const byStep = new Map(), byLimit = new Map(), isMain = data.main.includes(metric.name);
  for (const finding of data.findings) {
    const evidence = finding.metrics.find(item => item.name === metric.name);
    if (isHidden(finding.run) || !(evidence || (isMain && finding.severity !== "info"))) continue;
    if (finding.step > 0) byStep.set(finding.step, [...(byStep.get(finding.step) || []), finding]);
    if (evidence && isWithin(metric, evidence.limit)) byLimit.set(evidence.limit, [...(byLimit.get(evidence.limit) || []), finding]);
  }
  const shapes = [...byLimit].map(([limit, findings]) => ({
    type: "line", xref: "paper", yref: "y", x0: 0, x1: 1, y0: limit, y1: limit, layer: "below",
    line: {color: colour(findings[0].severity), width: 1, dash: "dash"},
    label: {text: `limit of ${findings.map(finding => finding.number).join(", ")}`, textposition: "end", yanchor: "bottom", font: {size: 10, color: colour(findings[0].severity)}},
  }));
  for (const step of byStep.keys()) shapes.push({
    type: "line", xref: "x", yref: "paper", x0: step, x1: step, y0: 0, y1: 1, layer: "below",
    line: {color: colour(byStep.get(step)[0].severity), width: 1},
  });
  return {shapes, annotations: numbersOf(byStep, metric, colour)};
}

// The numbers of findings above their first steps; those of near steps share a label.
function numbersOf(byStep, metric, colour) {
  const place = step => state.logX ? Math.log10(Math.max(step, 0.5)) : step;
  const ends = metric.curves.flatMap(curve => [curve.steps[0], curve.steps.at(-1)]).map(place);
  const width = Math.max(...ends) - Math.min(...ends), labels = [];
  for (const step of [...byStep.keys()].sort((one, other) => one - other)) {
    const last = labels.at(-1), numbers = byStep.get(step).map(finding => finding.number);
    if (last && place(step) - last.x < NEAR * width) last.numbers.push(...numbers);
    else labels.push({x: place(step), numbers, colour: colour(byStep.get(step)[0].severity)});
  }
  const anchor = x => x < Math.min(...ends) + 0.1 * width ? "left" : x > Math.max(...ends) - 0.1 * width ? "right" : "center";
  return labels.map(({x, numbers, colour: fill}) => ({
    x, y: 1, xref: "x", yref: "paper", xanchor: anchor(x), yanchor: "bottom", showarrow: false, text: `<b>${listed([...new Set(numbers)].sort((one, other) => one - other))}</b>`,
    bgcolor: fill, borderpad: 2, font: {size: 10, color: getComputedStyle(document.documentElement).getPropertyValue("--back").trim()},
  }));
}

// At most a few numbers, so that a label does not cover its neighbours.
const listed = numbers => numbers.slice(0, MOST_NUMBERS).join(", ") + (numbers.length > MOST_NUMBERS ? ` +${numbers.length - MOST_NUMBERS}` : "");

// The steps of the visible curves and alerts; labels of findings do not widen it, and a single step has a neighbourhood.
function stepsOf(metric) {
  const ends = [...metric.curves, ...metric.maps].filter(item => !isHidden(item.run) && item.steps.length).flatMap(item => [item.steps[0], item.steps.at(-1)]);
  if (!ends.length) return null;
  const place = step => state.logX ? Math.log10(Math.max(step, 0.5)) : step;
  const [least, largest] = [place(Math.min(...ends)), place(Math.max(...ends))];
  const room = least === largest ? (state.logX ? 0.1 : 0.5) : 0.03 * (largest - least);
  return [least - room, largest + room];
}

// Ticks of an axis whose values are all equal: that value with a few digits.
function onlyValue(values) {
  const all = new Set(values);
  if (all.size !== 1) return {};
  const [value] = all;
  return {tickmode: "array", tickvals: [value], ticktext: [String(Number(value.toPrecision(DIGITS)))]};
}

function isWithin(metric, limit) {
  if (typeof limit !== "number" || (isLog(metric) && limit <= 0)) return false;
  const values = metric.curves.flatMap(curve => curve.values.filter(value => typeof value === "number"));
  const [least, largest] = values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  return limit >= least && limit <= largest;
}

function marks(x, height, symbol, color, text) {
  return {type: "scatter", mode: "markers", yaxis: "y2", x, y: x.map(() => height), text, hoverinfo: "x+text", marker: {symbol, color, size: symbol === "x" ? 5 : 9}, showlegend: false};
}

function layoutOf(metric) {
  const style = getComputedStyle(document.documentElement), colour = name => style.getPropertyValue(name).trim();
  const axis = {automargin: true, gridcolor: colour("--line"), zerolinecolor: colour("--line"), showspikes: true, spikemode: "across", spikethickness: 1, spikecolor: colour("--faint"), exponentformat: "power", minexponent: 4};
  const range = state.range && (state.logX ? state.range.map(step => Math.log10(Math.max(step, 0.5))) : state.range);
  const found = findingMarks(metric), visible = metric.curves.filter(curve => !isHidden(curve.run) && curve.steps.length);
  const layout = {
    annotations: found.annotations,
    height: HEIGHT, margin: {l: 52, r: 8, t: 20, b: 36}, hovermode: "x", showlegend: false, font: {size: 11, color: colour("--text"), family: "system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif"},
    paper_bgcolor: colour("--back"), plot_bgcolor: colour("--back"),
    xaxis: {...axis, title: {text: "step", standoff: 4}, type: state.logX ? "log" : "linear", ...(range || stepsOf(metric) ? {range: range || stepsOf(metric)} : {autorange: true}), ...onlyValue(visible.flatMap(curve => [curve.steps[0], curve.steps.at(-1)]))},
    yaxis: {...axis, type: isLog(metric) ? "log" : "linear", autorange: true, ...onlyValue(visible.flatMap(curve => curve.values).filter(value => typeof value === "number"))},
    yaxis2: {overlaying: "y", range: [0, 1], visible: false, fixedrange: true},
    shapes: [...phases(), ...found.shapes], width: state.printed ? PAPER : undefined,
  };
  return metric.curves.length ? layout : mapLayout(metric, layout, axis);
}

function chartOf(metric) {
  const figure = make("figure"), caption = make("figcaption"), heading = make("h3");
  const plot = make("div", undefined, {className: metric.curves.length ? "plot" : "plot tall"});
  const slash = metric.name.lastIndexOf("/") + 1;
  heading.append(make("span", metric.name.slice(0, slash), {className: "hook"}), metric.name.slice(slash));
  caption.append(heading);
  const behind = make("details");
  behind.append(make("summary", "About and numbers"));
  behind.addEventListener("toggle", () => { if (behind.open && behind.children.length < 2) behind.append(...aboutOf(metric), tableOf(metric)); });
  figure.append(caption, plot, behind);
  return {figure, plot, metric, isNew: true};
}

// Formula, range and reading of a metric, and what its chart leaves out.
function aboutOf(metric) {
  const lines = ["formula", "range", "reading"].filter(part => metric[part]).map(part => `${part}: ${metric[part]}`);
  const thinner = metric.curves.filter(curve => curve.steps.length < curve.points);
  if (thinner.length) lines.push(`Each pixel shows its smallest and largest value: ${thinner.map(curve => `${curve.steps.length} of ${curve.points} points of ${data.runs[curve.run].label}`).join(", ")}.`);
  const cut = metric.maps.map(map => ({...map, width: Math.max(...map.rows.map(row => row.length))})).filter(map => map.rows.length < map.seen || map.width < map.longest);
  if (cut.length) lines.push(`Shown: ${cut.map(map => `${map.rows.length} of ${map.seen} lists, the first ${map.width} of ${map.longest} numbers of ${data.runs[map.run].label}`).join("; ")}.`);
  return lines.map(line => make("p", line));
}

function tableOf(metric) {
  const rows = new Map(), wide = make("div", undefined, {className: "wide", tabIndex: 0, role: "region", ariaLabel: `Numbers of ${metric.name}`}), table = make("table");
  const runs = [...metric.curves, ...metric.maps.map(map => ({...map, values: map.rows.map(row => row.join(", "))}))];
  const means = metric.means.flatMap(mean => [["", mean.values], [", from", mean.low], [", to", mean.high]].map(([part, values]) => ({title: nameOf(mean) + part, steps: mean.steps, values})));
  const labelled = runs.map(curve => ({...curve, title: data.runs[curve.run].label}));
  const columns = [...labelled.flatMap(curve => curve.low ? [curve, {...curve, title: `${curve.title}, lowest`, values: curve.low}, {...curve, title: `${curve.title}, highest`, values: curve.high}] : [curve]), ...means];
  columns.forEach((curve, column) => curve.steps.forEach((step, index) => {
    if (!rows.has(step)) rows.set(step, columns.map(() => ""));
    rows.get(step)[column] = String(curve.values[index]);
  }));
  const row = (tag, cells) => { const line = make("tr"); line.append(...cells.map(cell => make(tag, cell))); return line; };
  table.append(row("th", ["step", ...columns.map(column => column.title)]));
  const steps = [...rows.keys()].sort((one, other) => one - other);
  steps.slice(0, MOST_TABLE_ROWS).forEach(step => table.append(row("td", [String(step), ...rows.get(step)])));
  if (steps.length > MOST_TABLE_ROWS) wide.append(make("p", `The first ${MOST_TABLE_ROWS} of ${steps.length} rows.`));
  wide.append(table);
  return wide;
}

function draw() {
  document.querySelectorAll("figure.waiting").forEach(place => place.remove());
  for (const [name, chart] of charts) if (!state.shown.includes(name)) { Plotly.purge(chart.plot); chart.figure.remove(); charts.delete(name); }
  for (const name of state.shown) {
    const metric = metrics.get(name);
    if (!charts.has(name)) charts.set(name, chartOf(metric));
    const chart = charts.get(name);
    if (!chart.figure.isConnected) at(data.lead.includes(name) ? "key-charts" : "charts").append(chart.figure);
    Plotly.react(chart.plot, tracesOf(metric), layoutOf(metric), {responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"]});
    if (chart.isNew) listen(chart);
    chart.isNew = false;
  }
  const left = data.leftOut ? ` ${data.leftOut} metrics did not fit into the page.` : "";
  at("state").textContent = (metrics.size ? `${state.shown.length} of ${metrics.size} metrics are shown.` : "There are no curves.") + left;
}

// Synchronises hovering and zooming over steps across all charts.
function listen(chart) {
  const others = () => [...charts.values()].filter(other => other !== chart).map(other => other.plot);
  chart.plot.on("plotly_hover", event => others().forEach(plot => Plotly.Fx.hover(plot, {xval: event.xvals ? event.xvals[0] : event.points[0].x}, ["xy"])));
  chart.plot.on("plotly_unhover", () => others().forEach(plot => Plotly.Fx.unhover(plot)));
  chart.plot.on("plotly_relayout", event => {
    const range = [event["xaxis.range[0]"], event["xaxis.range[1]"]];
    if (busy || (range[0] === undefined && !event["xaxis.autorange"])) return;
    zoom(range[0] === undefined ? null : range.map(step => state.logX ? 10 ** step : Number(step)), chart);
  });
}

function zoom(range) {
  state.range = range;
  at("from").value = range ? Math.round(range[0]) : "";
  at("to").value = range ? Math.round(range[1]) : "";
  busy = true;
  const changes = [...charts.values()].map(({plot, metric}) => Plotly.relayout(plot, {xaxis: layoutOf(metric).xaxis}));
  Promise.all(changes).finally(() => { busy = false; });
}

function box(text, checked, change) {
  const line = make("label"), input = make("input", undefined, {type: "checkbox", checked});
  input.addEventListener("change", () => change(input.checked));
  line.append(input, make("span", ` ${text}`));
  return {line, input};
}

function show(name, isShown) {
  state.shown = state.shown.filter(other => other !== name);
  showAll(isShown ? [...state.shown, name] : state.shown);
}

function showAll(names) {
  state.shown = names.slice(-MOST_CHARTS);
  draw();
  for (const {input, name} of boxes) input.checked = state.shown.includes(name);
}

function showFinding(finding) {
  const names = finding.metrics.map(item => item.name).filter(name => metrics.has(name));
  if (!names.length) return;
  showAll([...state.shown.filter(name => !names.includes(name)), ...names]);
  const {figure} = charts.get(names[0]);
  figure.scrollIntoView({block: "center"});
  document.querySelectorAll("figure.found").forEach(other => other.classList.remove("found"));
  figure.classList.add("found");
  figure.querySelector("summary").focus({preventScroll: true});
}

const metricsOf = run => data.metrics.filter(metric => [...metric.curves, ...metric.maps].some(item => item.run === run)).map(metric => metric.name);

const boxes = [];
function controls() {
  document.querySelectorAll("#shown-runs input").forEach((input, index) => {
    input.disabled = false;
    input.addEventListener("change", () => { state.hidden[input.checked ? "delete" : "add"](index); draw(); });
  });
  const groups = new Map();
  for (const name of metrics.keys()) {
    const hook = name.split("/")[0];
    if (!groups.has(hook)) {
      const group = make("details");
      group.append(make("summary", hook));
      groups.set(hook, group);
      at("metrics").append(group);
    }
    const {line, input} = box(name, state.shown.includes(name), isShown => show(name, isShown));
    groups.get(hook).append(line);
    boxes.push({line, input, name});
  }
  for (const [hook, group] of groups) group.firstChild.textContent = `${hook} (${group.children.length - 1})`;
  at("all-title").textContent = `All ${metrics.size} metrics, by hook`;
  const on = (id, kind, change) => at(id).addEventListener(kind, change);
  on("controls", "submit", event => event.preventDefault());
  on("log-x", "change", event => { state.logX = event.target.checked; draw(); });
  on("log-y", "change", event => { state.logY = event.target.checked; draw(); });
  on("means", "change", event => { state.means = event.target.checked; draw(); });
  at("seeds").hidden = !data.metrics.some(metric => metric.means.length);
  on("smooth", "change", event => { state.smooth = Math.max(1, Math.min(501, Number(event.target.value) || 1)); draw(); });
  const bounds = () => { const [from, to] = [Number(at("from").value), Number(at("to").value)]; if (to > from) zoom([from, to]); };
  on("from", "change", bounds);
  on("to", "change", bounds);
  on("whole", "click", () => zoom(null));
  on("none", "click", () => showAll([]));
  for (const button of document.querySelectorAll("button[data-run]")) {
    button.hidden = false;
    button.addEventListener("click", () => { showAll(metricsOf(Number(button.dataset.run)).slice(0, MOST_CHARTS)); at("charts").scrollIntoView(); });
  }
  for (const button of document.querySelectorAll("button[data-finding]")) {
    const finding = data.findings.find(one => one.number === Number(button.dataset.finding));
    button.disabled = false;
    button.addEventListener("click", () => showFinding(finding));
  }
  on("find", "input", event => {
    const words = event.target.value.toLowerCase().split(/\s+/);
    boxes.forEach(({line, name}) => { line.hidden = !words.every(word => name.toLowerCase().includes(word)); });
    for (const group of groups.values()) {
      group.hidden = ![...group.querySelectorAll("label")].some(line => !line.hidden);
      group.open = words.some(Boolean) && !group.hidden;
    }
  });
  at("controls").hidden = false;
}

const root = document.documentElement, darkness = matchMedia("(prefers-color-scheme: dark)");
function setTheme(theme, printed) {
  root.dataset.theme = theme;
  state.printed = printed;
  if (data) draw();
}
at("theme").addEventListener("click", () => setTheme((root.dataset.theme || (darkness.matches ? "dark" : "light")) === "dark" ? "light" : "dark"));
darkness.addEventListener("change", () => setTheme(root.dataset.theme || ""));
addEventListener("beforeprint", () => document.querySelectorAll(".finding details").forEach(one => { one.open = true; }));
addEventListener("beforeprint", () => setTheme("light", root.dataset.theme || "system"));  // print with the light theme
addEventListener("afterprint", () => {
  setTheme(state.printed === "system" ? "" : state.printed);
  charts.forEach(({plot}) => Plotly.Plots.resize(plot));
});

async function start() {
  document.head.append(make("script", await unpacked("library")));
  data = JSON.parse(await unpacked("data"));
  metrics = new Map(data.metrics.map(metric => [metric.name, metric]));
  const ofRewinds = [...document.querySelectorAll("button[data-run]")].flatMap(button => metricsOf(Number(button.dataset.run)).slice(0, FIRST));
  state.shown = [...new Set([...data.first.filter(name => metrics.has(name)), ...ofRewinds])].slice(0, MOST_CHARTS);
  controls();
  draw();
}
start().catch(error => { at("state").textContent = `The curves cannot be drawn: ${error}`; });
