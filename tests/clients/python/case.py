"""What every gate asks and asserts, and the lines of JSON that it prints for the runner: {"case", "error"}, null if it
passed."""

import asyncio
import inspect
import json
import sys
import traceback

from pydantic import BaseModel

ADDRESS, MODEL, GREETING = sys.argv[1:4]
BASE_URL = f"{ADDRESS}/v1"
KEY = "none"
HELLO = "Hello"
QUESTION = "What is the weather in Paris?"
AS_JSON = "Weather in Paris as JSON"
RESULT = "21 degrees and sunny"


class Weather(BaseModel):
    """Form of a structured answer."""

    city: str
    celsius: int


class Tool:
    """`get_weather` as a function, which keeps the cities that it was asked for."""

    def __init__(self):
        self.cities = []

    def __call__(self, city: str) -> str:
        self.cities.append(city)
        return RESULT


def is_greeting(text):
    """Asserts that a text is the greeting."""
    assert text == GREETING, f"the answer is {text!r}"


def is_greeting_in_pieces(pieces):
    """Asserts that pieces of text are several, and the greeting."""
    pieces = [piece for piece in pieces if piece]
    assert len(pieces) > 1, f"the answer came in {len(pieces)} pieces"
    is_greeting("".join(pieces))


def is_weather(found):
    """Asserts that a structured answer is about Paris."""
    assert isinstance(found, Weather), f"the answer is {found!r}"
    assert found.city == "Paris", f"the answer is {found!r}"


def is_round(tool, text):
    """Asserts that the model called the tool once, and answered with its result."""
    assert tool.cities == ["Paris"], f"the tool was called with {tool.cities}; the answer is {text!r}"
    assert text == "It is 21 degrees in Paris.", f"the answer is {text!r}"


def run(**cases):
    """Runs cases, coroutines too, in their order."""
    for name, case in cases.items():
        error = None
        try:
            result = case()
            if inspect.isawaitable(result):
                asyncio.run(result)
        except Exception as found:
            traceback.print_exc()
            text = " ".join(str(found).split())
            error = f"{type(found).__name__}: {text}"[:300]
        print(json.dumps({"case": name, "error": error}), flush=True)
