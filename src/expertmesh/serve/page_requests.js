// ---- what is asked of the server, and the form that says it

const MODES = {
  text: {asks: "Text to continue", examples: ["def read_lines(path):", "import os", "Once upon a time"]},
  chat: {asks: "Your message", examples: ["Hello, who are you?", "What is a mixture of experts?", "Tell me a story about a robot."]},
};
const ENDS = {stop: "the model ended here", length: "stopped at the token limit", tool_calls: "the model calls a tool"};
let numAlternatives = 5;  // fewer where the server gives fewer

const mode = () => document.querySelector("[name=mode]:checked").value;

function headers() {
  const key = $("key").value.trim();
  return {"content-type": "application/json", ...(key ? {authorization: `Bearer ${key}`} : {})};
}

function say(text, isBad = false) { $("said").textContent = text; $("said").className = isBad ? "bad" : ""; }

/** The answer of the server; an error in its words. A server that gives fewer alternatives is asked for fewer. */
async function ask(request, signal) {
  for (;;) {
    const scores = request.isChat ? {logprobs: true, top_logprobs: numAlternatives} : {logprobs: numAlternatives};
    const answer = await fetch(request.isChat ? "v1/chat/completions" : "v1/completions",
      {method: "POST", headers: headers(), body: JSON.stringify({...request.body, ...scores}), signal});
    if (answer.ok) return answer;
    if (answer.status === 401) $("keybox").hidden = false;
    const error = (await answer.json().catch(() => null))?.error;
    if (answer.status !== 400 || !error?.param?.endsWith("logprobs") || numAlternatives === 0)
      throw new Error(tooLong(request, error) ?? error?.message ?? `the server answered ${answer.status}`);
    numAlternatives -= 1;
  }
}

/** In the page's words: a conversation that has become too long for the model. */
function tooLong(request, error) {
  const isLater = request.isChat && request.body.messages.length > 1;
  return error?.code === "context_length_exceeded" && isLater
    ? `the conversation no longer fits into the context of ${plural(model.context, "token")}; begin a new one` : null;
}

async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function readForm() {
  const isChat = mode() === "chat", prompt = $("prompt").value;
  const body = {stream: true, max_tokens: Number($("tokens").value), temperature: Number($("temperature").value),
    top_p: Number($("topp").value), return_routed_experts: true,
    seed: $("seed").value === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : Number($("seed").value)};
  if (!isChat) return {isChat, prompt, body: {...body, prompt, echo: true}};
  const before = turns.filter(turn => turn.isChat)
    .flatMap(turn => [{role: "user", content: turn.request.prompt}, {role: "assistant", content: turn.content}]);
  return {isChat, prompt, body: {...body, messages: [...before, {role: "user", content: prompt}]}};
}

function setRunning(control) {
  running = control;
  $("go").disabled = Boolean(control);
  $("stop").disabled = !control;
  const hasText = !control && turns.length > 0, isChat = turns.at(-1)?.isChat;
  for (const id of ["again", "copy"]) $(id).hidden = !hasText;
  $("fresh").hidden = !hasText || !isChat;
  $("hint").hidden = Boolean(control) || turns.length > 0;
  $("copy").textContent = isChat ? "Copy answer" : "Copy text";
}

async function generate(request) {
  if (running) return;
  const control = new AbortController(), begin = performance.now();
  for (const turn of request.isChat ? turns.filter(one => !one.isChat) : turns) forget(turn);
  const turn = addTurn(request);
  held = -1;
  light(-1);
  setRunning(control);
  say("");
  $("progress").textContent = "waiting for the first token";
  if (request.isChat) $("prompt").value = "";
  if (turns.length > 1) turn.element.scrollIntoView({block: "nearest"});
  else if ($("text").getBoundingClientRect().top > .8 * innerHeight) $("answer").scrollIntoView();
  try {
    for await (const event of eventsOf(await ask(request, control.signal))) feed(event, turn, begin);
    say(`${turn.pace}; ${ENDS[turn.end] ?? turn.end}; seed ${request.body.seed}`);
  } catch (error) {
    const isStopped = error.name === "AbortError";
    if (!turn.tokens.length) {
      forget(turn);
      if (request.isChat) $("prompt").value = request.prompt;
    }
    say(isStopped ? `stopped by you after ${plural(turn.count, "token")}; seed ${request.body.seed}` : `Error: ${error.message}`, !isStopped);
  }
  $("progress").textContent = "";
  setRunning(null);
  if (pointed >= 0) point(pointed);
}

async function copy() {
  const turn = turns.at(-1), box = make("textarea", turn.content);
  try {
    await navigator.clipboard.writeText(turn.content);
  } catch {  // a page that came over plain HTTP from another machine has no clipboard of its own
    document.body.append(box);
    box.select();
    document.execCommand("copy");
    box.remove();
  }
  $("copy").textContent = "Copied";
}

function setMode() {
  const now = MODES[mode()], others = Object.values(MODES).filter(one => one !== now).flatMap(one => one.examples);
  $("asks").textContent = now.asks;
  $("prompt").required = mode() === "chat";
  if ($("prompt").value === "" || others.includes($("prompt").value)) $("prompt").value = now.examples[0];
  $("examples").replaceChildren(make("span", "Examples:", "muted"), ...now.examples.map(text => {
    const button = make("button", text);
    button.type = "button";
    button.addEventListener("click", () => { $("prompt").value = text; $("form").requestSubmit(); });
    return button;
  }));
}

/** The sentences that say what the model is and what the colours are. */
function introduce() {
  const {name, sizes, picks} = model, size = [...new Set(sizes)].sort((a, b) => a - b), lede = $("lede");
  document.querySelectorAll(".with-experts").forEach(one => { one.hidden = !sizes.length; });
  lede.replaceChildren(make("b", name));
  if (sizes.length) {
    const each = size.length > 1 ? `${size[0]} to ${size.at(-1)}` : size[0];
    const where = sizes.length > 1 ? `A text passes through ${sizes.length} layers, one after the other, and each has ${each} small networks side by side, its experts`
      : `A text passes through a layer of ${each} small networks side by side, its experts`;
    lede.append(` is a mixture-of-experts model. ${where}. For every token (a word or a part of one) a router picks ${picks || "a few"} of them, and `
      + "only those compute. The colours show which.");
    $("coloured").textContent = `Colours show layer ${layer}` + (sizes.length > 1 ? " (choose another under Experts)" : "");
    $("load").textContent = `Experts in layer ${layer}`;
  } else lede.append(" is a dense model: it has no experts. This page shows its text token by token, and what each token could have been.");
}

const sizesIn = text => {
  const sizes = [];
  for (const line of text.split("\n")) {
    if (!line.startsWith("expertmesh:expert_tokens_total{")) continue;
    const [layer, expert] = ["layer", "expert"].map(name => Number(line.match(new RegExp(`[{,]${name}="(\\d+)"`))[1]));
    sizes[layer] = Math.max(sizes[layer] ?? 0, expert + 1);
  }
  return sizes;
};

async function greet() {
  const get = path => fetch(path, {headers: headers()}), answer = await get("tokenizer_info");
  if (!answer.ok) {
    $("keybox").hidden = answer.status !== 401;
    const error = (await answer.json().catch(() => null))?.error;
    const why = answer.status === 401 ? "This server needs an API key: type it above." : error?.message ?? `the server answered ${answer.status}`;
    return say(why, answer.status !== 401);
  }
  const facts = await answer.json(), models = await (await get("v1/models")).json();
  model.name = models.data[0].id;
  model.context = facts.model_max_length;
  model.sizes = sizesIn(await (await get("metrics")).text());
  $("model").textContent = `context ${plural(facts.model_max_length, "token")}, for your text and the answer`;
  document.title = `${model.name} - ExpertMesh`;
  $("tokens").max = facts.model_max_length;
  $("tokens").value = Math.min($("tokens").value, facts.model_max_length);
  document.querySelector("[value=chat]").disabled = !facts.chat_template;
  $("nochat").hidden = Boolean(facts.chat_template);
  if (facts.chat_template && !model.isKnown) { document.querySelector("[value=chat]").checked = true; setMode(); }
  model.isKnown = true;
  introduce();
  say("");
}

$("form").addEventListener("submit", event => { event.preventDefault(); generate(readForm()); });
$("stop").addEventListener("click", () => running?.abort());
$("again").addEventListener("click", () => { const turn = turns.at(-1); forget(turn); generate(turn.request); });
$("fresh").addEventListener("click", () => { [...turns].forEach(forget); setRunning(null); drawLoad(); say(""); });
$("copy").addEventListener("click", copy);
$("key").addEventListener("change", greet);
document.querySelectorAll("[name=mode]").forEach(one => one.addEventListener("change", setMode));
addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); $("form").requestSubmit(); }
  if (event.key === "Escape") { running?.abort(); held = -1; point(-1); }
});
setMode();
greet();
