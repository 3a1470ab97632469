"""Benchmarks of jaxops beside XLA, on the device at hand: `python -m benchmarks OP`."""
