"""`python -m polybus.cli` is `polybus`."""

from polybus.cli import main

main(prog_name="polybus")
