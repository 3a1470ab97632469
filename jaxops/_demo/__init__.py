"""The parts of `python -m jaxops`: what is here, the ops beside their references, a language model, the report."""
