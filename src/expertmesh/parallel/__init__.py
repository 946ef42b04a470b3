"""Models on many ranks: experts are sharded, sliced and gathered, dense layers sharded; results equal one process."""
