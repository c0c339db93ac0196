// Anthropic's client runs tools. Takes its settings as JSON, and prints what happened as JSON.
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { z } from "zod";

const { baseURL, authToken, model, models, streams, prompt, turns } = JSON.parse(process.argv[2]);
const client = new Anthropic({ baseURL, authToken, apiKey: null, maxRetries: 0 });

const given = [];
const places = [];
const add = betaZodTool({
  name: "add",
  description: "Add two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  run: ({ a, b }) => {
    given.push([a, b]);
    return `sum=${a + b}`;
  },
});
const go = betaZodTool({
  name: "go",
  description: "Walk.",
  inputSchema: z.object({ steps: z.union([z.literal(1), z.literal(2)]) }),
  run: ({ steps }) => {
    places.push((places.at(-1) ?? 0) + steps);
    return `place ${places.at(-1)}`;
  },
});

async function run() {
  const forced = { tool_choice: { type: "any", disable_parallel_tool_use: true }, temperature: 0 };
  const runner = client.beta.messages.toolRunner({
    model,
    messages: [{ role: "user", content: prompt }],
    tools: turns ? [go] : [add],
    max_tokens: turns ? 60 : 500,
    stream: streams,
    ...(turns ? forced : {}),
  });
  const messages = [];
  for await (const item of runner) {
    const message = streams ? await item.finalMessage() : item;
    messages.push(message);
    if (messages.length === turns) {
      const said = { role: "assistant", content: message.content };
      runner.setMessagesParams((params) => ({
        ...params, tool_choice: { type: "none" }, messages: [...params.messages, said],
      }));
    }
  }
  const text = messages.at(-1).content.find((block) => block.type === "text").text;
  return { given, places, text, reasons: messages.map((message) => message.stop_reason) };
}

async function list() {
  const found = [];
  for await (const each of client.models.list()) found.push(each);
  return found;
}

console.log(JSON.stringify(models ? await list() : await run()));
