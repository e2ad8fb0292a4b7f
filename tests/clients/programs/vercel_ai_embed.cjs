// Vercel's AI SDK: embeddings of one text and of several, by the providers for OpenAI and for what is like it.
const { cosineSimilarity, embed, embedMany } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const assert = require("node:assert");

const [baseURL, name, apiKey] = [process.env.OPENAI_BASE_URL, process.env.MODEL, "none"];
const values = ["The dog naps on the hay.", "The captain drops the anchor.", "The ship crosses the sea."];

(async () => {
  const own = createOpenAICompatible({ name: "bireme", baseURL, apiKey });
  for (const model of [createOpenAI({ baseURL, apiKey }).embedding(name), own.textEmbeddingModel(name)]) {
    const { embeddings } = await embedMany({ model, values, maxRetries: 0 });
    const { embedding } = await embed({ model, value: values[1], maxRetries: 0 });
    assert.ok(cosineSimilarity(embedding, embeddings[1]) > 0.999);
    assert.ok(cosineSimilarity(embedding, embeddings[2]) > cosineSimilarity(embedding, embeddings[0]));
  }
  console.log("ok");
})();
