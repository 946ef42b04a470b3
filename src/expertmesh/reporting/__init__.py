"""HTML reports of training runs: what they learned and how they used their experts."""
