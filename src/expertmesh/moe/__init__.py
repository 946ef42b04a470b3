"""The mixture-of-experts layer: route -> assign -> dispatch -> experts -> combine. Knows no torch.distributed."""
