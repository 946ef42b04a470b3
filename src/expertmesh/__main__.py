"""`python -m expertmesh`, also under torchrun."""

from expertmesh.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
