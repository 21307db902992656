"""Compiles the kernels for GPUs that are not there: ``python -m batchinfer_kernels.aot``."""
