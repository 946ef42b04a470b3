"""Expert parallelism: storage and gather of expert weights, and exchange of tokens between ranks."""
