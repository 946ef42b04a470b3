"use strict";
const RUNS = JSON.parse(document.getElementById("data").textContent);
const PLOTS = [];

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function number(value, digits = 4) {
  return value === null || value === undefined ? "–" : Number(value).toLocaleString("en", { maximumFractionDigits: digits });
}

// A figure is a title, a note, and a function that gives traces and layout in the colours of the moment.
function figure(parent, title, note, make, wide = false) {
  const plot = element("div", { class: "plot" });
  const caption = element("figcaption", {}, title, element("span", {}, note));
  parent.append(element("figure", wide ? { class: "wide" } : {}, caption, plot));
  PLOTS.push({ plot, make });
}

function layout(extra = {}) {
  const axis = { gridcolor: color("line"), zerolinecolor: color("line"), linecolor: color("line"), automargin: true };
  const { xaxis = {}, yaxis = {}, ...rest } = extra;
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: color("muted"), size: 12 },
    margin: { l: 44, r: 10, t: 8, b: 34 },
    showlegend: false,
    hovermode: "closest",
    xaxis: { ...axis, title: { text: "step" }, ...xaxis },
    yaxis: { ...axis, ...yaxis },
    ...rest,
  };
}

function draw() {
  for (const { plot, make } of PLOTS) {
    const { traces, extra, height } = make();
    if (height) plot.style.height = `${height}px`;
    Plotly.react(plot, traces, layout(extra), { responsive: true, displayModeBar: false });
  }
}

function runColor(index) {
  return color(`run${index % 6}`);
}

// Of more than six runs the next six have the same colours in another stroke.
function runStroke(index) {
  return ["solid", "dot", "dash", "longdash"][Math.floor(index / 6) % 4];
}

function line(x, y, name, lineColor, mode = "lines", dash = "solid") {
  if (x.length < 2) mode = "markers"; // a line has two ends
  return { type: "scatter", mode, x, y, name, line: { color: lineColor, width: 2, dash }, marker: { color: lineColor, size: 6 },
    hovertemplate: `%{y:.5~g} at step %{x}<extra>${escaped(name)}</extra>` };
}

function escaped(text) {
  return String(text).replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
}

function curves() {
  const parent = document.getElementById("curves");
  const log = { yaxis: { type: "log" } };
  const shown = [
    ["Training loss", "mean over the batch", "loss", {}],
    ["Validation", "", null, {}],
    ["Learning rate", "", "lr", {}],
    ["Gradient norm", "before clipping; logarithmic", "grad_norm", log],
    ["Throughput", `${[...new Set(RUNS.map((run) => run.items))].join(", ")} per second`, "throughput", { yaxis: { rangemode: "tozero" } }],
    ["Load of the fullest expert", "over the mean; 1 is even", "load_imbalance", {}],
  ];
  for (const [title, note, key, extra] of shown) {
    if (key === "load_imbalance" && RUNS.every((run) => run.curves[key].every((value) => value == null))) continue; // no experts
    if (key) {
      figure(parent, title, note, () => ({
        traces: RUNS.map((run, i) => line(run.curves.step, run.curves[key], run.name, runColor(i), "lines", runStroke(i))), extra }));
    } else {
      const metric = [...new Set(RUNS.map((run) => run.metric))].join(", ");
      figure(parent, title, metric, () => ({
        traces: RUNS.map((run, i) => line(run.validation.step, run.validation.metric, run.name, runColor(i), "lines+markers", runStroke(i))), extra }));
    }
  }
}

function overview() {
  const parent = document.getElementById("runs");
  RUNS.forEach((run, i) => {
    const last = run.validation.metric.at(-1);
    const facts = [run.recipe, run.status];
    if (last !== undefined) facts.push(`${number(last)} ${run.metric} in validation`);
    const stroke = { solid: "solid", dot: "dotted", dash: "dashed", longdash: "double" }[runStroke(i)];
    const fill = stroke === "solid" ? `var(--run${i % 6})` : "none";
    const swatch = element("span", { class: "swatch", style: `background: ${fill}; border: 3px ${stroke} var(--run${i % 6})` });
    parent.append(element("div", { class: "run" }, swatch, element("strong", {}, run.name),
      element("span", { class: "facts" }, facts.join(" · "))));
  });
}

// Blue: less than the even share, red: more, by factors of two; the middle is even.
function heatMap(parent, run) {
  const rows = [];
  run.experts.sizes.forEach((size, layer) => {
    for (let expert = 0; expert < size; expert++) rows.push(`layer ${layer}, expert ${expert}`);
  });
  const starts = run.experts.sizes.map((_, layer) => run.experts.sizes.slice(0, layer).reduce((a, b) => a + b, 0));
  const z = run.experts.load.map((row) => row.map((ratio) => (ratio === 0 ? -3 : Math.max(-3, Math.min(3, Math.log2(ratio))))));
  figure(parent, "Load of every expert", "rows over the mean of the layer: red more, blue less; lines part the layers", () => ({
    traces: [{
      type: "heatmap", x: run.experts.step, z, customdata: run.experts.load, text: rows.map((row) => run.experts.step.map(() => row)),
      zmin: -3, zmax: 3, colorscale: [[0, color("low")], [0.5, color("mid")], [1, color("high")]],
      colorbar: { title: { text: "× mean" }, tickvals: [-3, -2, -1, 0, 1, 2, 3], ticktext: ["≤ ⅛", "¼", "½", "1", "2", "4", "≥ 8"], thickness: 10, outlinewidth: 0 },
      hovertemplate: "%{text}, step %{x}: %{customdata:.2f} × mean<extra></extra>",
    }],
    height: Math.max(240, Math.min(640, 60 + 3 * rows.length)),
    extra: {
      yaxis: { autorange: "reversed", tickvals: starts, ticktext: starts.map((_, layer) => `layer ${layer}`), showgrid: false },
      xaxis: { showgrid: false },
      shapes: starts.slice(1).map((y) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y - 0.5, y1: y - 0.5, line: { color: color("text"), width: 1 } })),
    },
  }), true);
}

function perLayer(parent, run, title, note, key, extra = { yaxis: { rangemode: "tozero" } }) {
  const count = run.experts.sizes.length;
  figure(parent, title, note, () => ({
    traces: run.experts[key].map((values, layer) => {
      const made = line(run.experts.step, values, `layer ${layer}`, color("run0"));
      made.opacity = 1 - (0.75 * layer) / Math.max(count, 1);
      return made;
    }),
    extra,
  }));
}

// What a part of a sample loses, from its first tokens to its last; of runs that dropped rows.
function dropsByPosition(parent, run) {
  if (!run.experts.positions.length) return;
  const parts = run.experts.positions[0].map((_, i) => i + 1);
  figure(parent, "Dropped rows by position", "share of the rows in each eighth of a sample, mean over the run; paler: deeper layers", () => ({
    traces: run.experts.positions.map((shares, layer) => {
      const made = line(parts, shares, `layer ${layer}`, color("run0"), "lines+markers");
      made.opacity = 1 - (0.75 * layer) / run.experts.positions.length;
      made.hovertemplate = `%{y:.4~g} in part %{x}<extra>layer ${layer}</extra>`;
      return made;
    }),
    extra: { xaxis: { title: { text: "eighth of a sample" }, dtick: 1 }, yaxis: { rangemode: "tozero" } },
  }));
}

// Which experts each kind of sample (language, domain) uses; of families that name kinds.
function useByLabel(parent, run) {
  const labels = Object.keys(run.experts.labels);
  if (!labels.length) return;
  const columns = run.experts.sizes.flatMap((size, layer) => Array.from({ length: size }, (_, expert) => `layer ${layer}, expert ${expert}`));
  const ratios = labels.map((label) => run.experts.labels[label]);
  figure(parent, "Experts by kind of sample", "rows over the mean of the layer, last quarter of the run: red more, blue less", () => ({
    traces: [{
      type: "heatmap", x: columns.map((_, i) => i), y: labels.map(escaped), customdata: ratios, text: labels.map(() => columns),
      z: ratios.map((row) => row.map((ratio) => (ratio === 0 ? -3 : Math.max(-3, Math.min(3, Math.log2(ratio)))))),
      zmin: -3, zmax: 3, colorscale: [[0, color("low")], [0.5, color("mid")], [1, color("high")]], showscale: false,
      hovertemplate: "%{y}, %{text}: %{customdata:.2f} × mean<extra></extra>",
    }],
    height: Math.max(180, Math.min(640, 80 + 18 * labels.length)),
    extra: { xaxis: { title: { text: "experts of all layers" }, showticklabels: false, showgrid: false }, yaxis: { autorange: "reversed", showgrid: false } },
  }), true);
}

function expertTable(run) {
  const mean = run.experts.sizes.map((size, layer) =>
    run.experts.last.filter((one) => one.layer === layer).reduce((sum, one) => sum + one.rows, 0) / size);
  const used = run.experts.last.filter((one) => one.rows > 0).sort((a, b) => b.confidence - a.confidence).slice(0, 10);
  const head = ["layer", "expert", "mean routing weight", "rows over the mean"];
  const table = element("table", {}, element("tr", {}, ...head.map((text) => element("th", { class: "number" }, text))));
  for (const one of used) {
    const cells = [one.layer, one.expert, number(one.confidence, 3), number(one.rows / Math.max(mean[one.layer], 1e-9), 2)];
    table.append(element("tr", {}, ...cells.map((text) => element("td", { class: "number" }, String(text)))));
  }
  return table;
}

function deadList(run) {
  const dead = run.experts.last.filter((one) => one.rows === 0);
  if (!dead.length) return "No expert was without a row in the last recorded step.";
  return `Without a row in the last recorded step: ${dead.slice(0, 40).map((one) => `layer ${one.layer} expert ${one.expert}`).join(", ")}`
    + (dead.length > 40 ? ` and ${dead.length - 40} more.` : ".");
}

function tint(expert) {
  return `hsl(${(expert * 137.5) % 360} 70% 50% / 0.32)`;
}

function sampleText(parent, run) {
  parent.append(element("h3", {}, "A text that it wrote, and the experts of each token"));
  if (!run.sample.length) {
    parent.append(element("p", { class: "note" }, run.no_sample ? `There is none: ${run.no_sample}` : "Models of this family write no text."));
    return;
  }
  const tip = document.getElementById("tip");
  const layers = run.sample[0].experts.length;
  const tokens = run.sample.map((token) => {
    const made = element("span", { class: "token", tabindex: "0" }, token.text);
    const says = token.experts.map((chosen, layer) =>
      `layer ${layer}: ${chosen.map(([expert, weight]) => `expert ${expert} (${weight.toFixed(2)})`).join(", ") || "none"}`);
    const show = () => {
      tip.textContent = says.join("\n") || "a dense model";
      tip.hidden = false;
      const box = made.getBoundingClientRect();
      tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
      const below = box.bottom + 6;
      tip.style.top = `${below + tip.offsetHeight > innerHeight ? Math.max(4, box.top - tip.offsetHeight - 6) : below}px`;
    };
    const hide = () => { tip.hidden = true; };
    made.addEventListener("mouseenter", show);
    made.addEventListener("focus", show);
    made.addEventListener("mouseleave", hide);
    made.addEventListener("blur", hide);
    return made;
  });
  const paint = (layer) => tokens.forEach((made, i) => {
    const first = run.sample[i].experts[layer]?.[0];
    made.style.background = first ? tint(first[0]) : "none";
  });
  if (layers) {
    const select = element("select", {}, ...Array.from({ length: layers }, (_, layer) => element("option", { value: layer }, `layer ${layer}`)));
    select.addEventListener("change", () => paint(Number(select.value)));
    parent.append(element("p", { class: "note" }, element("label", {}, "A colour is the first choice in ", select), ". Point at a token, or tap it, for all layers."));
    paint(0);
  }
  parent.append(element("div", { class: "text" }, ...tokens));
}

function details() {
  const parent = document.getElementById("details");
  for (const run of RUNS) {
    const section = element("section", {}, element("h2", {}, `Experts of ${run.name}`));
    parent.append(section);
    if (run.experts) {
      heatMap(section, run);
      const grid = element("div", { class: "grid" });
      section.append(grid);
      perLayer(grid, run, "Routing entropy", "nats, mean over tokens; 0: one choice has all the weight; paler: deeper layers", "entropy", {});
      perLayer(grid, run, "Dropped rows", "share of a layer's rows", "dropped");
      perLayer(grid, run, "Dead experts", "without a row in a step, per layer", "dead");
      dropsByPosition(grid, run);
      useByLabel(section, run);
      section.append(element("h3", {}, "Most confident experts"), element("div", { class: "scroll" }, expertTable(run)),
        element("p", { class: "note" }, deadList(run)));
    } else {
      section.append(element("p", { class: "note" }, "Nothing was recorded of experts: the model is dense, or no step was recorded."));
    }
    sampleText(section, run);
  }
}

function configuration() {
  const parent = document.getElementById("configuration");
  for (const [title, key] of [["Configuration", "config"], ["Versions", "versions"]]) {
    const names = [...new Set(RUNS.flatMap((run) => Object.keys(run[key])))];
    const table = element("table", {}, element("tr", {}, ...["", ...RUNS.map((run) => run.name)].map((text) => element("th", {}, text))));
    let differing = 0;
    for (const name of names) {
      const values = RUNS.map((run) => run[key][name] ?? "–");
      const differs = new Set(values).size > 1;
      differing += differs;
      table.append(element("tr", differs ? { class: "differs" } : {}, ...[name, ...values].map((text) => element("td", {}, text))));
    }
    const summary = `${title}: ${names.length} values` + (RUNS.length > 1 ? `, ${differing} of them differ` : "");
    const box = element("details", {}, element("summary", {}, summary), element("div", { class: "scroll" }, table));
    parent.append(box);
  }
  document.getElementById("differences").textContent = RUNS.length > 1 ? "Rows in which the runs differ are shaded." : "";
}

overview();
curves();
details();
configuration();
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
