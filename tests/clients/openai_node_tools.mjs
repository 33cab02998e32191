// Tools, structured output and responses with the `openai` package for Node against a running server:
//   npm install openai && BASE_URL=http://127.0.0.1:8000/v1 node openai_node_tools.mjs
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({
  baseURL: process.env.BASE_URL ?? "http://127.0.0.1:8000/v1",
  apiKey: process.env.OPENAI_API_KEY ?? "none",
});
const model = (await client.models.list()).data[0].id;
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Verona", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const messages = [{ role: "user", content: "What is the weather?" }];
const request = {
  model,
  messages,
  seed: 7,
  tools: [{ type: "function", function: { name: "get_weather", parameters, strict: true } }],
  tool_choice: "required",
  parallel_tool_calls: false,
};

const answer = await client.chat.completions.create(request);
const { function: called } = answer.choices[0].message.tool_calls[0];
assert.ok(["Verona", "Rome"].includes(JSON.parse(called.arguments).city));
assert.equal(answer.choices[0].finish_reason, "tool_calls");
console.log("tool call:", called.name, called.arguments);

const streamed = await client.chat.completions.stream(request).finalMessage();
assert.deepEqual(streamed.tool_calls[0].function.arguments, called.arguments);
console.log("stream helper: the same");

const runner = client.chat.completions.runTools({
  model,
  messages,
  seed: 7,
  max_tokens: 60,
  tool_choice: { type: "function", function: { name: "get_weather" } },
  tools: [{
    type: "function",
    function: {
      name: "get_weather", parameters, parse: JSON.parse,
      function: ({ city }) => `It is sunny in ${city}.`,
    },
  }],
});
const results = [];
runner.on("functionToolCallResult", (result) => results.push(result));
await runner.done().catch(() => {});
console.log("runTools called it:", results[0]);
assert.match(results[0], /^It is sunny in (Verona|Rome)\.$/);

const input = "What is the weather?";
const response = await client.responses.create({ model, input, max_output_tokens: 24, temperature: 0 });
console.log("responses:", JSON.stringify(response.output_text));
const kinds = new Set();
let text = "";
for await (const event of client.responses.stream({ model, input, max_output_tokens: 24, temperature: 0 })) {
  kinds.add(event.type);
  if (event.type === "response.output_text.delta") text += event.delta;
}
assert.equal(text, response.output_text);
console.log("responses, streamed: the same,", kinds.size, "kinds of events");

const format = { type: "json_schema", name: "place", schema: parameters, strict: true };
const shaped = await client.responses.create({ model, input, text: { format }, max_output_tokens: 200 });
assert.ok(["Verona", "Rome"].includes(JSON.parse(shaped.output_text).city));
console.log("responses, json_schema:", JSON.stringify(JSON.parse(shaped.output_text)));

const call = (await client.responses.create({
  model, input,
  tools: [{ type: "function", name: "get_weather", parameters, strict: true }],
  tool_choice: { type: "function", name: "get_weather" },
})).output[0];
assert.equal(call.type, "function_call");
console.log("responses, tool call:", call.name, call.arguments);
