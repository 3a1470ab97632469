"""The version of jaxops."""

__version__ = "0.2.0.dev0"
