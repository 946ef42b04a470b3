"use strict";
const $ = id => document.getElementById(id);
const RETURN = "\u21b5", SPACE = "\u2423", TAB = "\u21e5";

// What the page knows: of the model, of what is shown (turns and their tokens), and what is pointed at.
const model = {name: "this model", sizes: [], picks: 0, context: 0, isKnown: false};
let turns = [], tokens = [], load = [], layer = 0, running = null, isDue = false;
let pointed = -1, held = -1, lit = -1;

const make = (tag, text = "", name = "") => {
  const element = document.createElement(tag);
  element.textContent = text;
  if (name) element.className = name;
  return element;
};
const percent = share => `${share > 0 && share < .0005 ? "<0.1" : (100 * share).toFixed(1)}\u00a0%`;
const hue = expert => (expert * 137.508) % 360;
const picked = (token, l = layer) => token.experts?.[l]?.filter(e => e >= 0) ?? [];
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

function visible(text) {
  return JSON.stringify(text).slice(1, -1).replace(/\\"/g, '"').replace(/\\\\/g, "\\").replaceAll(" ", SPACE)
    .replace(/\\n/g, RETURN).replace(/\\t/g, TAB);
}
const named = name => /^\ufffd+$/.test(name) ? "part of a character" : visible(name);
const label = token => named(token.text !== "" ? token.text : token.name);

function colour(element, experts) {
  for (const [place, name] of ["--first", "--second"].entries()) {
    if (experts[place] === undefined) element.style.removeProperty(name); else element.style.setProperty(name, hue(experts[place]));
  }
}

function paint(token) {
  const experts = picked(token);
  colour(token.element, experts);
  if (experts.length) token.element.dataset.expert = experts[0]; else delete token.element.dataset.expert;
}

// ---- the text

function addToken(turn, box, fields) {
  const element = make("span", fields.text === "" ? "\u00b7" : fields.text, fields.isPrompt ? "token prompt" : "token");
  const token = {element, experts: null, index: tokens.length, ...fields};
  element.tabIndex = token.index ? -1 : 0;
  element.dataset.index = token.index;
  tokens.push(token);
  turn.tokens.push(token);
  box.append(element);
}

function readRows(base64) {
  const bytes = Uint8Array.from(atob(base64), c => c.charCodeAt(0)), length = bytes[8] | bytes[9] << 8;
  const head = new TextDecoder().decode(bytes.slice(10, 10 + length));
  const [n, layers, k] = head.match(/\((\d+), (\d+), (\d+)\)/).slice(1).map(Number);
  const data = new Int16Array(bytes.slice(10 + length).buffer);
  return Array.from({length: n}, (_, i) => Array.from({length: layers}, (_, l) =>
    Array.from(data.slice((i * layers + l) * k, (i * layers + l + 1) * k))));
}

function count(token) {
  token.experts.forEach((_, l) => {
    load[l] ??= {total: 0, of: [], first: []};
    load[l].total += 1;
    picked(token, l).forEach((e, place) => {
      load[l].of[e] = (load[l].of[e] ?? 0) + 1;
      if (place === 0) load[l].first[e] = (load[l].first[e] ?? 0) + 1;
    });
  });
}

function addExperts(turn, start, rows) {
  rows.forEach((row, i) => {
    const token = turn.tokens[start + i - turn.skip];
    if (!token || token.experts) return;
    token.experts = row;
    count(token);
    paint(token);
    if (row.length && !model.picks) { model.picks = Math.max(...row.map(ids => ids.filter(e => e >= 0).length)); introduce(); }
  });
}

function forget(turn) {
  turn.element.remove();
  turns = turns.filter(one => one !== turn);
  tokens = turns.flatMap(one => one.tokens);
  load = [];
  tokens.forEach((token, index) => { token.index = token.element.dataset.index = index; if (token.experts) count(token); });
  point(-1);
}

function addTurn(request) {
  const {isChat, prompt} = request, turn = {request, isChat, tokens: [], skip: 0, count: 0, content: "", calls: [], shown: [],
    element: make("div"), decoder: new TextDecoder()};
  if (isChat) turn.element.append(make("div", "You", "who"), make("p", prompt, "question"), make("div", model.name, "who"));
  $("text").append(turn.element);
  turns.push(turn);
  return turn;
}

/** The place of what comes next in an answer: its thoughts, or what it says. */
function boxOf(turn, kind) {
  if (turn.kind !== kind) {
    turn.kind = kind;
    turn.box = make("div");
    if (kind === "thoughts") {
      const details = make("details");
      details.open = true;
      details.append(make("summary", "Thoughts"), turn.box);
      turn.element.append(details);
    } else turn.element.append(turn.box);
  }
  return turn.box;
}

function addCalls(turn, calls) {
  for (const {index = 0, function: called = {}} of calls) {
    if (!turn.calls[index]) {
      const element = make("div", "Calls a tool: ", "call");
      element.append(turn.calls[index] = make("code"));
      turn.element.append(element);
      turn.calls[index].given = {name: "", arguments: ""};
    }
    const given = turn.calls[index].given;
    given.name += called.name ?? "";
    given.arguments += called.arguments ?? "";
    turn.calls[index].textContent = `${given.name}(${given.arguments})`;
  }
}

function feedChat(turn, {delta = {}, logprobs, finish_reason: end}) {
  const thought = delta.reasoning_content ?? delta.reasoning;
  const kind = thought ? "thoughts" : delta.content ? "content" : turn.kind ?? "content";
  const scores = logprobs?.content ?? [], said = turn.content + (delta.content ?? "");
  if (scores.length || thought || delta.content) {
    const box = boxOf(turn, kind);
    for (const one of scores) {
      const text = turn.decoder.decode(Uint8Array.from(one.bytes), {stream: true});
      const top = one.top_logprobs.map(other => [other.token, other.logprob, other.bytes.join()]);
      const isEnd = end === "stop" && one === scores.at(-1) && !said.endsWith(text);  // which is no text, as <|endoftext|>
      addToken(turn, box, {text: isEnd ? "" : text, name: one.token, id: one.bytes.join(), logprob: one.logprob, top, isPrompt: false});
      turn.count += 1;
    }
    if (!scores.length) box.append(thought || delta.content);
  }
  turn.content = said;
  if (delta.tool_calls) addCalls(turn, delta.tool_calls);
}

function feedText(turn, {text, logprobs: scores}) {
  if (!scores) return;
  const numGiven = turn.shown.length ? 0 : [...turn.request.prompt].length;
  turn.shown.push(...text);
  turn.content += text;
  scores.tokens.forEach((name, i) => {
    const offset = scores.text_offset[i], piece = turn.shown.slice(offset, scores.text_offset[i + 1] ?? turn.shown.length).join("");
    const top = Object.entries(scores.top_logprobs[i] ?? {}).sort((a, b) => b[1] - a[1]).map(([text, value]) => [text, value, text]);
    const isPrompt = offset < numGiven || scores.token_logprobs[i] === null;
    addToken(turn, boxOf(turn, "content"), {text: piece, name, id: name, logprob: scores.token_logprobs[i], top, isPrompt});
    if (!isPrompt) turn.count += 1;
  });
}

function feed(event, turn, begin) {
  const choice = event.choices[0];
  if (!choice) return;
  if (turn.isChat) feedChat(turn, choice); else feedText(turn, choice);
  if (choice.routed_experts) {
    const rows = readRows(choice.routed_experts), start = choice.routed_experts_start;
    if (turn.isChat && start === 0) turn.skip = rows.length - turn.tokens.length + 1;
    addExperts(turn, start, rows);
  }
  turn.end = choice.finish_reason ?? turn.end;
  const seconds = (performance.now() - begin) / 1000;
  turn.pace = `${plural(turn.count, "token")} in ${seconds.toFixed(1)} s (${(turn.count / seconds).toFixed(0)} per second)`;
  $("progress").textContent = turn.pace;
  due();
}

// ---- a token: what it could have been, and its experts

function tellToken(index) {
  const about = $("about"), token = tokens[index], old = document.querySelector(".token.chosen");
  old?.classList.remove("chosen");
  $("token").classList.toggle("open", Boolean(token));
  $("close").hidden = !token;
  if (!token) {
    about.replaceChildren(make("p", "Point at a token of the answer, or tap it: here you see what it could have been, and its experts.",
      "muted"));
    return;
  }
  token.element.classList.add("chosen");
  const head = make("p"), name = label(token);
  const whence = !token.isPrompt ? "generated" : token.text === "" ? "put before your text" : "of your text";
  head.append(make("code", name), ` ${whence}, token ${index + 1} of ${tokens.length}`);
  about.replaceChildren(head);
  const marks = [["\u2713", "stands in the text"], [SPACE, "is a space"], [RETURN, "is a new line"], [TAB, "is a tab"]];
  about.append(...alternatives(token), ...expertsOf(token));
  const used = marks.filter(([mark]) => about.textContent.includes(mark)).map(([mark, word]) => `${mark} ${word}`);
  if (used.length) about.append(make("p", used.join(", "), "muted"));
  const current = about.querySelector(".current");
  if (current) current.closest(".scroll").scrollTop = current.offsetTop;
}

function alternatives(token) {
  if (token.logprob == null) return [make("h3", "Could have been"), make("p", "The first token is given: the model did not predict it.", "muted")];
  const rows = token.top.map(([text, value, id]) => [named(text), Math.exp(value), id]);
  if (!rows.some(([, , id]) => id === token.id)) rows.push(["", Math.exp(token.logprob), token.id]);
  const rest = 1 - rows.reduce((sum, [, share]) => sum + share, 0), table = make("table");
  const add = (text, share, isTaken) => {
    const row = table.insertRow(), cell = make("td", "", "share"), bar = make("div");
    bar.style.width = `${100 * Math.min(1, share)}%`;
    cell.append(bar);
    row.append(make("th", isTaken ? `${text} \u2713` : text), make("td", percent(share)), cell);
    row.firstChild.scope = "row";
    if (isTaken) row.className = "taken";
  };
  for (const [text, share, id] of rows) add(id === token.id ? label(token) : text, share, id === token.id);
  if (rest > .0005) add("all others", rest, false);
  const head = make("h3", "Could have been ");
  head.append(make("span", "before temperature and top-p", "muted"));
  return [head, table];
}

function expertsOf(token) {
  if (!model.sizes.length) return [];
  if (!token.experts) {
    const why = "No colour, no experts: this is the last token of its answer. A token goes to experts when the model reads it to write the next.";
    return [make("h3", "Experts"), make("p", why, "muted")];
  }
  const box = make("div", "", "scroll"), table = make("table", "", "experts");
  token.experts.forEach((_, l) => {
    const row = table.insertRow(), cell = make("td");
    row.append(make("th", `layer ${l}`), cell);
    row.firstChild.scope = "row";
    if (l === layer) row.className = "current";
    picked(token, l).forEach((e, place) => {
      const one = make("b", e);
      colour(one, place === 0 ? [e] : place === 1 ? [undefined, e] : []);
      cell.append(one, " ");
    });
  });
  box.append(table);
  if (token.experts.length > 7) box.tabIndex = 0;
  return [make("h3", "Experts, the first pick first"), box];
}

// ---- the load of the experts

const sizeOf = l => Math.max(model.sizes[l] ?? 0, load[l]?.of.length ?? 0);
const shareOf = (l, e) => load[l]?.total ? (load[l].of[e] ?? 0) / load[l].total : 0;
const sharesOf = l => Array.from({length: sizeOf(l)}, (_, e) => shareOf(l, e));
const topOf = share => [.02, .05, .1, .15, .2, .25, .3, .4, .5, .6, .8].find(top => share <= top) ?? 1;

function due() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => { isDue = false; drawLoad(); });
}

function drawLoad() {
  const size = sizeOf(layer), shares = sharesOf(layer), hasLoad = Boolean(load[layer]?.total);
  $("chart").hidden = $("layers").hidden = !hasLoad;
  if (!hasLoad) return;
  const top = topOf(Math.max(...shares)), even = model.picks / size, bars = $("bars");
  if (bars.children.length !== size) {
    bars.replaceChildren(...shares.map((_, e) => {
      const slot = make("i"), bar = make("b");
      bar.style.setProperty("--first", hue(e));
      slot.append(bar);
      return slot;
    }));
    bars.classList.toggle("many", size > 64);
    $("expert").max = size - 1;
    const step = Math.max(1, Math.ceil(size / 4)), ticks = [];
    for (let e = 0; e < size - step / 2; e += step) ticks.push(make("span", e));
    $("ticks").replaceChildren(...ticks, make("span", size - 1));
  }
  shares.forEach((share, e) => { bars.children[e].firstChild.style.height = `${100 * share / top}%`; });
  $("most").textContent = `${Math.round(100 * top)} %`;
  $("even").style.bottom = `${100 * even / top}%`;
  $("even").hidden = even > top;
  $("scale").textContent = `Share of the ${plural(load[layer].total, "coloured token")} that each expert got; a token goes to ${model.picks}. `
    + `Dashed: ${percent(even)}, if all got the same.`;
  drawLayers();
  tellExpert();
}

function drawLayers() {
  const box = $("rows");
  if (box.children.length !== load.length) {
    box.replaceChildren(...load.map((_, l) => {
      const row = make("label", "", "layer"), name = make("span"), input = make("input");
      Object.assign(input, {type: "radio", name: "layer", checked: l === layer});
      input.addEventListener("change", () => choose(l));
      name.append(input, `layer ${l}`);
      row.append(name, make("span", "", "strip"), make("span"));
      return row;
    }));
  }
  load.forEach((_, l) => {
    const shares = sharesOf(l), most = Math.max(...shares), row = box.children[l], width = 100 / shares.length;
    const cells = shares.map((share, e) => `rgb(var(--ink) / ${(share / most).toFixed(2)}) ${e * width}% ${(e + 1) * width}%`);
    row.children[1].style.backgroundImage = `linear-gradient(to right, ${cells.join()})`;
    row.children[2].textContent = `busiest ${shares.indexOf(most)}: ${percent(most)}`;
  });
}

function choose(l) {
  layer = l;
  tokens.forEach(paint);
  introduce();
  light(-1);
  if (pointed >= 0) tellToken(pointed);
  drawLoad();
}

function sentence(e) {
  const found = load[layer], all = found.of[e] ?? 0;
  return `Expert ${e}: ${all} of ${plural(found.total, "token")} (${percent(all / found.total)}), the first pick for ${found.first[e] ?? 0}.`;
}

/** Numbers below the bars: of the expert that is pointed at, or those of the token. */
function tellExpert() {
  const slider = $("expert"), token = tokens[pointed], experts = lit >= 0 ? [lit] : token ? picked(token) : [];
  [...$("bars").children].forEach((slot, e) => slot.classList.toggle("lit", experts.includes(e)));
  $("bars").classList.toggle("lighting", experts.length > 0);
  if (!load[layer]?.total) { $("readout").textContent = ""; return; }
  slider.setAttribute("aria-valuetext", sentence(Number(slider.value)));
  $("readout").textContent = lit >= 0 ? sentence(lit) : experts.length
    ? `Of all tokens ${experts.map(e => `expert ${e} got ${percent(shareOf(layer, e))}`).join(", ")}.`
    : "Point at a bar or move the slider: the numbers of an expert are here, and its tokens light up.";
}

/** Lights the tokens of an expert; -1: of none. */
function light(e) {
  lit = e;
  $("text").classList.toggle("lighting", e >= 0);
  for (const token of tokens) token.element.classList.toggle("lit", e >= 0 && picked(token).includes(e));
  tellExpert();
}

function point(index) {
  pointed = index;
  tellToken(index);
  tellExpert();
}

// ---- pointing: mouse, touch and keys

const indexAt = event => Number(event.target.dataset?.index ?? -1);
$("text").addEventListener("mousemove", event => {
  const isMoved = event.movementX !== 0 || event.movementY !== 0;  // else the text has moved below the pointer
  if (isMoved && indexAt(event) >= 0 && indexAt(event) !== pointed) point(indexAt(event));
});
$("text").addEventListener("mouseleave", () => held >= 0 && held !== pointed && point(held));
$("text").addEventListener("click", event => indexAt(event) >= 0 && event.target.focus());
$("text").addEventListener("focusin", event => {
  if (indexAt(event) < 0) return;
  document.querySelectorAll("#text .token[tabindex='0']").forEach(one => { one.tabIndex = -1; });
  event.target.tabIndex = 0;
  point(held = indexAt(event));
});
$("text").addEventListener("keydown", event => {
  const step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -1e9, End: 1e9}[event.key];
  if (!step || indexAt(event) < 0) return;
  event.preventDefault();
  tokens[Math.max(0, Math.min(tokens.length - 1, indexAt(event) + step))].element.focus();
});
function barAt(event) {
  const box = $("bars").getBoundingClientRect();
  return Math.max(0, Math.min(sizeOf(layer) - 1, Math.floor(sizeOf(layer) * (event.clientX - box.left) / box.width)));
}
const atSlider = () => document.activeElement === $("expert") ? Number($("expert").value) : -1;
$("bars").addEventListener("pointermove", event => light(barAt(event)));
$("bars").addEventListener("pointerleave", () => light(atSlider()));
$("bars").addEventListener("click", event => { $("expert").value = barAt(event); $("expert").focus(); light(atSlider()); });
for (const kind of ["input", "focus", "blur"]) $("expert").addEventListener(kind, () => light(atSlider()));
$("numbers").addEventListener("change", () => $("text").classList.toggle("numbered", $("numbers").checked));
$("close").addEventListener("click", () => { held = -1; point(-1); });
