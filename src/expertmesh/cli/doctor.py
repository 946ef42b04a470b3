"""`expertmesh doctor`: report capabilities of this machine and installation, with reasons for missing ones."""

import importlib.metadata
import logging
import os
import platform
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import model_validator

from expertmesh.cli.binding import (
    Binding,
    Mark,
    core_ranges,
    own_binding,
    threads_verdict,
)
from expertmesh.cli.parse import parsed
from expertmesh.cli.prog_name import Flags
from expertmesh.cli.torchrun import once_per_host
from expertmesh.comm.bind import numa_nodes, read_text
from expertmesh.comm.cores import allowed_cores, cpu_quota, users_threads
from expertmesh.config.base import FieldError
from expertmesh.config.fields import NewFile, Operation
from expertmesh.config.launched import is_launched, launched_rank
from expertmesh.errors import Line as Text
from expertmesh.errors import command

PACKAGES = {
    "torch": "",
    "numpy": "",
    "pydantic": "",
    "rich": "",
    "tokenizers": "",
    "triton": "GPU kernels; comes with GPU builds of torch",
    "tensorboard": "event files of training runs; extra 'train'",
    "datasets": "--data.dataset; extra 'train'",
    "transformers": "its models on our experts; extra 'hf'",
    "peft": "its adapters on experts",
    "lm_eval": "expertmesh evaluate; extra 'evaluate'",
    "plotly": "the page of expertmesh report; extra 'report'",
    "pillow": "image files; extra 'vision'",
    "pyarrow": "texts in .parquet; extra 'formats'",
    "zstandard": "texts in .zst; extra 'formats'",
    "sacrebleu": "BLEU and chrF of expertmesh translate; extra 'train'",
}

WIDTH = 120
"""Columns of the report without a terminal, if COLUMNS is not set."""

_NAMES = 24
"""Minimum columns of the names."""
_COLOURS = {"yes": "green", "no": "red", "": ""}

CONNECT_TIMEOUT_S = 60.0
"""Timeout for ranks to connect."""

SHOWN_RECIPES = ("gpt-moe-demo", "gpt-moe-1b")
"""Small and large model for which `--train.dtype auto` and the number of threads are said."""

BF16_INSTRUCTIONS = {"amx_bf16": "AMX BF16 tiles", "avx512_bf16": "AVX-512 BF16 dot products"}


@dataclass(frozen=True)
class Finding:
    """Entry of the report."""

    name: str  # subject
    mark: Mark  # whether it works here; "" if not applicable
    detail: str  # value, or reason for "no"


class DoctorVerb(Operation):
    """Lists supported features of this machine and installation, and why others are missing.

    examples:
      expertmesh doctor
      torchrun --nproc-per-node 4 -m expertmesh doctor --cluster mine.toml
    """

    topology: bool = False
    """print only the stored link measurements and tuning results, by topology"""
    cluster: NewFile | None = None
    """measure the devices of all ranks, write a cluster file for plan, and exit"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.topology and self.cluster is not None:
            rule = "has no effect with --cluster, which only measures"
            raise FieldError("topology", True, rule, "leave one of the two out")
        return self


def run(argv: list[str]) -> int:
    """Print the report and return 0, whatever is missing.

    Under torchrun rank 0 prints, with the binding of each rank.
    """
    with once_per_host():
        options = parsed(DoctorVerb, argv)
    if options.cluster is not None:
        return _write_cluster(options.cluster)
    only_topology = options.topology
    sections = {"Topologies": topologies} if only_topology else dict(SECTIONS)
    if is_launched() and not only_topology:
        bindings = _gather_bindings()
        sections["Ranks"] = lambda: ranks(bindings)
    if launched_rank()[0] > 0:
        return 0
    from rich.console import Console
    from rich.text import Text as Styled

    console = Console(width=shutil.get_terminal_size((WIDTH, 0)).columns)
    for title, look in sections.items():
        console.print(Styled(title, "bold"), soft_wrap=True)
        for line in lines(look(), console.width):
            text = Styled(line.text)
            text.stylize(_COLOURS[line.mark], *line.place)
            # plain text: brackets in paths are not markup, and long words are not cut
            console.print(text, highlight=False, soft_wrap=True)
        console.print()
    return 0


def _write_cluster(path: str) -> int:
    """Measure this machine, or the ranks that torchrun started, and write a cluster file."""
    import torch

    from expertmesh.cli.machine import measured_cluster, name_of, write_cluster
    from expertmesh.parallel.ranks import open_ranks

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with open_ranks(device_type=device, timeout_s=CONNECT_TIMEOUT_S) as ranks:
        world = ranks.world
        nodes = [0] if world is None else list(world.nodes())
        found = measured_cluster(world, nodes, name_of(path))
        if ranks.is_leader:
            print(f"cluster of {found.num_gpus} in {write_cluster(found, path)}")
            links = command(f"bench comm --cluster {path}")
            if world is not None:
                print(Flags("doctor").spell(Text(f"its links are assumed: {links} under torchrun measures them")))
    return 0


class ReportLine(NamedTuple):
    """Line of the report, and the position of a mark in it."""

    text: str
    mark: Mark = ""
    place: tuple[int, int] = (0, 0)


def lines(findings: Sequence[Finding], width: int) -> Iterator[ReportLine]:
    """Lines of findings in three columns, or one below another if a word does not fit the last column."""
    names = max([_NAMES, *(len(finding.name) + 3 for finding in findings)])
    details = names + 4
    longest = max(len(word) for finding in findings for word in [*finding.detail.split(), ""])
    is_narrow = details + longest > width or details > width // 2
    for finding in findings:
        mark = finding.mark
        if is_narrow:
            head = f"  {finding.name}" + (f"  {mark}" if mark else "")
            yield ReportLine(head, mark, (len(head) - len(mark), len(head)))
            head = below = " " * 4
        else:
            head, below = f"  {finding.name:<{names - 2}}{mark:<4}", " " * details
        parts = textwrap.wrap(
            finding.detail,
            width,
            initial_indent=head,
            subsequent_indent=below,
            break_long_words=False,
            break_on_hyphens=False,
        )
        if is_narrow:
            yield from map(ReportLine, parts)
            continue
        yield ReportLine(parts[0] if parts else head.rstrip(), mark, (names, names + len(mark)))
        yield from map(ReportLine, parts[1:])


def versions() -> list[Finding]:
    """Versions of Python and of relevant packages."""
    import expertmesh

    findings = [
        Finding("python", "", f"{platform.python_version()} ({sys.executable})"),
        Finding("expertmesh", "", expertmesh.__version__),
    ]
    for name, use in PACKAGES.items():
        try:
            findings.append(Finding(name, "", importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(name, "", "not installed" + (f" ({use})" if use else "")))
    return findings


def processor() -> list[Finding]:
    """Cores, memory, NUMA nodes, and the cores that this process may use."""
    import torch

    allowed, quota = allowed_cores(), cpu_quota()
    total = os.cpu_count() or 1
    pinned = f"cores {core_ranges(allowed)}" + ("" if len(allowed) < total else ", all of them")
    findings = [
        Finding("model", "", _cpu_name()),
        Finding("cores", "", f"{total}; this process may use {pinned}"),
        *([] if quota is None else [Finding("quota", "", f"{quota:g} cores' worth of time")]),
        Finding(
            "threads of torch",
            "",
            f"{torch.get_num_threads()} "
            f"({users_threads() or 'without OMP_NUM_THREADS runs measure how many are fastest'};"
            " --parallel.num-threads sets it)",
        ),
        Finding("memory", "", _memory()),
        Finding("huge pages", *_huge_pages()),
    ]
    nodes = numa_nodes()
    for node, cores in nodes.items():
        findings.append(Finding(f"NUMA node {node}", "", f"cores {core_ranges(cores)}"))
    if not is_launched():
        findings.append(Finding("binding", *own_binding().verdict()))
    return findings


def matrix_products() -> list[Finding]:
    """Libraries and instructions for matmuls on the CPU."""
    import torch

    from expertmesh.ops.cpu.products import goes_to_onednn

    build = torch.__config__.show()
    blas = re.search(r"BLAS_INFO=(\w+)", build)
    onednn = re.search(r"MKL-DNN v([\w.]+)", build)
    abilities = torch.cpu.get_capabilities()
    has_onednn = torch.backends.mkldnn.is_available()
    findings = [
        Finding("BLAS", "", blas.group(1) if blas else "unknown"),
        Finding(
            "oneDNN",
            "yes" if has_onednn else "no",
            (onednn.group(1) if onednn else "")
            if has_onednn
            else "this build of torch has none; BF16 is slow on the CPU",
        ),
        Finding("vector instructions", "", torch.backends.cpu.get_cpu_capability()),
    ]
    by_onednn = goes_to_onednn(torch.float32, torch.device("cpu"))
    findings.append(
        Finding(
            "large FP32 products",
            "",
            "oneDNN in our layers, because MKL would run AVX2 code here" if by_onednn else "as torch does them",
        )
    )
    for key, title in BF16_INSTRUCTIONS.items():
        has = bool(abilities.get(key, False))
        findings.append(Finding(title, "yes" if has else "no", "" if has else "not on this processor"))
    return findings


def devices() -> list[Finding]:
    """Accelerators that torch can use."""
    import torch

    if torch.cuda.is_available():
        findings = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = f"{properties.total_memory / 2**30:.0f} GiB"
            detail = f"{properties.name}, {memory}, capability {properties.major}.{properties.minor}"
            findings.append(Finding(f"cuda:{index}", "yes", detail))
        return findings
    if torch.version.cuda is None and torch.version.hip is None:
        why = f"torch {torch.__version__} is a CPU build; install a GPU build to use one"
    else:
        hip, cuda = torch.version.hip, torch.version.cuda
        built, tool = (f"ROCm {hip}", "rocm-smi") if hip else (f"CUDA {cuda}", "nvidia-smi")
        why = f"torch is built for {built} but finds no device; check the driver ({tool})"
    return [Finding("cpu", "yes", "used by --train.device auto"), Finding("cuda", "no", why)]


def precision() -> list[Finding]:
    """Effect of `--train.dtype auto` and number of threads: on a CPU for two recipes, on a GPU by its capability."""
    from expertmesh.config.run import TrainConfig
    from expertmesh.models.registry import DEFAULT, recipe
    from expertmesh.parallel.ranks import Ranks
    from expertmesh.runs.precision import resolve_precision
    from expertmesh.training.threads import settle_threads

    findings = []
    for name in SHOWN_RECIPES:
        products = DEFAULT.products_of(recipe(name))
        found = resolve_precision(TrainConfig(), products=products)
        findings.append(Finding(f"--train.dtype auto, {name}", "", found.description))
        if found.device.type == "cpu" and not is_launched():
            threads = settle_threads(Ranks(), products)
            findings.append(Finding(f"threads, {name}", "", threads.description))
    return findings


def backends() -> list[Finding]:
    """Backends of the operators."""
    from expertmesh.ops.backend import explain_backends

    return [Finding(report.name, "yes" if report.works else "no", report.why) for report in explain_backends()]


def communication() -> list[Finding]:
    """Process-group backends of this build of torch."""
    import torch.distributed

    if not torch.distributed.is_available():
        return [Finding("torch.distributed", "no", "this build of torch has none")]
    gloo, nccl = torch.distributed.is_gloo_available(), torch.distributed.is_nccl_available()
    no_nccl = "not in this build of torch" if torch.version.cuda is None else "not found"
    nccl_detail = "between GPUs" if nccl else f"{no_nccl}; needed between GPUs"
    return [
        Finding("gloo", "yes" if gloo else "no", "between CPU processes"),
        Finding("nccl", "yes" if nccl else "no", nccl_detail),
    ]


def topologies() -> list[Finding]:
    """Measured links and tuned plans on this machine's disk."""
    from expertmesh.costs.communication import assumed_links
    from expertmesh.parallel.experts.tuning_cache import known

    found = []
    for path, network, plans in known():
        if network is not None:
            links = ", ".join(
                f"{name} {link.bytes_per_s / 1e6:,.0f} MB/s and {link.latency_s * 1e6:,.0f} us"
                + (" (assumed)" if name in assumed_links(network) else "")
                for name, link in (("inside", network.inside), ("across", network.across))
            )
            found.append(Finding(path.stem, "", f"links: {links} ({path})"))
        for bucket, way in plans.items():
            text = ", ".join(f"{name} {value}" for name, value in vars(way).items())
            found.append(Finding(path.stem, "", f"{bucket}: {text}"))
    nothing = Finding(
        "links",
        "no",
        "nothing is known; torchrun --nproc-per-node N -m expertmesh bench comm measures",
    )
    return found or [nothing]


def ranks(bindings: Sequence[Binding]) -> list[Finding]:
    """Host, cores and GPU of each rank, and whether the threads of a host's ranks fit its cores."""
    findings = []
    for rank, binding in enumerate(bindings):
        mark, text = binding.verdict()
        findings.append(Finding(f"rank {rank}", mark, f"{binding.host}: {text}"))
    for host in dict.fromkeys(binding.host for binding in bindings):
        here = [binding for binding in bindings if binding.host == host]
        findings.append(Finding(f"threads of {host}", *threads_verdict(here)))
    return findings


def _gather_bindings() -> list[Binding]:
    """Bindings of all ranks."""
    import torch.distributed as dist

    from expertmesh.parallel.ranks import open_ranks

    local_rank = dist.get_node_local_rank()
    with open_ranks(device_type="cpu", timeout_s=CONNECT_TIMEOUT_S) as ranks:
        return ranks.gather(own_binding(local_rank=local_rank))


def compiler() -> list[Finding]:
    """Whether torch.compile works on the CPU, as the loops of large layers in training need; the test takes some
    seconds."""
    import torch

    from expertmesh.ops.cpu.compiled_loops import NO_COMPILER, example_values, make_loop

    log = logging.getLogger("expertmesh.ops")
    log.disabled = True  # its message is part of the report
    try:
        problem = make_loop(torch.neg, (example_values(3, 5),)).problem
    finally:
        log.disabled = False
    if not problem:
        why = "torch.compile works; large experts on the CPU train by loops that it makes"
        return [Finding("C++ compiler", "yes", why)]
    if problem.startswith(NO_COMPILER):
        problem = f"{problem.removesuffix('.')}; install g++, or name a compiler in CXX"
    cost = "All works without torch.compile on the CPU, but with large experts training takes about a tenth longer"
    return [Finding("C++ compiler", "no", f"{problem.removesuffix('.')}. {cost}")]


SECTIONS: dict[str, Callable[[], Sequence[Finding]]] = {
    "Versions": versions,
    "Processor": processor,
    "Matrix products on the CPU": matrix_products,
    "Devices": devices,
    "Precision": precision,
    "Backends of the operators": backends,
    "Communication": communication,
    "Compiler": compiler,
}


def _cpu_name() -> str:
    name = re.search(r"^model name\s*:\s*(.+)$", read_text(Path("/proc/cpuinfo")), flags=re.MULTILINE)
    return f"{name.group(1) if name else platform.processor() or 'unknown'} ({platform.machine()})"


def _huge_pages() -> tuple[Mark, str]:
    from expertmesh.parallel.huge_pages import huge_page_mode, in_huge_pages, is_wanted

    mode = huge_page_mode()
    with in_huge_pages():  # as serve loads
        wanted = is_wanted()
    if mode in ("", "never") or not wanted:
        why = f"transparent_hugepage is {mode or 'not there'}" if wanted else "turned off"
        return "no", f"{why}: weights are in pages of 4 KB, which are slower to read"
    kib = _meminfo().get("AnonHugePages")
    used = "" if kib is None else f"; {kib >> 10:,} MB of this machine's memory are in them"
    return "yes", f"for weights of serve, of 2 MB (transparent_hugepage is {mode}){used}"


def _memory() -> str:
    kib = _meminfo()
    if "MemTotal" not in kib:
        return "unknown"
    total, free = (kib.get(name, 0) / 2**20 for name in ("MemTotal", "MemAvailable"))
    return f"{total:.1f} GiB, {free:.1f} GiB available"


def _meminfo() -> dict[str, int]:
    """The kernel's counts of memory in KiB, by name; empty if it says none."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", read_text(Path("/proc/meminfo")), flags=re.MULTILINE)
    return {name: int(kib) for name, kib in found}
