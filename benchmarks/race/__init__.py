"""The race on one GPU: our layer against the best there are, checked, timed side by side, judged. See `__main__`."""
