// The `openai` package for Node against a running server:
//   npm install openai && BASE_URL=http://127.0.0.1:8000/v1 node openai_node.mjs
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({
  baseURL: process.env.BASE_URL ?? "http://127.0.0.1:8000/v1",
  apiKey: process.env.OPENAI_API_KEY ?? "none",
});
const model = (await client.models.list()).data[0].id;
console.log(`model: ${model}`);

const messages = [{ role: "user", content: "Who is Romeo?" }];
const settings = { model, temperature: 0.7, seed: 7 };

const answer = await client.chat.completions.create({ ...settings, messages, max_tokens: 24 });
console.log("chat:", JSON.stringify(answer.choices[0].message.content));
assert.equal(answer.usage.completion_tokens <= 24, true);

let text = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...settings, messages, max_tokens: 24, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, answer.choices[0].message.content, "streamed and whole answers are the same");
assert.deepEqual(
  [usage.prompt_tokens, usage.completion_tokens],
  [answer.usage.prompt_tokens, answer.usage.completion_tokens],
);
console.log("streamed: the same, usage", JSON.stringify(usage));

const helper = client.chat.completions.stream({ ...settings, messages, max_tokens: 24 });
assert.equal((await helper.finalChatCompletion()).choices[0].message.content, text);
console.log("stream helper: the same");

const completion = await client.completions.create({
  ...settings, prompt: ["ROMEO:", "JULIET:"], max_tokens: 8, logprobs: 2, n: 2,
});
assert.equal(completion.choices.length, 4);
assert.equal(completion.choices[0].logprobs.tokens.length, 8);
console.log("completions:", JSON.stringify(completion.choices.map((each) => each.text)));

await assert.rejects(
  client.chat.completions.create({ model, messages, temperature: 9 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
);
await assert.rejects(
  client.chat.completions.create({ model: "another", messages }),
  (error) => error instanceof OpenAI.NotFoundError,
);
console.log("errors: typed, with the parameter's name");

const aborted = await client.completions.create({
  ...settings, prompt: "ROMEO:", max_tokens: 400, ignore_eos: true, stream: true,
});
for await (const _ of aborted) break;
console.log("a stream that was left early: closed");
