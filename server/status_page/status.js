// Polls /status.json and shows it.

import { hasKey, headers, needsKey, whenKeyChanges } from "./access.js";
import { rate, showServer } from "./playground.js";

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

const tokenSpark = new Sparkline($("token-spark"), $("token-peak"), rate);
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
  show(6, tokenRate === undefined ? "–" : rate(tokenRate));
  show(7, stepRate === undefined ? "–" : rate(stepRate));
  show(8, counts ? number.format(counts.preemptions_total) : "–");
  show(9, duration(engine.stats_age));
}

function countedTokens(status) {
  return status.pooling_task ? "prompt_tokens_total" : "generation_tokens_total";
}

function showEngines(status, before) {
  const body = $("engines");
  const rows = new Map([...body.rows].map((row) => [Number(row.dataset.rank), row]));
  const tokens = growth(before, status, countedTokens(status));
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
  setText(badge, !status.ready ? "not ready" : status.running ? "running" : "ready");
  badge.className = `badge ${status.ready ? "good" : "bad"}`;
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
  const counted = countedTokens(status);
  const tokens = total(growth(before, status, counted));
  setText($("token-title"), status.pooling_task ? "Prompt tokens/s" : "Output tokens/s");
  $("first-tile").hidden = Boolean(status.pooling_task);
  setText($("token-rate"), samples.length > 1 ? rate(tokens) : "–");
  if (previous) {
    tokenSpark.push(total(growth(previous, status, counted)));
    firstSpark.push(meanFirstToken(previous, status));
  }
  // Where nothing begins, the last one within the sparkline stays.
  const first = meanFirstToken(before, status)
    ?? firstSpark.values.findLast((each) => each !== null);
  setText($("first-token"), first === undefined ? "–" : milliseconds(first));
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
  setText($("wakeups"), `${status.running ? "running" : "idle"}; woken ${number.format(wakeups)}×`);
  setText($("front-ends"), number.format(status.num_front_ends));
  setText($("uptime"), `up ${duration(Math.max(0, status.time - status.started))}`);
}

function showModels(status) {
  setText($("models"), status.models.join(", "));
  setText($("version"), `Swell ${status.version}`);
  showServer(status);
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

whenKeyChanges(poll);

function trouble(text) {
  $("trouble").hidden = !text;
  setText($("trouble"), text);
}

function showLocked() {
  samples.length = 0;
  setText($("state"), "locked");
  $("state").className = "badge warn";
  $("links").hidden = true;
  trouble(hasKey() ? "The server does not accept this key." : "This server needs an API key.");
  needsKey();
}

async function poll() {
  try {
    const answer = await fetch("/status.json", {
      headers: headers(), cache: "no-store", signal: AbortSignal.timeout(5000),
    });
    if (answer.status === 401) return showLocked();
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    show(await answer.json());
    $("links").hidden = hasKey(); // a link carries no key
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

keepPolling();
