"""Drawn images of MNIST's shape."""

from tests.support.parents.images import learned
from tests.support.parents.torchvision import MNIST

losses = learned(MNIST())
