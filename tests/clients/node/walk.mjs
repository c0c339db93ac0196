// A loop of an agent by the AI SDK. Takes its settings as JSON, and prints the places, the text and the reasons as JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { baseURL, apiKey, model, provider, streams, prompt, turns } = JSON.parse(process.argv[2]);
const openai = createOpenAI({ baseURL, apiKey });
const models = {
  compatible: () => createOpenAICompatible({ name: "asyncengine", baseURL, apiKey })(model),
  chat: () => openai.chat(model),
  responses: () => openai.responses(model),
};

const places = [];
const go = tool({
  description: "Walk.",
  inputSchema: z.object({ steps: z.union([z.literal(1), z.literal(2)]) }),
  execute: async ({ steps }) => {
    places.push((places.at(-1) ?? 0) + steps);
    return `place ${places.at(-1)}`;
  },
});

const asked = {
  model: models[provider](),
  prompt,
  tools: { go },
  temperature: 0,
  maxOutputTokens: 60,
  maxRetries: 0,
  providerOptions: { openai: { parallelToolCalls: false, store: false }, asyncengine: { parallel_tool_calls: false } },
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber < turns ? "required" : "none" }),
  stopWhen: stepCountIs(turns + 1),
};
let result;
if (streams) {
  const running = streamText({ ...asked, onError: ({ error }) => { throw error; } });
  let text = "";
  for await (const piece of running.textStream) text += piece;
  result = { text, steps: await running.steps };
} else {
  result = await generateText(asked);
}
const reasons = result.steps.map((step) => step.finishReason);
console.log(JSON.stringify({ places, text: result.text, reasons }));
