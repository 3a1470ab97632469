"""Cases and helpers that the tests, the benchmarks and the demo share."""
