"""The version of the package, in a separate module so that every layer may import it."""

__version__ = "0.1.0"
