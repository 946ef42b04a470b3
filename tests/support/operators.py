"""Which operators run."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Notes every operator that runs inside it, in their order, as `ran`."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it."""
        self.ran.append(func)
        return func(*args, **(kwargs or {}))
