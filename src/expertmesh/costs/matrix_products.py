"""`Product`: sizes and count of a matrix product of a training step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Product:
    """x w^T with x (num_rows, in_features) and w (out_features, in_features), and the two products of its backward
    pass."""

    num_rows: int  # tokens, or rows of one expert
    in_features: int  # columns of x
    out_features: int  # columns of the result
    count: int = 1  # number of times per step

    @property
    def size(self) -> int:
        """Multiply-adds of the forward pass, once."""
        return self.num_rows * self.in_features * self.out_features
