// Vercel's AI SDK: openai-compatible over chat completions, and @ai-sdk/openai over responses.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool as define } from "ai";
import { z } from "zod";
import {
  AS_JSON, BASE_URL, HELLO, KEY, MODEL, QUESTION, collected, isGreeting, isGreetingInPieces, isRound, isWeather, run, tool,
} from "./case.mjs";

const compatible = createOpenAICompatible({
  name: "expertmesh",
  baseURL: BASE_URL,
  apiKey: KEY,
  supportsStructuredOutputs: true,
  includeUsage: true,
})(MODEL);
const responses = createOpenAI({ baseURL: BASE_URL, apiKey: KEY })(MODEL);
const Weather = z.object({ city: z.string(), celsius: z.number().int() });

function casesOf(model) {
  const asked = (prompt, more = {}) => ({ model, prompt, temperature: 0, maxRetries: 0, ...more });
  const withTool = (called) => ({
    tools: {
      get_weather: define({
        description: "Weather of a city.",
        inputSchema: z.object({ city: z.string() }),
        execute: called.run,
      }),
    },
    stopWhen: stepCountIs(4),
  });
  return {
    async text() {
      isGreeting((await generateText(asked(HELLO))).text);
    },
    async stream() {
      isGreetingInPieces(await collected(streamText(asked(HELLO)).textStream));
    },
    async structured() {
      const output = Output.object({ schema: Weather });
      isWeather((await generateText(asked(AS_JSON, { output }))).output);
    },
    async tool() {
      const called = tool();
      isRound(called, (await generateText(asked(QUESTION, withTool(called)))).text);
    },
    async tool_streamed() {
      const called = tool();
      const stream = streamText(asked(QUESTION, withTool(called)));
      isRound(called, (await collected(stream.textStream)).join(""));
    },
  };
}

const prefixed = Object.entries(casesOf(responses)).map(([name, one]) => [`responses_${name}`, one]);
await run({ ...casesOf(compatible), ...Object.fromEntries(prefixed) });
