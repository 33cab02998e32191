// The playground: a conversation with the model, plain completions, or vectors of texts.

import { headers, needsKey, whenKeyChanges } from "./access.js";

const FRAME_MS = 60; // least time between two renderings of an answer as Markdown

const $ = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
// Per second; slow ones with a decimal.
export const rate = (value) =>
  value > 0 && value < 9.95 ? value.toFixed(1) : number.format(value);
const markdown = window.markdownit({ breaks: true }); // HTML in texts stays text
markdown.disable("image"); // nothing is fetched from elsewhere
const link = markdown.renderer.rules.link_open ?? ((tokens, at, options, env, self) => self.renderToken(tokens, at, options));
markdown.renderer.rules.link_open = (tokens, at, options, env, self) => {
  tokens[at].attrSet("target", "_blank");
  tokens[at].attrSet("rel", "noopener noreferrer");
  return link(tokens, at, options, env, self);
};

let messages = []; // of the conversation, as the API takes them
let current = null; // AbortController of the answer that is being streamed

const endpoint = () => $("endpoint").value;
const chats = () => endpoint() === "chat";

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

function facts(text) {
  if ($("facts").textContent !== text) $("facts").textContent = text;
}

// -- what the server offers ------------------------------------------------------------------

let offered = "";
let takesImages = false;

// Called with every status; the endpoint is chosen once, by what the model can do.
export function showServer(status) {
  showImages(status);
  const models = status.models.join();
  if (models === offered) return;
  $("model").replaceChildren(...status.models.map((name) => new Option(name, name)));
  if (!offered) offer(status);
  offered = models;
}

// Images may be chosen while the engines that are there take them.
function showImages(status) {
  takesImages = status.takes_images;
  $("images-label").hidden = !(takesImages && chats());
}

function offer(status) {
  const task = status.pooling_task;
  const fits = (option) =>
    task === null ? ["completions", ...(status.has_chat_template ? ["chat"] : [])].includes(option.value)
      : option.value === (task.endsWith("classify") ? "classify" : "embeddings");
  for (const option of [...$("endpoint").options]) if (!fits(option)) option.remove();
  showEndpoint();
}

function showEndpoint() {
  const generates = ["chat", "completions"].includes(endpoint());
  for (const each of document.querySelectorAll(".generates")) each.hidden = !generates;
  for (const each of document.querySelectorAll(".chats")) each.hidden = !chats();
  $("images-label").hidden = !(takesImages && chats());
  $("max-tokens").placeholder = chats() ? "as many as fit" : "120";
  const labels = { chat: "Message", completions: "Text to continue", embeddings: "Texts, one per line", classify: "Texts, one per line" };
  $("prompt-label").textContent = labels[endpoint()];
  startAgain();
}

// -- the conversation ------------------------------------------------------------------------

function clear() {
  messages = [];
  const hints = { chat: "Ask the model something.", completions: "The model continues your text.",
    embeddings: "Shows how similar texts are.", classify: "Shows the scores of each text." };
  $("conversation").replaceChildren(element("p", "empty", hints[endpoint()]));
  $("prompt-label").textContent = $("prompt-label").textContent.replace(/^Result of .*/, "Message");
}

function startAgain() {
  current?.abort();
  clear();
}

function follow(change) {
  const log = $("conversation");
  const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function show(role, text) {
  const shown = element("article", `message ${role}`, text);
  follow(() => {
    $("conversation").querySelector(".empty")?.remove();
    $("conversation").append(shown);
  });
  return shown;
}

// One answer of the model while it arrives: reasoning folded, text as Markdown, tool calls.
class Answer {
  constructor(plain) {
    this.plain = plain;
    this.text = "";
    this.reasoning = "";
    this.calls = [];
    this.shown = show("assistant", "");
    this.body = element("div", plain ? "plain" : "markdown");
    this.shown.append(this.body);
    this.timer = null;
  }

  add(delta) {
    this.text += delta.content ?? delta.text ?? "";
    this.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
    for (const part of delta.tool_calls ?? []) {
      const call = (this.calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
      call.id += part.id ?? "";
      call.function.name += part.function?.name ?? "";
      call.function.arguments += part.function?.arguments ?? "";
    }
    this.timer ??= setTimeout(() => this.render(), FRAME_MS);
  }

  render() {
    clearTimeout(this.timer);
    this.timer = null;
    follow(() => {
      if (this.reasoning) this.showReasoning();
      if (this.plain) this.body.textContent = this.text;
      else this.body.innerHTML = markdown.render(this.text);
      this.shown.querySelectorAll(".call").forEach((each) => each.remove());
      for (const call of this.calls)
        this.shown.append(element("pre", "call", `${call.function.name}(${call.function.arguments})`));
    });
  }

  showReasoning() {
    if (!this.folded) {
      this.folded = element("details", "reasoning");
      this.folded.append(element("summary", "", "Reasoning"), element("div", "plain"));
      this.shown.prepend(this.folded);
    }
    this.folded.lastChild.textContent = this.reasoning;
  }

  message() {
    const made = { role: "assistant", content: this.text || null };
    if (this.calls.length) made.tool_calls = this.calls;
    return made;
  }
}

// The calls of the last answer whose results are not in the conversation yet.
function openCalls() {
  const last = messages.findLastIndex((each) => each.role === "assistant");
  const answered = messages.slice(last + 1).map((each) => each.tool_call_id);
  return (messages[last]?.tool_calls ?? []).filter((call) => !answered.includes(call.id));
}

// -- requests --------------------------------------------------------------------------------

const given = (id) => ($(id).value === "" ? undefined : Number($(id).value));

function request() {
  const body = {
    model: $("model").value || undefined,
    max_tokens: given("max-tokens"),
    temperature: given("temperature"),
    top_p: given("top-p"),
    seed: given("seed"),
    stream: true,
    stream_options: { include_usage: true },
  };
  if (!chats()) {
    body.max_tokens ??= 120; // the API's default is 16
    return ["/v1/completions", { ...body, prompt: $("prompt").value }];
  }
  const system = $("system").value.trim();
  body.messages = [...(system ? [{ role: "system", content: system }] : []), ...messages];
  if ($("response-format").value === "json_object") body.response_format = { type: "json_object" };
  if ($("tools").value.trim()) body.tools = JSON.parse($("tools").value);
  return ["/v1/chat/completions", body];
}

async function post(path, body, signal) {
  const answer = await fetch(path, {
    method: "POST", signal, body: JSON.stringify(body),
    headers: { "Content-Type": "application/json", ...headers() },
  });
  if (answer.ok) return answer;
  if (answer.status === 401) needsKey();
  const error = await answer.json().catch(() => null);
  throw new Error(error?.error?.message ?? `the server answered ${answer.status}`);
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

async function generate(answer, path, body, signal) {
  const began = performance.now();
  const response = await post(path, body, signal);
  let first = null;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const [choice] = chunk.choices;
    if (choice) {
      first ??= performance.now();
      answer.add(choice.delta ?? choice);
    }
    if (chunk.usage) showUsage(chunk.usage, began, first);
  }
}

function showUsage(usage, began, first) {
  const now = performance.now();
  const parts = [`${usage.prompt_tokens} prompt tokens`, `${usage.completion_tokens} output tokens`];
  if (first !== null) {
    parts.push(`first after ${number.format(first - began)} ms`);
    if (usage.completion_tokens > 1 && now > first + 50) // less cannot be told from no time
      parts.push(`${rate((1000 * (usage.completion_tokens - 1)) / (now - first))} tokens/s`);
  }
  facts(parts.join(", "));
}

// The data: URL of a file.
function dataOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
}

// What a user says: a text, or the chosen images and a text.
function saidBy(text, urls) {
  if (!urls.length) return text;
  const images = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return [...images, { type: "text", text }];
}

async function say(signal) {
  const text = $("prompt").value;
  let path, body;
  if (chats()) {
    const [call] = openCalls();
    const files = takesImages && !call ? [...$("images").files] : [];
    const urls = await Promise.all(files.map(dataOf));
    $("prompt").value = $("images").value = "";
    messages.push(call ? { role: "tool", tool_call_id: call.id, content: text } : { role: "user", content: saidBy(text, urls) });
    const shown = show(call ? "tool" : "user", text);
    for (const [at, url] of urls.entries()) {
      const image = element("img", "sent");
      [image.src, image.alt] = [url, files[at].name];
      shown.prepend(image);
    }
    if (openCalls().length) return;
  } else {
    clear();
  }
  try {
    [path, body] = request();
  } catch (error) {
    throw new Error(`Tools are not JSON: ${error.message}`);
  }
  const answer = new Answer(!chats());
  if (!chats()) answer.add({ text });
  try {
    await generate(answer, path, body, signal);
  } finally {
    answer.render();
    if (!answer.text && !answer.calls.length && !answer.reasoning) answer.shown.remove();
    else if (chats()) messages.push(answer.message());
  }
}

const cosine = (a, b) => {
  const dot = (x, y) => x.reduce((sum, value, at) => sum + value * y[at], 0);
  return dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b));
};

function showTable(rows) {
  const table = element("table", "scores");
  for (const cells of rows) {
    const row = table.insertRow();
    for (const cell of cells) row.insertCell().textContent = cell;
  }
  $("conversation").replaceChildren(table);
}

async function pool(signal) {
  const texts = $("prompt").value.split("\n").filter((line) => line.trim());
  const model = $("model").value || undefined;
  if (endpoint() === "embeddings") {
    const { data } = await (await post("/v1/embeddings", { model, input: texts }, signal)).json();
    const vectors = data.map((each) => each.embedding);
    showTable(vectors.map((row, at) => [texts[at], ...vectors.map((other) => cosine(row, other).toFixed(3))]));
    facts(`Cosine similarities of ${texts.length} vectors of ${vectors[0].length} numbers`);
  } else {
    const { data } = await (await post("/classify", { model, input: texts }, signal)).json();
    showTable(data.map((each, at) => [texts[at], each.label ?? "", ...each.probs.map((score) => score.toFixed(3))]));
    facts(`Scores of ${texts.length} texts`);
  }
}

async function send() {
  if (current || !$("prompt").value.trim()) return;
  const mine = new AbortController();
  current = mine;
  facts("");
  $("stop").disabled = false;
  $("send").disabled = true;
  $("conversation").setAttribute("aria-busy", "true"); // read out once, at the end
  const isChat = chats();
  try {
    const done = ["chat", "completions"].includes(endpoint()) ? say(mine.signal) : pool(mine.signal);
    await done;
  } catch (error) {
    facts(mine.signal.aborted ? "stopped" : `failed: ${error.message}`);
  } finally {
    current = null;
    $("stop").disabled = true;
    $("send").disabled = false;
    $("conversation").setAttribute("aria-busy", "false");
    if (isChat) {
      const [call] = openCalls();
      $("prompt-label").textContent = call ? `Result of ${call.function.name}` : "Message";
    }
  }
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  if (!["chat", "completions"].includes(endpoint()) && !event.ctrlKey && !event.metaKey) return; // lines are texts
  event.preventDefault();
  $("composer").requestSubmit();
});
$("stop").addEventListener("click", () => current?.abort());
$("clear").addEventListener("click", startAgain);
$("endpoint").addEventListener("change", showEndpoint);
whenKeyChanges(() => facts(""));
