"""A language model of one's own text: python examples/own_text.py my_text.txt [recipe] [steps]

A file or a folder; started again, it goes on where it stopped.
"""

import sys

import expertmesh as em

path = sys.argv[1] if len(sys.argv) > 1 else None  # None: the source of Python's standard library
recipe = sys.argv[2] if len(sys.argv) > 2 else "gpt-moe-demo"
changes = {"data.path": path, "train.run_dir": "runs/own-text", "train.resume": "auto"}
if len(sys.argv) > 3:
    changes["train.steps"] = int(sys.argv[3])

result = em.train(em.recipe(recipe, changes))
print(f"{result.evaluation['bits_per_byte']:.3f} bits per byte after {result.step} steps")

model, tokenizer = em.load("runs/own-text")
for text in em.generate(model, tokenizer, ["The ", "In "], max_tokens=40):
    print("---", text)
