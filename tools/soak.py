"""`make soak`: 200 streaming clients for a minute, three times, a third of which leave in the middle.

A round before these brings what comes with the first requests: code that is loaded late, buffers, stacks of threads.
From then on nothing may grow: the memory behind the last round is at most 5 % above that before the first. How late the
event loop is depends on who else uses the cores; so that is said beside it.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.support.serving import make_run, served
from tests.support.soak import lag_ms, rss, soak

_MOST_GROWN = 0.05


def main() -> None:
    """Prints a line per round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = make_run(Path(place) / "tiny")
        with served(folder, "--num-blocks", "512", is_forked=False) as server:
            soak(server, clients=options.clients, seconds=options.seconds / 2, seed=99)
            before = rss(server)
            print(f"memory before {before / 2**20:.0f} MiB")
            for number in range(options.rounds):
                one = soak(server, clients=options.clients, seconds=options.seconds, seed=number)
                whole = sum(o.is_whole for o in one.outcomes)
                cut = sum(o.is_cut for o in one.outcomes)
                refused = sum(o.status == 429 for o in one.outcomes)
                print(
                    f"round {number}: {whole} whole, {cut} cut by the client, {refused} times 429, {len(one.strays)} "
                    f"else, {whole / one.seconds:.1f} requests/s; held two steps later: {one.held:g}; memory "
                    f"{one.rss_bytes / 2**20:.0f} MiB; loop late at p99 {lag_ms(server):.0f} ms, waited "
                    f"{one.loop_waited_s:.1f} s for a core; server and clients took {one.server_s:.1f} and "
                    f"{one.client_s:.1f} s of "
                    f"CPU in {one.seconds:.1f} s",
                    flush=True,
                )
                assert not one.strays and not one.held, one.strays[:3]
            grown = rss(server) / before - 1
            print(f"memory behind the rounds: {100 * grown:+.1f} % of that before (at most +5)")
    if grown > _MOST_GROWN:
        sys.exit("error: the server's memory grows")


if __name__ == "__main__":
    main()
