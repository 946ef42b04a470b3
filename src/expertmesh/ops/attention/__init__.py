"""Attention of queries to the keys that they may see: what is visible, and who computes."""
