"""One module an op: its kernels, their derivative rules, the public function."""
