"""The exceptions that ExpertMesh raises on purpose, in one leaf module."""


class ConfigError(ValueError):
    """A value given by the user breaks a rule.

    The message is one line and says the value, the rule and the fix, so that the command line can
    print it as it is.

    Example:
        >>> try:
        ...     em.recipe("gpt-moe-test", {"train.stepz": 3})
        ... except em.ConfigError as error:
        ...     print(error)
        train.stepz=3: unknown option; did you mean train.steps?
    """


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged or of another model; the message names the file and the fix.

    Example:
        >>> try:
        ...     model, tokenizer = em.load("runs/text")
        ... except em.CheckpointError as error:
        ...     print("train it first:", error)
    """


class TrainingDivergedError(RuntimeError):
    """Too many steps in a row had a non-finite loss or gradient; names the last good checkpoint.

    Example:
        >>> config = em.recipe("gpt-moe-test", {"data.path": "corpus.txt", "train.run_dir": "runs/gone"})
        >>> wild = config.updated({"model.init_std": 1e38, "train.max_bad_steps": 2})
        >>> try:
        ...     em.train(wild, quiet=True)
        ... except em.TrainingDivergedError as error:
        ...     print("lower the learning rate and begin anew")
        lower the learning rate and begin anew
    """


class CollectiveError(RuntimeError):
    """Ranks lost one another: a collective failed or timed out; names the rank, the layer, the collective and its ranks.

    Example:
        >>> def train_and_log(config):
        ...     try:
        ...         return em.train(config, quiet=True)
        ...     except em.CollectiveError as error:
        ...         print("torchrun starts all ranks again:", error)
        ...         raise
        >>> config = em.recipe("gpt-moe-test", {"data.path": "corpus.txt", "train.run_dir": "runs/text"})
        >>> train_and_log(config.updated({"train.resume": "auto"})).step
        20
    """


class PeerError(RuntimeError):
    """Another rank failed and has said why; this one stops quietly."""
