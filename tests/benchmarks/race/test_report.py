"""Verdicts follow from the numbers, goals from the GPU, and what several calls brought back makes one report."""

import json
from xml.etree import ElementTree

from benchmarks.race.shapes import SHAPES, chosen

from benchmarks.race import report, verdicts


def contender(name, speed):
    """A row of a shape's table."""
    phases = ("forward", "backward", "both")
    return {"contender": name} | {f"{phase} TFLOP/s": speed for phase in phases}


def a_record(**more):
    rows = [contender(n, v) for n, v in (("expertmesh", 400.0), (verdicts.LIGER, 300.0))]
    rows += [contender(verdicts.SONIC, 480.0), contender(verdicts.CUTE, 460.0)]
    layers = {"qwen3-8k": {"rows": rows, "experts": rows[:2], "notes": []}}
    return {"layers": layers, "metadata": [{"faster by": 30.0}], "machine": {}} | more


def test_hard_lines():
    lines = {(r["shape"], r["against"]): r for r in verdicts.hard_lines(a_record())}
    assert "holds" in lines["qwen3-8k", verdicts.LIGER]["verdict"]
    assert lines["qwen3-8k", verdicts.LIGER]["experts alone"] == "1.33 x"
    assert "MISSED" in lines["qwen3-8k", verdicts.SONIC]["verdict"]
    assert "holds" in lines["qwen3-8k", verdicts.CUTE]["verdict"]
    assert lines["qwen3-8k", verdicts.TRANSFORMERS]["verdict"] == "not raced"
    assert lines["blog-e2", verdicts.EINSUM]["verdict"] == "not raced"
    assert "holds" in lines["route_metadata", "one-hot + cumsum"]["verdict"]


def test_goals_are_scaled_on_a_slower_gpu():
    h200 = {"gpu": "NVIDIA H200, 139 GiB", "gemm_flops_per_s": 700e12, "copy_bytes_per_s": 4e12}
    rows = {r["pass"]: r for r in verdicts.goals(a_record(machine=h200))}
    words = {phase: row[""] for phase, row in rows.items()}
    assert words == {"forward": "not: 95 %", "backward": "reached", "both": "reached"}
    assert rows["forward"]["of SonicMoE"] == "0.83 x"
    assert rows["forward"]["published (not measured here)"].startswith("Liger CuTe 345 (H200)")
    h100 = h200 | {"gpu": "NVIDIA H100", "gemm_flops_per_s": 711e12}
    rows = {r["pass"]: r for r in verdicts.goals(a_record(machine=h100))}
    assert rows["forward"]["goal"] == 420 * 711 / 790
    assert rows["forward"][""] == "reached"


def test_skew_and_decoding():
    skew = [{"shape": "a", "loss": 0.05}, {"shape": "b", "loss": 0.2}]
    decode = [
        {"shape": "x", "T": 1, "bytes read": 4e6, "graph us": 2.1},
        {"shape": "x", "T": 32, "bytes read": 4e6, "graph us": 1.0},
    ]
    record = a_record(skew=skew, decode=decode, machine={"copy_bytes_per_s": 4e12})
    found = [row["verdict"] for row in verdicts.other_lines(record)]
    assert ["holds" in line for line in found] == [True, False, False, True]


def test_calls_make_one_report(tmp_path):
    def outcome(result, state="done"):
        return {"state": state, "seconds": 1.0, "result": result}

    for number, (call, parts) in enumerate(
        [
            ("peers", {"layers qwen3-8k": outcome({"rows": [], "experts": [], "notes": ["outdated"]})}),
            ("peers", {"layers qwen3-8k": outcome(a_record()["layers"]["qwen3-8k"]), "skew": outcome(None, "killed")}),
            ("kernels", {"kernels qwen3-8k": outcome({"check": "right", "kernels": [{"kernel": "up", "us": 9.0, "predicted us": 8.0}]})}),  # noqa: E501
        ]
    ):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / f"{call}.json").write_text(json.dumps({"parts": parts}))
    text = report.write([tmp_path / str(n) for n in range(3)], name="found")
    assert "qwen3-8k" in text and "8 us predicted" in text
    markdown = (tmp_path / "0" / "found.md").read_text()
    for words in ("## Hard lines", "## Goals", "## Kernels", "Experts alone", "| killed |"):
        assert words in markdown
    assert "outdated" not in markdown
    assert len(ElementTree.fromstring((tmp_path / "0" / "found.svg").read_text())) > 6
    assert set(json.loads((tmp_path / "0" / "found.json").read_text())["layers"]) == {"qwen3-8k"}


def test_operations_and_memory():
    qwen, blog, deepseek = chosen(("qwen3-8k", "blog-e2", "deepseek-8k"))
    assert qwen.flops("forward") == 6 * 8192 * 8 * 2048 * 768
    assert blog.flops("forward") == 4 * 32_768 * 2 * 2048 * 2048
    assert qwen.flops("both") == 3 * qwen.flops("forward")
    assert 20 * 2**30 < deepseek.weight_bytes < 23 * 2**30
    assert [deepseek.weight_sets(size) for size in (40 << 30, 78 << 30, 139 << 30)] == [0, 1, 2]
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)
