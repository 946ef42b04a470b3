"""As much of torchvision as the parents' examples need, over drawn images."""

from torchvision import datasets, transforms  # noqa: F401
