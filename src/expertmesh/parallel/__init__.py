"""Models on many ranks: experts spread, sliced and gathered, dense layers sharded; equal to one process."""
