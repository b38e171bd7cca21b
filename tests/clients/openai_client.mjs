// The openai package for Node: plain and streamed, aborted, refused. Prints "all of it" when everything was as it should.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "anything", maxRetries: 0, timeout: 120_000 });
const ask = { model, messages: [{ role: "user", content: "What is the capital of France?" }], temperature: 0, max_tokens: 12 };

const whole = await client.chat.completions.create(ask);
assert.match(whole.choices[0].message.content, /Paris/);
assert.ok(whole.usage.completion_tokens > 0);
assert.ok(whole._request_id);

let said = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } })) {
  said += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(said, whole.choices[0].message.content);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);

const runner = client.chat.completions.stream(ask);
const final = await runner.finalChatCompletion();
assert.equal(final.choices[0].message.content, said);

const completion = await client.completions.create({ model, prompt: "The capital of France is", max_tokens: 8, temperature: 0, logprobs: 2 });
assert.match(completion.choices[0].text, /Paris/);
assert.equal(completion.choices[0].logprobs.tokens.length, completion.usage.completion_tokens);

const models = await client.models.list();
assert.deepEqual(models.data.map((card) => card.id), [model]);

const long = await client.chat.completions.create({ ...ask, max_tokens: 500, stream: true });
let events = 0;
for await (const _ of long) {
  if (++events === 3) long.controller.abort();
}
assert.ok(events < 100, `${events} events came after the abort`);

await assert.rejects(client.chat.completions.create({ ...ask, model: "gpt-9" }), (error) => {
  assert.ok(error instanceof OpenAI.NotFoundError);
  assert.equal(error.code, "model_not_found");
  return true;
});
await assert.rejects(client.completions.create({ model, prompt: new Array(40_000).fill(1) }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.equal(error.code, "context_length_exceeded");
  return true;
});
console.log("all of it");
