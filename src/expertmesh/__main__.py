"""`python -m expertmesh`, also under torchrun."""

from expertmesh.cli.main import program

if __name__ == "__main__":
    program()
