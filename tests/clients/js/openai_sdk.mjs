// The openai package of npm: chat completions, its runner of tools, and responses.

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  AS_JSON, BASE_URL, HELLO, KEY, MODEL, QUESTION, collected, isGreeting, isGreetingInPieces, isRound, isWeather, run, tool,
} from "./case.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: KEY, maxRetries: 0, timeout: 60_000 });
const said = (content) => [{ role: "user", content }];
const asked = (content, more = {}) => ({ model: MODEL, messages: said(content), temperature: 0, ...more });
const Weather = z.object({ city: z.string(), celsius: z.number().int() });
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};

async function round(options = {}) {
  const called = tool();
  const about = {
    name: "get_weather",
    description: "Weather of a city.",
    parameters,
    parse: JSON.parse,
    function: called.run,
  };
  const tools = [{ type: "function", function: about }];
  const runner = client.chat.completions.runTools(asked(QUESTION, { tools, ...options }));
  isRound(called, await runner.finalContent());
}

await run({
  async text() {
    isGreeting((await client.chat.completions.create(asked(HELLO))).choices[0].message.content);
  },
  async stream() {
    const chunks = await collected(await client.chat.completions.create(asked(HELLO, { stream: true })));
    isGreetingInPieces(chunks.map((chunk) => chunk.choices[0]?.delta.content));
  },
  async structured() {
    const form = asked(AS_JSON, { response_format: zodResponseFormat(Weather, "weather") });
    isWeather((await client.chat.completions.parse(form)).choices[0].message.parsed);
  },
  tool: () => round(),
  tool_streamed: () => round({ stream: true }),
  async responses_text() {
    isGreeting((await client.responses.create({ model: MODEL, input: HELLO, temperature: 0 })).output_text);
  },
  async responses_stream() {
    const events = await collected(
      await client.responses.create({ model: MODEL, input: HELLO, temperature: 0, stream: true }),
    );
    isGreetingInPieces(events.filter((e) => e.type === "response.output_text.delta").map((e) => e.delta));
  },
  async responses_tool() {
    const called = tool();
    const tools = [{ type: "function", name: "get_weather", description: "Weather of a city.", parameters, strict: true }];
    const input = said(QUESTION);
    const first = await client.responses.create({ model: MODEL, input, tools, temperature: 0 });
    for (const item of first.output) {
      input.push(item);
      if (item.type === "function_call") {
        const output = called.run(JSON.parse(item.arguments));
        input.push({ type: "function_call_output", call_id: item.call_id, output });
      }
    }
    const last = await client.responses.create({ model: MODEL, input, tools, temperature: 0 });
    isRound(called, last.output_text);
  },
});
