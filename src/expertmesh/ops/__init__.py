"""One file per operator, each with a plain-PyTorch oracle in reference.py."""
