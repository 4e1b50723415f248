// The `openai` SDK for Node, unchanged, against a gateway: node client.mjs BASE_URL.
// Prints one JSON object; the test beside it says what each part must be.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "Count to five." }];
const asked = {
  model: "smollm2:strict", messages, max_tokens: 24, seed: 3, logprobs: true, top_logprobs: 2,
};

async function tiersDeclared() {
  const body = { model: "smollm2", prompt: "1, 2, 3,", max_tokens: 4 };
  const calls = [
    client.completions.create(body, { headers: { "X-Consistency-Tier": "strict" } }),
    client.completions.create({ ...body, consistency_tier: "strict" }),
    client.completions.create({ ...body, model: "smollm2:strict" }),
    client.completions.create(body),
  ];
  const answers = await Promise.all(calls.map((call) => call.withResponse()));
  return answers.map(({ response }) => response.headers.get("x-consistency-tier"));
}

async function streamed() {
  const stream = await client.chat.completions.create({
    ...asked, stream: true, stream_options: { include_usage: true },
  });
  let text = "", usage = null, logprobs = [];
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    logprobs.push(...(chunk.choices[0]?.logprobs?.content ?? []));
    usage = chunk.usage ?? usage;
  }
  return { text, usage, logprobs };
}

async function toolCalled() {
  const city = { type: "string", enum: ["Bergen", "Rome"] };
  const parameters = {
    type: "object", properties: { city }, required: ["city"], additionalProperties: false,
  };
  const answer = await client.chat.completions.create({
    model: "smollm2:strict", messages, max_tokens: 64, temperature: 0,
    tools: [{ type: "function", function: { name: "weather", parameters } }],
    tool_choice: { type: "function", function: { name: "weather" } },
  });
  const { name, arguments: given } = answer.choices[0].message.tool_calls[0].function;
  return { name, city: JSON.parse(given).city };
}

async function errorsTyped() {
  const wrong = [
    { model: "nobody", prompt: "x" },
    { model: "smollm2", prompt: "x", temperature: -1 },
    { model: "smollm2", prompt: "x", consistency_tier: "bold" },
  ];
  const names = [];
  for (const body of wrong) {
    try {
      await client.completions.create(body);
      names.push("answered");
    } catch (error) {
      names.push(`${error.constructor.name} ${error.code}`);
    }
  }
  return names;
}

const plain = await client.chat.completions.create(asked);
console.log(JSON.stringify({
  plain: {
    text: plain.choices[0].message.content,
    usage: plain.usage,
    logprobs: plain.choices[0].logprobs.content,
  },
  streamed: await streamed(),
  tiers: await tiersDeclared(),
  tool: await toolCalled(),
  errors: await errorsTyped(),
  models: (await client.models.list()).data.map((model) => model.id),
}));
