"""The exceptions that ExpertMesh raises on purpose, in one leaf module."""


class ConfigError(ValueError):
    """A value given by the user breaks a rule.

    The message is one line and says the value, the rule and the fix, so that the command line can
    print it as it is.

    Example:
        >>> try:
        ...     MoELayer(dim=8, hidden_dim=16, num_experts=4, top_k=5)
        ... except ConfigError as error:
        ...     print(error)
        top_k=5: must be at most the fewest experts of a layer, 4; lower top_k or raise num_experts
    """


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged or of another model; the message names the file and the fix."""


class TrainingDivergedError(RuntimeError):
    """Too many steps in a row had a non-finite loss or gradient; names the last good checkpoint."""


class CollectiveError(RuntimeError):
    """Ranks lost one another: a collective failed or timed out; names the rank, the layer, the collective and its ranks."""


class PeerError(RuntimeError):
    """Another rank failed and has said why; this one stops quietly."""
