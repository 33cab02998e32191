// Vercel's AI SDK with its default model for OpenAI, which speaks /v1/responses and refers to items of
// earlier answers:
//   npm install ai @ai-sdk/openai zod && BASE_URL=http://127.0.0.1:8000/v1 node ai_sdk_state.mjs
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const openai = createOpenAI({
  baseURL: process.env.BASE_URL ?? "http://127.0.0.1:8000/v1",
  apiKey: process.env.OPENAI_API_KEY ?? "none",
});
const model = openai("swell-shakespeare");
const settings = { model, maxOutputTokens: 24, maxRetries: 0 };

const messages = [{ role: "user", content: "Who is Juliet?" }];
const first = await generateText({ ...settings, messages });
console.log("first:", JSON.stringify(first.text));

// The second turn of a chat: the answer goes back as the SDK keeps it.
messages.push(...first.response.messages, { role: "user", content: "And Tybalt?" });
const second = await generateText({ ...settings, messages });
console.log("second turn:", JSON.stringify(second.text));
assert.ok(second.usage.inputTokens > first.usage.inputTokens);

const streamed = streamText({ ...settings, messages });
let text = "";
for await (const part of streamed.textStream) text += part;
assert.ok(text.length > 0);
messages.push(...(await streamed.response).messages, { role: "user", content: "Why?" });
console.log("third turn, after a stream:", JSON.stringify((await generateText({ ...settings, messages })).text));

const chained = await generateText({
  ...settings,
  prompt: "And Tybalt?",
  providerOptions: { openai: { previousResponseId: first.response.id } },
});
assert.ok(chained.usage.inputTokens > first.usage.inputTokens);
console.log("previousResponseId:", JSON.stringify(chained.text));

const { object } = await generateObject({
  ...settings,
  maxOutputTokens: 100,
  prompt: "Where are we?",
  schema: z.object({ place: z.enum(["Rome", "Verona"]) }),
});
console.log("generateObject:", JSON.stringify(object));

const called = await generateText({
  ...settings,
  maxOutputTokens: 200,
  prompt: "What is the weather?",
  tools: {
    weather: tool({
      strict: true,
      inputSchema: z.object({ city: z.enum(["Rome", "Verona"]) }),
      execute: ({ city }) => `sunny in ${city}`,
    }),
  },
  toolChoice: "required",
  providerOptions: { openai: { parallelToolCalls: false } }, // the bundled model would not stop calling
  stopWhen: stepCountIs(1),
});
console.log("tool:", called.toolResults[0].output);

const chat = await generateText({ ...settings, model: openai.chat("swell-shakespeare"), messages: messages.slice(0, 1) });
console.log("openai.chat:", JSON.stringify(chat.text));
