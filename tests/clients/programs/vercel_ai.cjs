// Vercel's AI SDK: whole, streamed, tools and objects over messages, responses and chat completions.
const { generateText, generateObject, streamText, tool, stepCountIs } = require("ai");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const assert = require("node:assert");
const { z } = require("zod");

const [baseURL, model, apiKey] = [process.env.OPENAI_BASE_URL, process.env.MODEL, "none"];
const openai = createOpenAI({ baseURL, apiKey });
const models = {
  messages: createAnthropic({ baseURL, apiKey })(model),
  responses: openai.responses(model),
  chat: openai.chat(model),
  compatible: createOpenAICompatible({ name: "bireme", baseURL, apiKey })(model),
};
const prompt = "What is 12 + 30?";

(async () => {
  for (const [name, served] of Object.entries(models)) {
    const whole = await generateText({ model: served, prompt, maxRetries: 0 });
    assert.equal(whole.text, "42", name);
    let streamed = "";
    for await (const text of streamText({ model: served, prompt, maxRetries: 0 }).textStream) streamed += text;
    assert.equal(streamed, "42", name);
    const tools = {
      get_weather: tool({
        description: "The weather in a city.",
        inputSchema: z.object({ city: z.string() }),
        execute: async ({ city }) => `sunny in ${city}`,
      }),
    };
    const asked = { model: served, prompt: "What is the weather in Oslo?", tools, maxRetries: 0 };
    const called = await generateText({ ...asked, toolChoice: "required", stopWhen: stepCountIs(1) });
    assert.equal(called.toolCalls[0].toolName, "get_weather", name);
  }
  const schema = z.object({ name: z.string(), age: z.number() });
  const made = await generateObject({ model: models.chat, schema, prompt: "Rosa is 7 years old.", maxRetries: 0 });
  assert.equal(typeof made.object.age, "number");
  console.log("ok");
})();
