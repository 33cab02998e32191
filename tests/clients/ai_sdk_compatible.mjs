// The AI SDK over chat completions: a tool is run, and the answer streams.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const swell = createOpenAICompatible({
  name: "swell",
  baseURL: process.env.BASE_URL ?? "http://127.0.0.1:8000/v1",
  includeUsage: true,
});
const asked = {
  model: swell(process.env.MODEL ?? "swell-shakespeare"),
  prompt: "What is the weather in Oslo?",
  maxRetries: 0,
  stopWhen: stepCountIs(3),
  tools: {
    get_weather: tool({
      description: "Tell the weather in a city.",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => `sunny in ${city}`,
    }),
  },
};
console.log((await generateText(asked)).text);
const streamed = streamText(asked);
let text = "";
for await (const part of streamed.textStream) text += part;
console.log(text);
