"""``python -m kvcompile``: the command line, also under ``torchrun -m``."""

from kvcompile.cli import main

main()
