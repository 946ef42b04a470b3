"""`Product`: sizes and count of a matrix product of a training step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Product:
    """x w^T with x (num_rows, in_features) and w (out_features, in_features), and the two products of its backward pass.

    Attributes:
        num_rows: tokens, or rows of one expert.
        in_features: columns of x.
        out_features: columns of the result.
        count: number of times per step.
    """

    num_rows: int
    in_features: int
    out_features: int
    count: int = 1

    @property
    def size(self) -> int:
        """Multiply-adds of the forward pass, once."""
        return self.num_rows * self.in_features * self.out_features
