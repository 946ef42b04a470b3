"""Parts that go wrong, for the tests of what a call does then."""

import os
import time


def fine(keep, value=1):
    """Give a value."""
    return {"value": value}


def hangs(keep):
    """Keep something and never return, with a child that does not either."""
    keep({"first": 1})
    if os.fork() == 0:
        time.sleep(600)
    time.sleep(600)


def raises(keep):
    """Keep something and fail."""
    keep({"first": 1})
    raise RuntimeError("a kernel is wrong")


def crashes(keep):
    """End as a process does that meets bad memory."""
    keep({"first": 1})
    os.abort()


def dies_at_the_second(keep):
    """Go on behind what the attempt before died of."""
    done = dict(keep.before or {})
    for name in ("a", "b", "c"):
        if done.get(name) == "begun":
            done[name] = "skipped"
        if name in done:
            continue
        done[name] = "begun"
        keep(done)
        if name == "b":
            os.abort()
        done[name] = "fine"
        keep(done)
    return done


def dies_at_once_after_the_first(keep):
    """Keep something, crash, and in the next attempt crash before anything is kept."""
    if keep.before is None:
        keep({"first": 1})
    os.abort()
