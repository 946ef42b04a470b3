"""Drawn images of CIFAR-10's shape."""

from tests.support.parents.images import learned
from tests.support.parents.torchvision import CIFAR10

losses = learned(CIFAR10())
