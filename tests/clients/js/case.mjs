// What every gate asks and asserts, and the lines of JSON that it prints for the runner: {"case", "error"}, null if it passed.

import assert from "node:assert/strict";

export const [ADDRESS, MODEL, GREETING] = process.argv.slice(2);
export const BASE_URL = `${ADDRESS}/v1`;
export const KEY = "none";
export const HELLO = "Hello";
export const QUESTION = "What is the weather in Paris?";
export const AS_JSON = "Weather in Paris as JSON";
const RESULT = "21 degrees and sunny";

// `get_weather` as a function, with the cities that it was asked for.
export function tool() {
  const cities = [];
  return { cities, run: ({ city }) => (cities.push(city), RESULT) };
}

export function isGreeting(text) {
  assert.equal(text, GREETING);
}

export function isGreetingInPieces(pieces) {
  assert.ok(pieces.filter((piece) => piece).length > 1, `the answer came in ${pieces.length} pieces`);
  isGreeting(pieces.join(""));
}

export function isWeather(found) {
  assert.equal(found.city, "Paris");
  assert.ok(Number.isInteger(found.celsius), JSON.stringify(found));
}

export function isRound(called, text) {
  assert.deepEqual(called.cities, ["Paris"], `the tool was called with [${called.cities}]; the answer is ${text}`);
  assert.equal(text, "It is 21 degrees in Paris.");
}

export async function collected(stream) {
  const found = [];
  for await (const piece of stream) found.push(piece);
  return found;
}

export async function run(cases) {
  for (const [name, one] of Object.entries(cases)) {
    let error = null;
    try {
      await one();
    } catch (found) {
      console.error(found);
      error = `${found.name}: ${found.message}`.replace(/\s+/g, " ").slice(0, 300);
    }
    console.log(JSON.stringify({ case: name, error }));
  }
}
