// The AI SDK (ai and @ai-sdk/openai-compatible): text whole and streamed, a tool, an object, embeddings.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(process.env.CLIENT_MODULES + "/x.js");
const load = async (name) => import(pathToFileURL(require.resolve(name)).href);
const { generateText, streamText, generateObject, embedMany, tool, jsonSchema } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");

const provider = createOpenAICompatible({
  name: "superfluid", baseURL: process.env.CLIENT_URL + "/v1", apiKey: process.env.CLIENT_KEY,
  includeUsage: true, supportsStructuredOutputs: true,
});
const model = provider(process.env.CLIENT_MODEL);
const story = { model, prompt: "Tell a short story about a lighthouse.", maxOutputTokens: 30, maxRetries: 0 };
const city = jsonSchema({
  type: "object", properties: { city: { type: "string", maxLength: 16 } }, required: ["city"], additionalProperties: false,
});
const need = (claim, words) => { if (!claim) throw new Error(String(words)); };

const jobs = {
  async whole() {
    const found = await generateText(story);
    need(found.text && found.usage.outputTokens > 5, JSON.stringify(found.usage));
  },
  async stream() {
    const found = streamText(story);
    let text = "";
    for await (const piece of found.textStream) text += piece;
    need(text && (await found.usage).outputTokens > 5, text);
    need((await found.finishReason) === "length" || (await found.finishReason) === "stop", "finish");
  },
  async tools() {
    const tools = { weather: tool({ description: "weather of a city", inputSchema: city }) };
    const asked = {
      model, prompt: "What is the weather in Paris?", tools, toolChoice: "required", maxOutputTokens: 80, maxRetries: 0,
      providerOptions: { superfluid: { parallel_tool_calls: false } },
    };
    const found = await generateText(asked);
    need(found.toolCalls[0].toolName === "weather" && found.toolCalls[0].input.city !== undefined, "a call");
    const streamed = streamText(asked);
    const calls = await streamed.toolCalls;
    need(calls[0].toolName === "weather", "a streamed call");
  },
  async structured() {
    const schema = jsonSchema({
      type: "object", properties: { name: { type: "string", maxLength: 16 }, age: { type: "integer", minimum: 0, maximum: 120 } },
      required: ["name", "age"], additionalProperties: false,
    });
    const found = await generateObject({ ...story, maxOutputTokens: 400, temperature: 0, schema });
    need(Object.keys(found.object).sort().join() === "age,name", JSON.stringify(found.object));
  },
  async embeddings() {
    const found = await embedMany({ model: provider.textEmbeddingModel(process.env.CLIENT_MODEL), values: ["hello", "world"] });
    need(found.embeddings.length === 2 && found.embeddings[0].length === 576, "two vectors");
  },
};

for (const [what, job] of Object.entries(jobs)) {
  let error = "";
  try { await job(); } catch (failure) { console.error(failure); error = String(failure).slice(0, 300) || "failed"; }
  console.log(JSON.stringify({ what, error }));
}
