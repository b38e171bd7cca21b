// The openai package for Node: answers from the results of tools, plain and streamed. Prints "all of it" at the end.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "anything", maxRetries: 0, timeout: 120_000 });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const weather = { Paris: "sun over Paris", Oslo: "rain over Oslo" };

for (const stream of [false, true]) {
  for (const [question, answer, cities] of [
    ["What is the weather in Paris?", "It is sunny in Paris.", ["Paris"]],
    ["What is the weather in Paris and Oslo?", "It is sunny in Paris and wet in Oslo.", ["Paris", "Oslo"]],
  ]) {
    const asked = [];
    const run = ({ city }) => {
      asked.push(city);
      return weather[city];
    };
    const tool = { name: "get_weather", description: "Report the weather.", parameters, parse: JSON.parse, function: run };
    const runner = client.chat.completions.runTools({
      model,
      messages: [{ role: "user", content: question }],
      tools: [{ type: "function", function: tool }],
      stream,
    });
    assert.equal(await runner.finalContent(), answer);
    assert.deepEqual(asked, cities);
    const roles = runner.messages.map((message) => message.role);
    assert.deepEqual(roles, ["user", "assistant", ...cities.map(() => "tool"), "assistant"]);
  }
}
console.log("all of it");
