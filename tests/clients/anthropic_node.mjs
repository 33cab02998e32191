// Anthropic's own client for Node: a tool is run, whole and as a stream.
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({
  baseURL: (process.env.BASE_URL ?? "http://127.0.0.1:8000/v1").replace(/\/v1$/, ""),
  apiKey: "none",
});
const asked = {
  model: process.env.MODEL ?? "swell-shakespeare",
  max_tokens: 200,
  tools: [{
    name: "get_weather",
    description: "Tell the weather in a city.",
    input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  }],
};
const messages = [{ role: "user", content: "What is the weather in Oslo?" }];
const first = await client.messages.create({ ...asked, messages });
const call = first.content.find((block) => block.type === "tool_use");
messages.push(
  { role: "assistant", content: first.content },
  { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: `sunny in ${call.input.city}` }] },
);
const last = await client.messages.stream({ ...asked, messages }).finalMessage();
console.log(last.content.map((block) => block.text).join(""));
