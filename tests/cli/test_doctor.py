"""`expertmesh doctor` reports and never fails."""

import importlib.metadata
import re

import pytest
import torch

from expertmesh.cli import doctor
from expertmesh.cli.main import main
from expertmesh.costs.hardware import find_cluster
from expertmesh.ops.cpu import compiled_loops
from expertmesh.ops.cpu import products as cpu_products
from expertmesh.ops.cpu.compiled_loops import Loop


def details(findings):
    return {finding.name: finding for finding in findings}


def test_report_names_every_section_and_backend(capsys):
    from expertmesh.ops.backend import explain_backends

    assert main(["doctor"]) == 0
    captured = capsys.readouterr()
    # torch's own, where it is built for CUDA and finds a toolkit but no GPU
    assert not re.sub(r".*torch/utils/cpp_extension.*\n", "", captured.err)
    assert "\x1b" not in captured.out, "colours without a terminal"
    for title in doctor.SECTIONS:
        assert f"\n{title}" in f"\n{captured.out}"
    for report in explain_backends():
        assert f"  {report.name} " in captured.out


def test_a_report_is_as_wide_as_columns_says(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["doctor", "--topology"]) == 0
    words = max(map(len, capsys.readouterr().out.split()))
    assert main(["doctor", "--topology"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 50 < max(map(len, lines)) <= max(60, words + 4), lines


def test_texts_are_shown_as_they_are(monkeypatch, capsys):
    detail = "[red] ld: [/usr/lib] :smile:"
    monkeypatch.setitem(doctor.SECTIONS, "Versions", lambda: [doctor.Finding(detail, "no", detail)])
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.count(detail) == 2


def test_a_build_for_amd_without_a_device_names_its_own_tools(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    detail = details(doctor.devices())["cuda"].detail
    assert "built for ROCm 7.0" in detail and "rocm-smi" in detail


def test_versions_are_those_installed(monkeypatch):
    assert details(doctor.versions())["torch"].detail == importlib.metadata.version("torch")
    monkeypatch.setitem(doctor.PACKAGES, "of-nobody", "--data.dataset; extra 'train'")
    assert details(doctor.versions())["of-nobody"].detail.startswith("not installed (--data.dataset")


def test_auto_precision_says_why():
    for finding in doctor.precision():
        if finding.name.startswith("threads, gpt-moe-"):
            assert re.match(r"\d+ threads? \((for products|all that|OMP_NUM_THREADS=)", finding.detail)
            continue
        assert finding.name.startswith("--train.dtype auto, gpt-moe-")
        assert re.match(r"(float32|bfloat16) on cpu, kernels \w+ \(auto: .*AMX", finding.detail)


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
def test_no_word_is_cut_at_any_width(width):
    findings = [
        doctor.Finding("python", "", f"3.11.7 ({'/a-long/path' * 6})"),
        doctor.Finding("a name that is longer than others", "yes", "works, as it should"),
        doctor.Finding("cuda", "no", "this build of torch has none; install another"),
        doctor.Finding("nothing", "", ""),
    ]
    shown = list(doctor.lines(findings, width))
    words = [word for finding in findings for word in f"{finding.name} {finding.mark} {finding.detail}".split()]
    assert [word for line in shown for word in line.text.split()] == words
    for line in shown:
        assert len(line.text) <= max(width, 4 + max(map(len, line.text.split()))) or line.mark
        assert line.text[slice(*line.place)] == line.mark


@pytest.mark.parametrize(("library", "expected"), [("onednn", "oneDNN"), ("blas", "as torch")])
def test_who_multiplies_fp32(library, expected):
    with cpu_products.multiplying_by(library):
        detail = details(doctor.matrix_products())["large FP32 products"].detail
    assert detail.startswith(expected)


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        ("", "torch.compile works"),
        ("No working C++ compiler found in g++.", "found in g++; install g++"),
        ("No space left on device", "No space left on device. All works without"),
    ],
)
def test_a_compiler_is_tried(monkeypatch, problem, said):
    monkeypatch.setattr(compiled_loops, "make_loop", lambda *_: Loop(None, problem))
    (finding,) = doctor.compiler()
    assert finding.mark == ("no" if problem else "yes")
    assert said in finding.detail
    assert ("install" in finding.detail) == ("install" in said)


@pytest.mark.slow
def test_a_cluster_file_is_written_and_planned_on(tmp_path, capsys):
    path = tmp_path / "here.toml"
    assert main(["doctor", "--cluster", str(path)]) == 0
    assert "cluster of 1" in capsys.readouterr().out
    cluster = find_cluster(str(path))
    assert cluster.name == "here" and cluster.num_gpus == 1
    assert cluster.software.host_s > 0
    assert main(["plan", "gpt-moe-test", "--cluster", str(path)]) == 0
    assert "tokens/s" in capsys.readouterr().out


def test_a_cluster_file_that_cannot_be_is_one_line(tmp_path, capsys):
    assert main(["doctor", "--cluster", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
