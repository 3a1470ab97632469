"""The version of jaxops."""

__version__ = "0.1.0"
