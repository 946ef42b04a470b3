"""What a revision makes of the corpus, in numbers that do not depend on the processor.

Everything is computed in FP64 and rounded to FP32: another order of sums changes the last bits of FP64 only.
"""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from tests.corpus.cases import FILES, STEPS, config_of
from tests.support.runs import lines_of, train_quietly

import expertmesh as em


def resumed_losses(name: str, moments: str | None) -> list[float]:
    """Losses of the next two steps of a run, rounded to FP32.

    Args:
        name: name of the case.
        moments: type that the moments are converted to; None: none.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        shutil.copytree(FILES / "runs" / name, run)
        config = config_of(name, run, Path(folder, "cache"), steps=STEPS + 2, moments=moments)
        train_quietly(config)
        found = [line["loss"] for line in lines_of(run) if line["step"] > STEPS]
    return [float(np.float32(loss)) for loss in found]


def folder_numbers(name: str) -> list[float]:
    """Last logits of a hub folder's model, or logprobs of an answer with adapters.

    Args:
        name: folder of `files/folders`; "adapter" is one of "whole".
    """
    folder = FILES / "folders" / ("whole" if name == "adapter" else name)
    model = em.load(str(folder)).model
    model.double().eval()
    if name == "adapter":
        engine = em.Engine(model, adapters={"a": FILES / "folders" / name})
        params = em.SamplingParams(temperature=0, max_tokens=6, logprobs=0)
        (answer,) = engine.generate([list(range(3, 23))], params, adapter="a")
        numbers = [one.logprob for one in answer.logprobs]
    else:
        with torch.no_grad():
            numbers = model(torch.arange(3, 23)[None]).logits_BSV[0, -1, :8].tolist()
    return [float(np.float32(number)) for number in numbers]
