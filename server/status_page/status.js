// Polls /status.json, shows it, and streams completions into the playground.

const POLL_MS = 1000;
const HISTORY = 120; // samples in a sparkline
const RATE_SAMPLES = 3; // polls over which the shown rates are taken
const KV_FULL = 0.9;

const $ = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${number.format(1000 * seconds)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${number.format(seconds / 60)} min`;
  if (seconds < 172800) return `${number.format(seconds / 3600)} h`;
  return `${number.format(seconds / 86400)} d`;
}

const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
const milliseconds = (seconds) =>
  seconds < 0.0995 ? `${(1000 * seconds).toFixed(1)} ms` : duration(seconds);

// -- rates from counters ---------------------------------------------------------------------

const samples = []; // the newest answers, oldest first

function enginesByProcess(status) {
  return new Map(status.engines.map((engine) => [`${engine.rank}/${engine.incarnation}`, engine]));
}

// Growth per second of a counter of every engine process that both answers know, by rank.
function growth(before, after, counter) {
  const seconds = after.time - before.time;
  const known = enginesByProcess(before);
  const rates = new Map();
  for (const [key, engine] of enginesByProcess(after)) {
    const old = known.get(key)?.counts;
    if (seconds > 0 && old && engine.counts)
      rates.set(engine.rank, Math.max(0, engine.counts[counter] - old[counter]) / seconds);
  }
  return rates;
}

const total = (rates) => [...rates.values()].reduce((sum, rate) => sum + rate, 0);

function meanFirstToken(before, after) {
  const count = after.first_token_times.count - before.first_token_times.count;
  const sum = after.first_token_times.sum - before.first_token_times.sum;
  return count > 0 && sum >= 0 ? sum / count : null;
}

// -- sparklines ------------------------------------------------------------------------------

class Sparkline {
  constructor(svg, peak, format) {
    this.line = svg.querySelector(".line");
    this.area = svg.querySelector(".area");
    this.peak = peak;
    this.format = format;
    this.values = [];
  }

  push(value) {
    this.values.push(value);
    if (this.values.length > HISTORY) this.values.shift();
    const known = this.values.filter((each) => each !== null);
    const top = Math.max(...known, 0);
    setText(this.peak, top > 0 ? `peak ${this.format(top)}` : "");
    const first = HISTORY - this.values.length;
    const points = this.values.map((each, index) => [
      first + index + 1,
      each === null ? null : 31 - 29 * (top > 0 ? each / top : 0),
    ]);
    this.line.setAttribute("d", Sparkline.runs(points, false));
    this.area.setAttribute("d", Sparkline.runs(points, true));
  }

  // Paths of the runs of known values; a lone one is drawn as a short dash.
  static runs(points, closed) {
    const paths = [];
    let run = [];
    for (const point of [...points, [0, null]]) {
      if (point[1] !== null) {
        run.push(point);
      } else if (run.length) {
        const [start] = run[0];
        if (run.length === 1) run.unshift([start - 0.8, run[0][1]]);
        const path = `M${run.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(2)}`).join("L")}`;
        const [last] = run[run.length - 1];
        paths.push(closed ? `${path}L${last.toFixed(1)} 32L${run[0][0].toFixed(1)} 32Z` : path);
        run = [];
      }
    }
    return paths.join("");
  }
}

const tokenSpark = new Sparkline($("token-spark"), $("token-peak"), (rate) => number.format(rate));
const firstSpark = new Sparkline($("first-spark"), $("first-peak"), milliseconds);

// -- engines ---------------------------------------------------------------------------------

function stateOf(engine) {
  if (!engine.ready) return [engine.draining ? "draining" : "starting", "warn"];
  if (engine.halted) return ["halted", "warn"];
  if (!engine.counts) return ["ready", "good"];
  if (engine.counts.waiting > 0) return ["queueing", "warn"];
  return engine.counts.running > 0 ? ["running", "good"] : ["idle", ""];
}

const CELLS = [
  ["State"], ["Running", "right"], ["Waiting", "right"], ["Prefill queue", "right"], ["KV usage"],
  ["Tokens/s", "right"], ["Steps/s", "right"], ["Preempted", "right"], ["Stats age", "right"],
];
const SVG = "http://www.w3.org/2000/svg";

function meterCell(cell) {
  const box = document.createElement("div");
  box.className = "meter";
  box.setAttribute("role", "meter");
  box.setAttribute("aria-valuemin", "0");
  box.setAttribute("aria-valuemax", "100");
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 100 8");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const bar = document.createElementNS(SVG, "rect");
  bar.setAttribute("height", "8");
  svg.append(bar);
  box.append(svg, document.createElement("span"));
  cell.append(box);
}

function engineRow(rank) {
  const row = document.createElement("tr");
  row.dataset.rank = rank;
  const head = document.createElement("th");
  head.scope = "row";
  const host = document.createElement("span");
  host.className = "host";
  head.append(String(rank), host);
  row.append(head);
  for (const [label, align] of CELLS) {
    const cell = document.createElement("td");
    cell.dataset.label = label;
    if (align) cell.className = align;
    row.append(cell);
  }
  const state = document.createElement("span");
  row.cells[1].append(state);
  meterCell(row.cells[5]);
  row.cells[5].querySelector(".meter").setAttribute("aria-label", `KV usage of engine ${rank}`);
  return row;
}

function showEngine(row, engine, tokenRate, stepRate) {
  const [word, mood] = stateOf(engine);
  const state = row.cells[1].firstChild;
  setText(state, engine.restarts ? `${word}, restarted ${engine.restarts}×` : word);
  state.className = `state ${mood}`;
  setText(row.querySelector(".host"), engine.host);
  const counts = engine.counts;
  const show = (index, value) => setText(row.cells[index], value);
  show(2, counts ? number.format(counts.running) : "–");
  show(3, counts ? number.format(counts.waiting) : "–");
  show(4, counts ? number.format(counts.queued_prefill_tokens) : "–");
  const meter = row.cells[5].firstChild;
  const usage = counts ? counts.kv_usage : 0;
  meter.querySelector("rect").setAttribute("width", (100 * usage).toFixed(1));
  meter.classList.toggle("full", usage > KV_FULL);
  meter.setAttribute("aria-valuenow", (100 * usage).toFixed(1));
  setText(meter.querySelector("span"), counts ? percent(usage) : "–");
  meter.title = engine.num_kv_blocks
    ? `${number.format(engine.num_kv_blocks)} blocks of ${engine.block_size} tokens` : "";
  show(6, tokenRate === undefined ? "–" : number.format(tokenRate));
  show(7, stepRate === undefined ? "–" : number.format(stepRate));
  show(8, counts ? number.format(counts.preemptions_total) : "–");
  show(9, duration(engine.stats_age));
}

function showEngines(status, before) {
  const body = $("engines");
  const rows = new Map([...body.rows].map((row) => [Number(row.dataset.rank), row]));
  const tokens = growth(before, status, "generation_tokens_total");
  const steps = growth(before, status, "step");
  status.engines.forEach((engine, index) => {
    const row = rows.get(engine.rank) ?? engineRow(engine.rank);
    rows.delete(engine.rank);
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] ?? null);
    showEngine(row, engine, tokens.get(engine.rank), steps.get(engine.rank));
  });
  for (const row of rows.values()) row.remove();
  $("no-engines").hidden = status.engines.length > 0;
  body.parentElement.hidden = status.engines.length === 0;
}

// -- the whole page --------------------------------------------------------------------------

function showState(status) {
  const ready = status.engines.filter((engine) => engine.ready).length;
  const badge = $("state");
  setText(badge, !status.ready ? "not ready" : status.running ? "running" : "paused");
  badge.className = `badge ${!status.ready ? "bad" : status.running ? "good" : ""}`;
  const number = Math.max(status.num_expected, status.engines.length);
  setText($("engines-title"), `Engines: ${ready} of ${number} ready`);
  const missing = status.missing.map(
    (each) => `${each.rank} (${each.reason.replace("_", " ")}, ${duration(each.age)})`);
  setText($("missing"), `Missing: ${missing.join(", ")}`);
  $("missing").hidden = missing.length === 0;
}

function showTiles(status, before, previous) {
  const counts = status.engines.map((engine) => engine.counts).filter(Boolean);
  const sum = (name) => counts.reduce((value, each) => value + each[name], 0);
  const rate = total(growth(before, status, "generation_tokens_total"));
  setText($("token-rate"), samples.length > 1 ? number.format(rate) : "–");
  const first = meanFirstToken(before, status);
  setText($("first-token"), first === null ? "–" : milliseconds(first));
  if (previous) {
    tokenSpark.push(total(growth(previous, status, "generation_tokens_total")));
    firstSpark.push(meanFirstToken(previous, status));
  }
  setText($("running"), number.format(sum("running")));
  setText($("waiting"),
    `${number.format(sum("waiting"))} waiting, ${number.format(sum("queued_prefill_tokens"))} prompt tokens queued`);
  const fullest = Math.max(0, ...counts.map((each) => each.kv_usage));
  setText($("kv"), counts.length ? percent(fullest) : "–");
  const queries = sum("prefix_cache_queries_total");
  setText($("hits"), queries
    ? `fullest engine; ${percent(sum("prefix_cache_hits_total") / queries)} prefix hits` : "fullest engine");
  setText($("wave"), number.format(status.wave));
  const wakeups = Object.values(status.wakeups_total).reduce((value, each) => value + each, 0);
  setText($("wakeups"), `${status.running ? "running" : "paused"}; woken ${number.format(wakeups)}×`);
  setText($("front-ends"), number.format(status.num_front_ends));
  setText($("uptime"), `up ${duration(Math.max(0, status.time - status.started))}`);
}

function showModels(status) {
  setText($("models"), status.models.join(", "));
  setText($("version"), `Swell ${status.version}`);
  if (status.has_chat_template && !samples.length) offerChat();
  const select = $("model");
  if ([...select.options].map((option) => option.value).join() !== status.models.join())
    select.replaceChildren(...status.models.map((name) => new Option(name, name)));
}

// A model that chats is first asked as one, unless the form has been used already.
function offerChat() {
  if ($("endpoint").value !== "completions" || $("prompt").value !== $("prompt").defaultValue) return;
  $("endpoint").value = "chat";
  $("prompt").value = "What can you tell me about the sea?";
}

function show(status) {
  const previous = samples[samples.length - 1];
  showModels(status);
  samples.push(status);
  if (samples.length > RATE_SAMPLES + 1) samples.shift();
  showState(status);
  showTiles(status, samples[0], previous);
  showEngines(status, samples[0]);
}

let key = ""; // kept here alone: gone with the page
$("api-key").addEventListener("change", () => {
  key = $("api-key").value.trim();
  if (key) poll();
});
$("access").addEventListener("submit", (event) => event.preventDefault()); // Enter has changed the key

function headers() {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function trouble(text) {
  $("trouble").hidden = !text;
  setText($("trouble"), text);
}

function showLocked() {
  samples.length = 0;
  setText($("state"), "locked");
  $("state").className = "badge warn";
  $("links").hidden = true;
  trouble(key ? "The server does not know this key." : "The server wants a key: enter it under API key.");
  if (!key && document.activeElement === document.body) $("api-key").focus();
}

async function poll() {
  try {
    const answer = await fetch("/status.json", {
      headers: headers(), cache: "no-store", signal: AbortSignal.timeout(5000),
    });
    if (answer.status === 401) return showLocked();
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    show(await answer.json());
    $("links").hidden = headers().Authorization !== undefined; // a link carries no key
    trouble("");
  } catch (error) {
    setText($("state"), "no connection");
    $("state").className = "badge bad";
    trouble(`Status unknown, trying again: ${error.message}`);
  }
}

async function keepPolling() {
  for (;;) {
    const began = performance.now();
    if (document.visibilityState === "visible") await poll();
    await new Promise((done) => setTimeout(done, Math.max(0, POLL_MS - (performance.now() - began))));
  }
}

// -- playground ------------------------------------------------------------------------------

let running = null; // AbortController of the stream that is shown

function requestOf() {
  const body = {
    model: $("model").value || undefined,
    max_tokens: Number($("max-tokens").value) || 16,
    temperature: Number($("temperature").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  if ($("endpoint").value === "chat")
    return ["/v1/chat/completions", { ...body, messages: [{ role: "user", content: $("prompt").value }] }];
  return ["/v1/completions", { ...body, prompt: $("prompt").value }];
}

// Yields the data of server-sent events.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) if (block.startsWith("data: ")) yield block.slice(6);
  }
}

async function stream(signal) {
  const [path, body] = requestOf();
  const began = performance.now();
  const answer = await fetch(path, {
    method: "POST", signal, body: JSON.stringify(body),
    headers: { "Content-Type": "application/json", ...headers() },
  });
  if (!answer.ok) {
    const error = await answer.json().catch(() => null);
    throw new Error(error?.error?.message ?? `the server answered ${answer.status}`);
  }
  const output = $("output");
  const shown = output.appendChild(document.createTextNode(""));
  let first = null;
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const choice = chunk.choices[0];
    const text = choice?.text ?? choice?.delta?.content ?? choice?.delta?.reasoning_content ?? "";
    if (text) {
      first ??= performance.now();
      const atEnd = output.scrollTop + output.clientHeight >= output.scrollHeight - 8;
      shown.appendData(text);
      if (atEnd) output.scrollTop = output.scrollHeight;
    }
    if (chunk.usage) showFacts(chunk.usage, began, first);
  }
}

function showFacts(usage, began, first) {
  const now = performance.now();
  const facts = [`${usage.prompt_tokens} prompt tokens`, `${usage.completion_tokens} output tokens`];
  if (first !== null) {
    facts.push(`first after ${milliseconds((first - began) / 1000)}`);
    if (usage.completion_tokens > 1 && now > first)
      facts.push(`${number.format((1000 * (usage.completion_tokens - 1)) / (now - first))} tokens/s`);
  }
  setText($("output-facts"), facts.join(", "));
}

async function play() {
  running?.abort();
  const mine = new AbortController();
  running = mine;
  $("output").textContent = "";
  setText($("output-facts"), "");
  $("stop").disabled = false;
  $("output").setAttribute("aria-busy", "true"); // read out once, at the end
  try {
    await stream(mine.signal);
  } catch (error) {
    if (running === mine) setText($("output-facts"), mine.signal.aborted ? "stopped" : `failed: ${error.message}`);
  } finally {
    if (running === mine) {
      running = null;
      $("stop").disabled = true;
      $("output").setAttribute("aria-busy", "false");
    }
  }
}

$("playground").addEventListener("submit", (event) => {
  event.preventDefault();
  play();
});
$("stop").addEventListener("click", () => running?.abort());
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("playground").requestSubmit();
});

keepPolling();
