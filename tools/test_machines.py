"""The whole suite as on other machines: with the instructions of fewer processors, and with more threads.

    python tools/test_machines.py                      # everything, one setting after the other, a table at the end
    python tools/test_machines.py tests/ops tests/moe  # some folders; all further words go to pytest
    python tools/test_machines.py --settings avx2 threads-4 -- tests/ops

Sums have another order with other instructions and other numbers of threads, so what rests on luck fails here.
"""

import argparse
import getpass
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
AVX512 = {
    "ATEN_CPU_CAPABILITY": "avx512",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
    "MKL_ENABLE_INSTRUCTIONS": "AVX512",
}
# The threads of all workers outnumber the cores: those that wait must sleep, not spin.
SETTINGS = {
    "avx2": AVX2,
    "avx512": AVX512,  # neither BF16 instructions nor AMX
    "unrestricted": {},
    "threads-2": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"},
    "threads-4": {"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "PASSIVE"},
}
SUMMARY = re.compile(r"^(?=.*\b(?:passed|failed|error)).* in [\d.]+s.*$", re.MULTILINE)


def environment(name: str) -> dict[str, str]:
    """What a setting adds to the environment.

    Inductor's cache knows a loop by its source, not by the instructions that it was made for: a loop of sixteen numbers
    at once, read back where registers hold eight, gives wrong sums. So every set of instructions has a cache of its
    own.
    """
    instructions = SETTINGS[name].get("ATEN_CPU_CAPABILITY", "all")
    cache = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}_{instructions}"
    return {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)} | SETTINGS[name]


def run(name: str, words: list[str], workers: str) -> tuple[str, list[str], float]:
    """Pytest's last line in a setting, the tests that failed, and the seconds that it took."""
    env = os.environ | environment(name)
    command = [sys.executable, "-m", "pytest", "-n", workers, "-m", "not exhaustive", "-rf", *words]
    print(f"\n== {name}: {' '.join(f'{k}={v}' for k, v in SETTINGS[name].items())}", flush=True)
    start, lines = time.monotonic(), []
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    found = SUMMARY.findall("".join(lines))
    failed = [line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    last = found[-1].strip("= ") if found else f"ended with {process.returncode}"
    return last, failed, time.monotonic() - start


def main() -> int:
    """Run the settings one after the other; 0 if no test failed in any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--workers", default="auto", help="processes of pytest")
    parser.add_argument("words", nargs="*", help="passed to pytest")
    options = parser.parse_args()
    results = {name: run(name, options.words, options.workers) for name in options.settings}
    print("\n| setting | result | minutes |\n|---|---|---|")
    for name, (last, failed, seconds) in results.items():
        print(f"| {name} | {last} | {seconds / 60:.1f} |")
        for test in failed:
            print(f"| | {test} | |")
    return int(any(failed or "passed" not in last for last, failed, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main())
