"""`python -m polybus.cli.reference` writes or checks the reference pages."""

from polybus.cli.reference import reference

reference()
