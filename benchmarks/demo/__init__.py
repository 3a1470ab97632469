"""The demo (`make demo`): the ops beside their references, and a language model trained on both."""
